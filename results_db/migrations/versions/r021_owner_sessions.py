"""Sessions of owners whom a provider or a proxy signed in, without a token.

Revision: r021. A database that r007 has just created has the columns already.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "r021"
down_revision = "r020"
branch_labels = None
depends_on = None

_TABLE = "browser_sign_ins"
_COLUMNS: dict[str, Any] = {
    "owner": sa.String(64),
    "role": sa.String(16),
    "source": sa.String(255),
    "id_token": sa.Text,
}


def upgrade() -> None:
    there = {each["name"] for each in sa.inspect(op.get_bind()).get_columns(_TABLE)}
    for name, kind in _COLUMNS.items():
        if name not in there:
            op.add_column(_TABLE, sa.Column(name, kind))


def downgrade() -> None:
    op.execute(f"DELETE FROM {_TABLE} WHERE owner IS NOT NULL")  # noqa: S608 - they sign in again
    for name in _COLUMNS:
        op.drop_column(_TABLE, name)
