"""Sign-ins of owners and of command lines, as columns of their tokens; subjects of owners.

Revision: r020. A database that r007 has just created has the columns already.
"""

import sqlalchemy as sa
from alembic import op

from layout_tuner.results_db.models.service_tables import OwnerRow, TokenRow

revision = "r020"
down_revision = "r019"
branch_labels = None
depends_on = None

_UNIQUE = ("device_key", "user_code")
_OF_DEVICES = (*_UNIQUE, "device_part", "part_before", "allowed_by", "asked_from", "asked_at")
_NEW = {"tokens": (*_OF_DEVICES, "ends_at", "source", "id_token"), "owners": ("subject",)}
_TABLES = {"tokens": TokenRow.__table__, "owners": OwnerRow.__table__}


def upgrade() -> None:
    for table, names in _NEW.items():
        there = {each["name"] for each in sa.inspect(op.get_bind()).get_columns(table)}
        for name in set(names) - there:
            op.add_column(table, sa.Column(name, _TABLES[table].c[name].type))
            if name in (*_UNIQUE, "subject"):
                op.create_index(f"uq_{table}_{name}", table, [name], unique=True)


def downgrade() -> None:
    of_sign_ins = "device_key IS NOT NULL OR source IS NOT NULL"
    op.execute(f"UPDATE tokens SET revoked_at = created_at WHERE {of_sign_ins}")  # noqa: S608
    for table, names in _NEW.items():
        for name in names:
            if name in (*_UNIQUE, "subject"):
                op.drop_index(f"uq_{table}_{name}", table)
            op.drop_column(table, name)
