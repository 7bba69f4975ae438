"""Cheap probes: of which layout a trial runs a part.

Revision: r007, after r006.
"""

import sqlalchemy as sa
from alembic import op

revision = "r007"
down_revision = "r006"
branch_labels = None
depends_on = None

_COLUMNS = ("full_num_nodes", "full_dp", "full_num_microbatches", "num_layers")
_COSTS = (
    "node_seconds",
    *(f"{part}_node_seconds" for part in ("iterations", "start", "idle", "lost")),
)
_OF_TRIALS = (
    *("attempts", "environments", "trial_logs", "predictions"),
    *("measurements", "breakdowns", "stage_memories", "iterations"),
)
"""Tables whose rows go with their trials."""


def upgrade() -> None:
    for name in _COLUMNS:
        op.add_column("trials", sa.Column(name, sa.Integer(), nullable=True))


def downgrade() -> None:
    # Without the columns a cheap probe would be taken for a trial of a layout. What a campaign
    # cost is the sum over its trials, so that of its cheap probes goes with them.
    for name in _COSTS:
        op.execute(
            f"UPDATE campaigns SET {name} = (SELECT coalesce(sum({name}), 0) FROM trials "  # noqa: S608 - words of ours
            "WHERE campaign_id = campaigns.id AND num_layers IS NULL) "
            "WHERE id IN (SELECT campaign_id FROM trials WHERE num_layers IS NOT NULL)"
        )
    op.execute("DELETE FROM trials WHERE num_layers IS NOT NULL")
    if op.get_bind().dialect.name == "sqlite":  # its foreign keys are off in a migration
        for name in _OF_TRIALS:
            op.execute(f"DELETE FROM {name} WHERE trial_id NOT IN (SELECT id FROM trials)")  # noqa: S608 - words of ours
    for name in _COLUMNS:
        op.drop_column("trials", name)
