"""What must never be, in the schema: impossible figures, a trial in two attempts, endings undone.

Revision: 0007, after 0006.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_COSTS = (
    "node_seconds >= 0 AND iterations_node_seconds >= 0 AND start_node_seconds >= 0 "
    "AND idle_node_seconds >= 0 AND lost_node_seconds >= 0"
)
_FIGURES = (
    "step_time_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "model_tflops_per_device",
    "hardware_tflops_per_device",
)

_CHECKS = {
    "campaigns": {
        "parts_not_negative": "iterations_node_seconds >= 0 AND start_node_seconds >= 0 "
        "AND idle_node_seconds >= 0 AND lost_node_seconds >= 0 AND allocation_idle_node_seconds >= 0",
        "counters": "num_legal_layouts >= 0 AND last_number >= 0 AND last_ended_seq >= 0",
        "clock_runs_with_it": "state = 'RUNNING' OR clock_at IS NULL",
    },
    "trials": {
        "layout_counts": "num_nodes >= 1 AND tp >= 1 AND pp >= 1 AND dp >= 1 AND vpp >= 1 "
        "AND micro_batch_size >= 1 AND num_microbatches >= 1 AND zero_replicas >= 1",
        "zero_stage": "zero_stage IN (0, 1)",
        "recompute": "recompute IN ('none', 'selective', 'full')",
        "precision": "precision IN ('fp32', 'bf16', 'fp16')",
        "counters": "number >= 1 AND repeat_index >= 0 AND lost_attempts >= 0 "
        "AND iterations_done >= 0",
        "lost_attempts": "lost_attempts <= attempt",
        "running_is_an_attempt": "state <> 'RUNNING' OR attempt >= 1",
        "repeats_another": "repeat_of <> id",
        "costs_not_negative": _COSTS,
    },
    "attempts": {
        "counts_from_one": "attempt >= 1",
        "phase": "phase IN ('waiting', 'starting', 'iterating', 'ending')",
        "times": "held_s >= 0 AND nodes_held >= 0 AND iterations_s >= 0",
        "costs_not_negative": _COSTS,
    },
    "measurements": {
        "figures": " AND ".join(f"{name} > 0 AND {name} < 1e300" for name in _FIGURES),
        "counts": "tokens_per_step >= 1 AND peak_memory_bytes >= 0",
    },
    "workers": {
        "scheduler": "scheduler IN ('slurm', 'none')",
        "state": "state IN ('starting', 'working', 'draining')",
        "costs_not_negative": "idle_node_seconds >= 0",
    },
}

_NEVER_REUSED = ("campaigns", "trials")
"""Tables whose rows may be deleted while somebody still knows their ids: an outcome that comes late must not
find another trial under its own. PostgreSQL gives no id again; SQLite does unless it is told not to."""

_ENDED_CAMPAIGN = "('COMPLETED', 'CANCELLED', 'FAILED')"
_ENDED_TRIAL = "('COMPLETED', 'INFEASIBLE', 'FAILED', 'CANCELLED')"

_NEVER = {
    "campaigns_end_once": (
        "BEFORE UPDATE OF state ON campaigns",
        f"OLD.state IN {_ENDED_CAMPAIGN} AND NEW.state <> OLD.state",
        "a campaign that has ended stays as it ended",
    ),
    "trials_end_once": (
        "BEFORE UPDATE OF state ON trials",
        f"OLD.state IN {_ENDED_TRIAL} AND NEW.state IN ('PENDING', 'RUNNING')",
        "a trial that has ended neither waits nor runs again",
    ),
    "attempts_end_once": (
        "BEFORE UPDATE OF ending ON attempts",
        "OLD.ending IS NOT NULL AND NEW.ending IS NULL",
        "an attempt that has ended does not run again",
    ),
}
"""By a trigger's name: the event, when it is refused, and the words of the refusal."""


def upgrade() -> None:
    for table, checks in _CHECKS.items():
        _add_checks(table, checks)
    op.create_index(
        "uq_attempts_trial_id_open",
        "attempts",
        ["trial_id"],
        unique=True,
        sqlite_where=sa.text("ending IS NULL"),
        postgresql_where=sa.text("ending IS NULL"),
    )
    if op.get_bind().dialect.name == "sqlite":
        _create_triggers_of_sqlite()
    else:
        _create_triggers_of_postgresql()


def downgrade() -> None:
    sqlite = op.get_bind().dialect.name == "sqlite"
    for name, (event, _, _) in _NEVER.items():
        _drop_trigger(name, event.rpartition(" ")[2], sqlite=sqlite)
    for name in ("measurements_are_results", "measurements_stay"):
        _drop_trigger(name, "measurements", sqlite=sqlite)
    op.drop_index("uq_attempts_trial_id_open", table_name="attempts")
    for table, checks in _CHECKS.items():
        _drop_checks(table, checks)


