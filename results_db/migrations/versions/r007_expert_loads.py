"""How probes of models with experts routed, and how unevenly; earlier rows have no experts.

Revision: r007, after r004.
"""

import sqlalchemy as sa
from alembic import op

revision = "r007"
down_revision = "r004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("measurements", sa.Column("balanced_routing", sa.Boolean()))
    op.add_column("measurements", sa.Column("expert_load", sa.Double()))


def downgrade() -> None:
    op.drop_column("measurements", "expert_load")
    op.drop_column("measurements", "balanced_routing")
