"""Where the time of an iteration goes, whose losses agree, smaller ZeRO groups, skipped steps.

Revision: 0002, after 0001.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

LEAST_WARMUP = 2

_CAMPAIGNS = sa.table("campaigns", sa.column("id", sa.Integer), sa.column("spec", sa.JSON))


def upgrade() -> None:
    # Columns are added in place: to rebuild a table on SQLite deletes the rows that refer to it.
    # Until now every shard group was as large as dp, and no step was ever skipped.
    op.add_column(
        "trials", sa.Column("zero_replicas", sa.Integer(), server_default="1", nullable=False)
    )
    op.add_column("measurements", sa.Column("warmup_settled", sa.Boolean(), nullable=True))
    op.add_column(
        "measurements", sa.Column("skipped_steps", sa.Integer(), server_default="0", nullable=False)
    )
    op.add_column("measurements", sa.Column("kin", sa.Integer(), nullable=True))
    op.add_column(
        "stage_memories", sa.Column("peak_reserved_bytes", sa.BigInteger(), nullable=True)
    )
    op.create_table(
        "breakdowns",
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("compute_s", sa.Double(), nullable=False),
        sa.Column("tp_s", sa.Double(), nullable=False),
        sa.Column("pp_s", sa.Double(), nullable=False),
        sa.Column("dp_s", sa.Double(), nullable=False),
        sa.Column("optimizer_s", sa.Double(), nullable=False),
        sa.Column("unexplained_s", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["trial_id"],
            ["measurements.trial_id"],
            name=op.f("fk_breakdowns_trial_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("trial_id", name=op.f("pk_breakdowns")),
    )
    _make_grad_norm_nullable(nullable=True)
    _warm_up_twice()


def downgrade() -> None:
    # The first schema ranks whatever was measured, and knows no measurement that does not count.
    op.execute(
        "DELETE FROM measurements WHERE trial_id IN (SELECT id FROM trials WHERE state <> 'COMPLETED')"
    )
    # SQLite does not follow references while its schema is changed.
    for table in ("stage_memories", "iterations"):
        op.execute(
            f"DELETE FROM {table} WHERE trial_id NOT IN (SELECT trial_id FROM measurements)"  # noqa: S608 - a name of ours
        )
    # A skipped step has no norm; the first schema knows no such step.
    op.execute("UPDATE iterations SET grad_norm = 0 WHERE grad_norm IS NULL")
    _make_grad_norm_nullable(nullable=False)
    op.drop_table("breakdowns")
    op.drop_column("stage_memories", "peak_reserved_bytes")
    op.drop_column("measurements", "kin")
    op.drop_column("measurements", "skipped_steps")
    op.drop_column("measurements", "warmup_settled")
    op.drop_column("trials", "zero_replicas")


def _make_grad_norm_nullable(*, nullable: bool) -> None:
    # Nothing refers to an iteration, so that this table may be rebuilt; its check is written out,
    # since a rebuilt table has only those that it is given.
    check = sa.CheckConstraint("kind IN ('warmup', 'timed')", name=op.f("ck_iterations_kind"))
    with op.batch_alter_table("iterations", table_args=(check,)) as iterations:
        iterations.alter_column("grad_norm", existing_type=sa.Double(), nullable=nullable)


def _warm_up_twice() -> None:
    """Campaigns that would warm up for less than two iterations do so for two, and say it."""
    connection = op.get_bind()
    for campaign_id, spec in connection.execute(sa.select(_CAMPAIGNS)).all():
        probe = spec.get("probe", {})
        given = probe.get("warmup", LEAST_WARMUP)
        if given >= LEAST_WARMUP:
            continue
        warning = (
            f"probe.warmup was {given} when this campaign began; {LEAST_WARMUP} is the least now, and "
            "what later trials warm up for"
        )
        changed = spec | {
            "probe": probe | {"warmup": LEAST_WARMUP},
            "warnings": [*spec.get("warnings", []), warning],
        }
        connection.execute(
            sa.update(_CAMPAIGNS).where(_CAMPAIGNS.c.id == campaign_id).values(spec=changed)
        )
