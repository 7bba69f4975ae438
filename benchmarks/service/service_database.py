"""A database of many campaigns: one is made through the store, and SQL multiplies it.

Each copy has its own figures (one in fifty repeats those of another), so that neighbours do not
rank alike. The trials of all campaigns are interleaved, as where campaigns run side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, product
from typing import Any, Final

from sqlalchemy import Connection, Table, func, insert, select, text

from layout_tuner.predictions.statistics.step_times import quartiles
from layout_tuner.protocol.measurement import Breakdown, Environment, Iteration, Measurement
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.protocol.worker_messages import LeaseRequest, OutcomeReport, WorkerCreate
from layout_tuner.results_db.allocations.leases import LeaseAsk
from layout_tuner.results_db.models.table_base import Base
from layout_tuner.results_db.models.tables import Campaign, Trial
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import PRECISIONS, Layout
from layout_tuner.search_spaces.layouts.recomputation import RECOMPUTE_MODES

TOKENS_PER_STEP: Final = 64 * 2048
REPEATED: Final = 10
"""Layouts of a campaign that are measured three times."""
TIMED: Final = 3
WARMUP: Final = 1
_PEAK_TFLOPS: Final = 68.0

_AT_ONCE: Final = 100
"""Trials of the first campaign that are measured at once."""
_BLOCK: Final = 20
"""Trials of each campaign that are copied with one statement."""
KINDS: Final = 50
"""Campaigns with figures of their own; other campaigns have the same."""
_FACTOR: Final = f"(1 + ((t.id * 7919 + c.id % {KINDS} * 104729) % 1000) / 10000.0)"
"""How much slower the copy's trial is; SQL over the template's trial t and the campaign c."""
_CACHE_KB: Final = 1 << 20
"""Size of SQLite's page cache while the file is filled: rows of a statement are far apart."""
_SLOWER: Final = frozenset(
    {"step_time_s", "step_time_q25_s", "step_time_q75_s", "compute_s", "tp_s", "pp_s", "dp_s"}
    | {"optimizer_s", "unexplained_s"}
)
_FASTER: Final = frozenset(
    {"tokens_per_s", "tokens_per_s_per_device", "model_tflops_per_device"}
    | {"hardware_tflops_per_device", "mfu", "hfu"}
)
_COPIED: Final = (
    "trials",
    "attempts",
    "measurements",
    "breakdowns",
    "stage_memories",
    "iterations",
)


def fill(store: Store, *, campaigns: int, trials: int) -> None:
    """Fills an empty database with so many campaigns of so many trials each, all measured."""
    _make_template(store, trials)
    with store._db.write() as session:
        _copy_campaigns(session.connection(), campaigns)
    for table in _COPIED:
        with _filling(store) as connection:
            for first in range(0, trials, _BLOCK):
                _copy(connection, Base.metadata.tables[table], first, campaigns, trials)
    with store._db.write() as session:
        _set_sequences(session.connection())
    tidy(store)


@contextmanager
def _filling(store: Store) -> Iterator[Connection]:
    """A transaction for many rows."""
    with store._db.write() as session:
        connection = session.connection()
        if connection.dialect.name == "postgresql":
            # Copies are sound by construction; to look every reference up takes most of the time.
            connection.execute(text("SET LOCAL session_replication_role = replica"))
        else:
            connection.execute(text(f"PRAGMA cache_size = -{_CACHE_KB}"))
        yield connection


def tidy(store: Store) -> None:
    """Updates statistics and PostgreSQL's visibility map, as a database does in quiet hours."""
    engine = store._db.engine
    statement = "VACUUM ANALYZE" if engine.dialect.name == "postgresql" else "ANALYZE"
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(statement))


def _set_sequences(connection: Connection) -> None:
    if connection.dialect.name != "postgresql":
        return
    for table in (Campaign.__table__, Trial.__table__):
        newest = connection.scalar(select(func.max(table.c.id)))
        connection.execute(
            text(f"SELECT setval(pg_get_serial_sequence('{table.name}', 'id'), {newest})")
        )


def _copy_campaigns(connection: Connection, campaigns: int) -> None:
    table = Campaign.__table__
    template = connection.execute(select(table)).mappings().one()
    copies = [
        {**template, "id": number, "name": f"campaign-{number}"}
        for number in range(2, campaigns + 1)
    ]
    if copies:
        connection.execute(insert(table), copies)


def _copy(connection: Connection, table: Table, first: int, campaigns: int, trials: int) -> None:
    """Copies the rows of a block of the template's trials to every other campaign."""
    own_id = f"({trials} + (t.id - 1) * {campaigns - 1} + c.id - 1)"
    of_trial = f"CASE WHEN t.repeat_of IS NULL THEN NULL ELSE {trials} + (t.repeat_of - 1) * {campaigns - 1} + c.id - 1 END"
    told = {"campaign_id": "c.id", "trial_id": own_id}
    if table.name == "trials":
        told |= {"id": own_id, "repeat_of": of_trial}
    if table.name == "measurements":
        told |= {"same_losses_as": f"({trials} + c.id - 1)"}
    names = [column.name for column in table.columns]
    values = [told.get(name) or _value(name) for name in names]
    source = (
        "trials t"
        if table.name == "trials"
        else f"trials t JOIN {table.name} r ON r.trial_id = t.id"
    )
    own = "t" if table.name == "trials" else "r"
    quoted = ", ".join(f'"{name}"' for name in names)
    connection.execute(
        text(
            f"INSERT INTO {table.name} ({quoted}) SELECT {', '.join(v.format(own=own) for v in values)} "
            f"FROM {source} JOIN campaigns c ON c.id > 1 "
            f"WHERE t.campaign_id = 1 AND t.id > {first} AND t.id <= {first + _BLOCK} "
            "ORDER BY t.id, c.id"
        )
    )


