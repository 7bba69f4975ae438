"""Knobs and metrics in the table of leaderboards, with an index that has all of them.

The table is built anew from its rows and those of trials and measurements.

Revision: r002, after r001.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

from results_db.migrations.r001_tables import SCHEMA

revision = "r002"
down_revision = "r001"
branch_labels = None
depends_on = None

_OF_TRIAL: dict[str, sa.types.TypeEngine[Any]] = {
    "num_nodes": sa.Integer(),
    "tp": sa.Integer(),
    "pp": sa.Integer(),
    "dp": sa.Integer(),
    "vpp": sa.Integer(),
    "micro_batch_size": sa.Integer(),
    "num_microbatches": sa.Integer(),
    "zero_stage": sa.Integer(),
    "zero_replicas": sa.Integer(),
    "recompute": sa.String(16),
    "sequence_parallel": sa.Boolean(),
    "precision": sa.String(8),
    "num_devices": sa.Integer(),
    "global_batch_size": sa.Integer(),
}
_OF_MEASUREMENT: dict[str, sa.types.TypeEngine[Any]] = {
    "step_time_s": sa.Double(),
    "tokens_per_s": sa.Double(),
    "tokens_per_s_per_device": sa.Double(),
    "model_tflops_per_device": sa.Double(),
    "hardware_tflops_per_device": sa.Double(),
    "mfu": sa.Double(),
    "hfu": sa.Double(),
    "peak_memory_bytes": sa.BigInteger(),
}
_MAY_BE_NULL = ("mfu", "hfu", "peak_memory_bytes")

_STANDINGS = SCHEMA.tables["standings"]
_KEPT = ", ".join(column.name for column in _STANDINGS.columns)
"""The columns of r001."""

_INDEXED = (
    "campaign_id",
    "value",
    "tokens_per_s_per_device",
    "tokens_per_s",
    "model_tflops_per_device",
    "hardware_tflops_per_device",
    "tokens_per_node_hour",
    "shortened",
    *_OF_TRIAL,
    *(f"measured_{name}" for name in _OF_MEASUREMENT),
    "trial_id",
)


def upgrade() -> None:
    _put_aside()
    op.create_table(
        "standings",
        *(
            sa.Column(column.name, column.type, nullable=column.nullable, autoincrement=False)
            for column in _STANDINGS.columns
        ),
        *(sa.Column(name, kind, nullable=False) for name, kind in _OF_TRIAL.items()),
        *(
            sa.Column(f"measured_{name}", kind, nullable=name in _MAY_BE_NULL)
            for name, kind in _OF_MEASUREMENT.items()
        ),
        sa.PrimaryKeyConstraint("trial_id", name=op.f("pk_standings")),
        sa.ForeignKeyConstraint(
            ["trial_id", "campaign_id"],
            ["trials.id", "trials.campaign_id"],
            name=op.f("fk_standings_trial_id_campaign_id"),
            ondelete="CASCADE",
        ),
        sa.UniqueConstraint(
            "campaign_id", "layout_key", name=op.f("uq_standings_campaign_id_layout_key")
        ),
        sa.CheckConstraint(
            "num_runs > 0 AND step_time_s > 0", name=op.f("ck_standings_was_measured")
        ),
    )
    op.create_index(
        "ix_standings_campaign_id_value_trial_id", "standings", ["campaign_id", "value", "trial_id"]
    )
    op.create_index("ix_standings_listing", "standings", list(_INDEXED))
    _create_partial_index("ix_standings_campaign_id_on_front", "on_front = 1", "on_front")
    _create_partial_index("ix_standings_campaign_id_repeated", "num_runs > 1", "num_runs > 1")
    names = [*_OF_TRIAL, *(f"measured_{name}" for name in _OF_MEASUREMENT)]
    values = [*(f"t.{name}" for name in _OF_TRIAL), *(f"m.{name}" for name in _OF_MEASUREMENT)]
    op.execute(
        f"INSERT INTO standings ({_KEPT}, {', '.join(names)}) "  # noqa: S608 - words of ours
        f"SELECT {', '.join(f's.{column.name}' for column in _STANDINGS.columns)}, "
        f"{', '.join(values)} FROM standings_put_aside s "
        "JOIN trials t ON t.id = s.trial_id JOIN measurements m ON m.trial_id = s.trial_id"
    )
    op.drop_table("standings_put_aside")


def downgrade() -> None:
    _put_aside()
    _STANDINGS.create(op.get_bind())
    op.execute(f"INSERT INTO standings ({_KEPT}) SELECT {_KEPT} FROM standings_put_aside")  # noqa: S608
    op.drop_table("standings_put_aside")


def _put_aside() -> None:
    """Copies the rows into a plain table, which leaves the names of constraints and indexes."""
    op.execute("CREATE TABLE standings_put_aside AS SELECT * FROM standings")
    op.drop_table("standings")


def _create_partial_index(name: str, on_sqlite: str, on_postgresql: str) -> None:
    op.create_index(
        name,
        "standings",
        ["campaign_id"],
        sqlite_where=sa.text(on_sqlite),
        postgresql_where=sa.text(on_postgresql),
    )