def _add_checks(table: str, checks: dict[str, str]) -> None:
    added = {f"ck_{table}_{name}": sql for name, sql in checks.items()}
    if op.get_bind().dialect.name == "sqlite":
        _rebuild(table, _checks_of(table) | added, never_reuse=table in _NEVER_REUSED)
        return
    for name, sql in added.items():
        op.create_check_constraint(op.f(name), table, sql)


def _drop_checks(table: str, checks: dict[str, str]) -> None:
    dropped = {f"ck_{table}_{name}" for name in checks}
    if op.get_bind().dialect.name == "sqlite":
        kept = _checks_of(table)
        left = {name: sql for name, sql in kept.items() if name not in dropped}
        _rebuild(table, left, never_reuse=False)
        return
    for name in dropped:
        op.drop_constraint(op.f(name), table, type_="check")


def _checks_of(table: str) -> dict[str, str]:
    found = sa.inspect(op.get_bind()).get_check_constraints(table)
    return {str(check["name"]): check["sqltext"] for check in found}


def _rebuild(table: str, checks: dict[str, str], *, never_reuse: bool) -> None:
    """Builds a table anew with these checks: SQLite cannot add or drop one.

    References are not followed meanwhile, so that rows that refer to the table stay.
    """
    described = sa.Table(table, sa.MetaData(), autoload_with=op.get_bind(), resolve_fks=False)
    # Whether a table is read with its checks depends on the libraries' versions.
    for constraint in list(described.constraints):
        if isinstance(constraint, sa.CheckConstraint):
            described.constraints.remove(constraint)
    for name, sql in checks.items():
        described.append_constraint(sa.CheckConstraint(sql, name=op.f(name)))
    with op.batch_alter_table(
        table,
        recreate="always",
        copy_from=described,
        table_kwargs={"sqlite_autoincrement": never_reuse},
    ):
        pass


def _create_triggers_of_sqlite() -> None:
    for name, (event, condition, message) in _NEVER.items():
        op.execute(
            f"CREATE TRIGGER {name} {event} WHEN {condition} "
            f"BEGIN SELECT RAISE(ABORT, '{message}'); END"
        )
    op.execute(
        "CREATE TRIGGER measurements_are_results BEFORE INSERT ON measurements WHEN "
        "(SELECT state FROM trials WHERE id = NEW.trial_id) NOT IN ('COMPLETED', 'FAILED') "
        "BEGIN SELECT RAISE(ABORT, 'a measurement belongs to a trial with a result'); END"
    )
    op.execute(
        "CREATE TRIGGER measurements_stay BEFORE DELETE ON measurements WHEN "
        "(SELECT state FROM trials WHERE id = OLD.trial_id) = 'COMPLETED' "
        "BEGIN SELECT RAISE(ABORT, 'a completed trial keeps its measurement'); END"
    )


def _create_triggers_of_postgresql() -> None:
    for name, (event, condition, message) in _NEVER.items():
        op.execute(_function(name, f"RAISE check_violation USING MESSAGE = '{message}';"))
        op.execute(
            f"CREATE TRIGGER {name} {event} FOR EACH ROW WHEN ({condition}) "
            f"EXECUTE FUNCTION {name}()"
        )
    op.execute(
        _function(
            "measurements_are_results",
            "IF (SELECT state FROM trials WHERE id = NEW.trial_id) NOT IN ('COMPLETED', 'FAILED') "
            "THEN RAISE check_violation "
            "USING MESSAGE = 'a measurement belongs to a trial with a result'; END IF; RETURN NEW;",
        )
    )
    op.execute(
        _function(
            "measurements_stay",
            "IF (SELECT state FROM trials WHERE id = OLD.trial_id) = 'COMPLETED' "
            "THEN RAISE check_violation "
            "USING MESSAGE = 'a completed trial keeps its measurement'; END IF; RETURN OLD;",
        )
    )
    for name, event in (("measurements_are_results", "INSERT"), ("measurements_stay", "DELETE")):
        op.execute(
            f"CREATE TRIGGER {name} BEFORE {event} ON measurements FOR EACH ROW "
            f"EXECUTE FUNCTION {name}()"
        )


def _function(name: str, body: str) -> str:
    return f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$"


def _drop_trigger(name: str, table: str, *, sqlite: bool) -> None:
    if sqlite:
        op.execute(f"DROP TRIGGER {name}")
    else:
        op.execute(f"DROP TRIGGER {name} ON {table}")
        op.execute(f"DROP FUNCTION {name}()")