def _value(name: str) -> str:
    own = f'{{own}}."{name}"'
    if name in _SLOWER:
        return f"{own} * {_FACTOR}"
    return f"{own} / {_FACTOR}" if name in _FASTER else own


def _make_template(store: Store, trials: int) -> None:
    campaign = store.campaigns.create(campaign_spec(), num_legal_layouts=100_000)
    worker = store.workers.register(
        WorkerCreate(
            name="w1",
            host="node-1",
            cluster="benchmark",
            num_nodes=8 * _AT_ONCE,
            devices_per_node=8,
            device="a device",
            versions={"torch": "2.13"},
        )
    )
    repeats = 2 * REPEATED
    layouts = list(islice(_layouts(), trials - repeats))
    for layout in layouts:
        store.trials.add(campaign.id, layout)
    _measure_all(store, worker.id)
    for number in range(repeats):
        store.trials.repeat(1 + number % REPEATED)
    _measure_all(store, worker.id)


def _measure_all(store: Store, worker_id: str) -> None:
    ask = LeaseAsk(worker_id=worker_id, request=LeaseRequest(max_trials=_AT_ONCE))
    while leases := store.leases.lease_many([ask])[0]:
        assert not isinstance(leases, Exception), leases
        reports = [
            OutcomeReport(
                trial_id=lease.trial_id,
                worker_id=worker_id,
                attempt=lease.attempt,
                outcome=_outcome(lease.layout, 1.0 + (lease.trial_id * 7919 % 4001) / 2000),
            )
            for lease in leases
        ]
        refused = [
            answer for answer in store.outcomes.post_all(reports) if isinstance(answer, Exception)
        ]
        assert not refused, refused


def _layouts() -> Iterator[Layout]:
    """Layouts of several batches and precisions: losses are compared among those of one."""
    for layout in base_layouts():
        for more in (1, 2):
            yield replace(layout, num_microbatches=more * layout.num_microbatches)


def base_layouts() -> Iterator[Layout]:
    """Layouts on 64 devices with a micro-batch size of 1 and `tp * pp` micro-batches."""
    for tp, pp, vpp, zero, shared, recompute, precision in product(
        (1, 2, 4, 8),
        (1, 2, 4, 8),
        (1, 2),
        (0, 1),
        (False, True),
        RECOMPUTE_MODES,
        PRECISIONS,
    ):
        yield Layout(
            num_nodes=8,
            tp=tp,
            pp=pp,
            dp=64 // (tp * pp),
            vpp=vpp,
            num_microbatches=tp * pp,
            zero_stage=zero,
            recompute=recompute,
            sequence_parallel=shared,
            precision=precision,
        )


def _outcome(layout: Layout, step_time_s: float) -> Outcome:
    return Outcome(
        state="completed",
        duration_s=5 * step_time_s,
        log_tail="the last line\n",
        measurement=made_measurement(layout, step_time_s),
        environment=_ENVIRONMENT,
    )


def made_measurement(
    layout: Layout, step_time_s: float, peak_memory_bytes: int = 40 << 30
) -> Measurement:
    tokens_per_s = TOKENS_PER_STEP / step_time_s
    per_device = tokens_per_s / layout.num_devices
    iterations = _iterations(step_time_s)
    q25_s, _, q75_s = quartiles([each.step_time_s for each in iterations[WARMUP:]])
    by_stage = tuple(peak_memory_bytes - stage for stage in range(layout.pp))
    return Measurement(
        step_time_s=step_time_s,
        step_time_q25_s=q25_s,
        step_time_q75_s=q75_s,
        tokens_per_step=TOKENS_PER_STEP,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=per_device,
        model_tflops_per_device=per_device / 100,
        hardware_tflops_per_device=per_device / 90,
        peak_tflops_per_device=_PEAK_TFLOPS,
        peak_source="data sheet",
        mfu=per_device / 100 / _PEAK_TFLOPS,
        hfu=per_device / 90 / _PEAK_TFLOPS,
        peak_memory_bytes=peak_memory_bytes,
        peak_memory_bytes_by_stage=by_stage,
        peak_reserved_bytes_by_stage=tuple(peak + 1 for peak in by_stage),
        memory_kind="allocator",
        oversubscribed=False,
        iterations=iterations,
        iterations_asked=TIMED,
        breakdown=Breakdown(
            compute_s=0.5 * step_time_s,
            tp_s=0.2 * step_time_s,
            pp_s=0.1 * step_time_s,
            dp_s=0.1 * step_time_s,
            optimizer_s=0.0625 * step_time_s,
            unexplained_s=0.0375 * step_time_s,
        ),
        warmup_settled=True,
    )


def _iterations(step_time_s: float) -> tuple[Iteration, ...]:
    return tuple(
        Iteration(
            index=index,
            kind="warmup" if index < WARMUP else "timed",
            step_time_s=step_time_s * (1 + (index - WARMUP - 1) / 500),
            loss=6.0 - index / 10,
            grad_norm=1.5,
        )
        for index in range(WARMUP + TIMED)
    )


_ENVIRONMENT: Final = Environment(
    host="node-1",
    device="a device",
    backend="nccl",
    python_version="3.11.9",
    torch_version="2.13.0",
    numpy_version="2.4",
    git_revision="0123456789ab",
)


def campaign_spec() -> dict[str, Any]:
    return {
        "name": "campaign-1",
        "model": {"name": "a-model"},
        "cluster": {
            "name": "benchmark",
            "num_nodes": 8,
            "devices_per_node": 8,
            "device_memory_bytes": 64 << 30,
        },
        "objective": "tokens_per_s_per_device",
        "strategy": "random",
        "budget": {"trials": 100_000, "node_hours": None, "wall_time_s": None},
    }
