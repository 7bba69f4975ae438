"""The first schema: the tables of the models, and triggers that refuse to undo an ending.

Revision: r007, after None. Earlier ones were never released.
"""

from alembic import op

from layout_tuner.results_db.models.all_tables import METADATA
from layout_tuner.results_db.models.new_schema import FUNCTIONS, create_schema

revision = "r007"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    create_schema(op.get_bind())


def downgrade() -> None:
    connection = op.get_bind()
    METADATA.drop_all(connection)
    if connection.dialect.name != "sqlite":
        for name in FUNCTIONS:
            op.execute(f"DROP FUNCTION {name}()")
