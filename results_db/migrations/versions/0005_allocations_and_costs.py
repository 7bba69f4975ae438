"""Allocations with their nodes, nodes in quarantine, and what node-seconds were spent on.

Revision: 0005, after 0004.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_PARTS = ("iterations", "start", "idle", "lost")

_CAMPAIGNS = sa.table(
    "campaigns",
    sa.column("id", sa.Integer),
    sa.column("spec", sa.JSON),
    sa.column("probe_deadline_s", sa.Double),
)


def upgrade() -> None:
    # Columns are added in place: to rebuild a table on SQLite deletes the rows that refer to it.
    for table in ("attempts", "trials", "campaigns"):
        for part in _PARTS:
            _add_sum(table, f"{part}_node_seconds")
    _add_sum("campaigns", "allocation_idle_node_seconds")
    op.add_column("campaigns", sa.Column("probe_deadline_s", sa.Double(), nullable=True))
    _extend_attempts()
    _extend_workers()
    _create_nodes()
    _create_quarantines()
    _split_costs()
    _copy_deadlines()


def downgrade() -> None:
    # The sums in node_seconds stay; how they split, nodes, quarantines and idle time are lost.
    op.drop_table("node_quarantines")
    op.drop_index(op.f("ix_allocation_nodes_name"), table_name="allocation_nodes")
    op.drop_table("allocation_nodes")
    for column in (
        "scheduler",
        "job_id",
        "launcher",
        "ends_at",
        "shares_nodes",
        "state",
        "idle_node_seconds",
        "status_at",
    ):
        op.drop_column("workers", column)
    for column in ("phase", "held_s", "nodes_held", "iterations_s", "waiting_because"):
        op.drop_column("attempts", column)
    op.drop_column("campaigns", "probe_deadline_s")
    op.drop_column("campaigns", "allocation_idle_node_seconds")
    for table in ("attempts", "trials", "campaigns"):
        for part in _PARTS:
            op.drop_column(table, f"{part}_node_seconds")


def _add_sum(table: str, column: str) -> None:
    op.add_column(table, sa.Column(column, sa.Double(), server_default="0", nullable=False))


def _extend_attempts() -> None:
    op.add_column("attempts", sa.Column("phase", sa.String(16), nullable=True))
    op.add_column("attempts", sa.Column("held_s", sa.Double(), nullable=True))
    op.add_column("attempts", sa.Column("nodes_held", sa.Double(), nullable=True))
    op.add_column("attempts", sa.Column("iterations_s", sa.Double(), nullable=True))
    op.add_column(
        "attempts", sa.Column("waiting_because", sa.Text(), server_default="", nullable=False)
    )


def _extend_workers() -> None:
    op.add_column(
        "workers", sa.Column("scheduler", sa.String(16), server_default="none", nullable=False)
    )
    op.add_column("workers", sa.Column("job_id", sa.String(64), nullable=True))
    op.add_column(
        "workers", sa.Column("launcher", sa.String(40), server_default="", nullable=False)
    )
    op.add_column("workers", sa.Column("ends_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column(
        "workers",
        sa.Column("shares_nodes", sa.Boolean(), server_default=sa.false(), nullable=False),
    )
    op.add_column(
        "workers", sa.Column("state", sa.String(16), server_default="working", nullable=False)
    )
    _add_sum("workers", "idle_node_seconds")
    op.add_column("workers", sa.Column("status_at", sa.DateTime(timezone=True), nullable=True))


def _create_nodes() -> None:
    op.create_table(
        "allocation_nodes",
        sa.Column("worker_id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("num_devices", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("doing", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("free_devices", sa.Integer(), nullable=True),
        sa.Column("health", sa.JSON(none_as_null=True), nullable=True),
        sa.CheckConstraint(
            "state IN ('starting', 'checking', 'idle', 'busy', 'recovering', 'lost', 'quarantined')",
            name=op.f("ck_allocation_nodes_state"),
        ),
        sa.ForeignKeyConstraint(
            ["worker_id"],
            ["workers.id"],
            name=op.f("fk_allocation_nodes_worker_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("worker_id", "name", name=op.f("pk_allocation_nodes")),
    )
    op.create_index(op.f("ix_allocation_nodes_name"), "allocation_nodes", ["name"])


def _create_quarantines() -> None:
    op.create_table(
        "node_quarantines",
        sa.Column("cluster", sa.String(200), nullable=False),
        sa.Column("node", sa.String(255), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("requested_by_user", sa.Boolean(), nullable=False),
        sa.Column("released_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("release_pending", sa.Boolean(), nullable=False),
        sa.Column("release_told_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("cluster", "node", name=op.f("pk_node_quarantines")),
    )


def _split_costs() -> None:
    """Earlier attempts, as far as is known: those that taught nothing are lost.

    Of the others, the steps that were kept are iterations, and the rest is their start. What nothing
    accounts for counts as start too, so that the parts sum to the total.
    """
    op.execute(
        "UPDATE attempts SET lost_node_seconds = node_seconds "
        "WHERE ending IN ('lost', 'returned', 'superseded')"
    )
    op.execute(
        "UPDATE attempts SET iterations_node_seconds = COALESCE(("
        "  SELECT SUM(iterations.step_time_s) * MAX(trials.num_nodes) FROM trials "
        "  JOIN iterations ON iterations.trial_id = trials.id "
        "  WHERE trials.id = attempts.trial_id AND trials.ended_at = attempts.ended_at"
        "), 0) WHERE ending = 'reported'"
    )
    op.execute(
        "UPDATE attempts SET iterations_node_seconds = node_seconds "
        "WHERE iterations_node_seconds > node_seconds"
    )
    op.execute(
        "UPDATE attempts SET start_node_seconds = "
        "node_seconds - iterations_node_seconds - lost_node_seconds"
    )
    for table, part_table, key in (
        ("trials", "attempts", "trial_id"),
        ("campaigns", "trials", "campaign_id"),
    ):
        for part in ("iterations", "lost"):
            op.execute(
                f"UPDATE {table} SET {part}_node_seconds = COALESCE(("  # noqa: S608 - names of ours
                f"SELECT SUM(part.{part}_node_seconds) FROM {part_table} AS part "
                f"WHERE part.{key} = {table}.id), 0)"
            )
        op.execute(
            f"UPDATE {table} SET start_node_seconds = "  # noqa: S608 - a name of ours
            "node_seconds - iterations_node_seconds - lost_node_seconds "
            "WHERE node_seconds > iterations_node_seconds + lost_node_seconds"
        )


def _copy_deadlines() -> None:
    connection = op.get_bind()
    for row in connection.execute(sa.select(_CAMPAIGNS.c.id, _CAMPAIGNS.c.spec)).all():
        deadline_s = row.spec.get("probe", {}).get("deadline_s")
        if deadline_s is not None:
            connection.execute(
                sa.update(_CAMPAIGNS)
                .where(_CAMPAIGNS.c.id == row.id)
                .values(probe_deadline_s=float(deadline_s))
            )
