"""Sign-ins of command lines by device codes, as columns of their tokens.

Revision: r020. A database that r007 has just created has the columns already.
"""

import sqlalchemy as sa
from alembic import op

from layout_tuner.results_db.models.service_tables import TokenRow

revision = "r020"
down_revision = "r018"
branch_labels = None
depends_on = None

_HASHES = ("device_key", "device_part", "part_before", "user_code", "allowed_by")
_UNIQUE = ("device_key", "user_code")
_NEW = (*_HASHES, "asked_from", "asked_at", "ends_at")


def upgrade() -> None:
    there = {each["name"] for each in sa.inspect(op.get_bind()).get_columns("tokens")}
    for name in set(_NEW) - there:
        op.add_column("tokens", sa.Column(name, TokenRow.__table__.c[name].type))
    for name in set(_UNIQUE) - there:
        op.create_index(f"uq_tokens_{name}", "tokens", [name], unique=True)


def downgrade() -> None:
    op.execute("UPDATE tokens SET revoked_at = created_at WHERE device_key IS NOT NULL")
    for name in _UNIQUE:
        op.drop_index(f"uq_tokens_{name}", "tokens")
    for name in _NEW:
        op.drop_column("tokens", name)
