"""Lists, facets and plots of one campaign of 100,000 layouts, by the store's own methods.

Each figure is measured twice: with a leaderboard that is computed anew, as after every outcome of a
running campaign, and again with the one that the process has kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from datetime import datetime
from itertools import islice, product
from pathlib import Path
from statistics import median
from typing import Any, Final

from sqlalchemy import update
from sqlalchemy.orm import Session

from benchmarks.service.postgres_server import FAST, running_server
from benchmarks.service.service_database import base_layouts, campaign_spec, made_measurement, tidy
from benchmarks.trainer.trainer_table import Figure
from layout_tuner.cli.processes.serve import collect_rarely
from layout_tuner.protocol.worker_messages import WorkerCreate
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.leaderboard.leaderboard_memo import LeaderboardMemo
from layout_tuner.results_db.models.table_base import Base, insert_many
from layout_tuner.results_db.models.tables import (
    Attempt,
    BreakdownRow,
    Campaign,
    IterationRow,
    MeasurementRow,
    StageMemoryRow,
    Trial,
)
from layout_tuner.results_db.rows import layout_columns
from layout_tuner.results_db.store import Store
from layout_tuner.results_db.trials.filter import LeaderboardListing, TrialFilter, TrialOrder
from layout_tuner.search_spaces.layouts.layout import Layout

LAYOUTS_A_SCALE: Final = 12_500
ROUNDS: Final = 7
MOST_S: Final = 1.5
"""Asked of each list whose leaderboard is computed anew."""
LIMIT: Final = 100
_FAILED_ONE_IN: Final = 20
_TOO_MANY: Final = 1009
"""Times as many micro-batches as another layout has: no layout of the list has so many."""
_AT_ONCE: Final = 2_500
_OF_MEASUREMENT: Final = (BreakdownRow, StageMemoryRow, IterationRow)
_SERVER: Final = {**FAST, "shared_buffers": "512MB"}

LARGE_LEADERBOARD_NOTES: Final = f"""\
Besides the ranked layouts of the campaign, one trial in {_FAILED_ONE_IN} ran out of memory. Pages of {LIMIT} layouts with their total; \
medians of {ROUNDS} calls in this process, without HTTP; the garbage collector is set as in the service. First the leaderboard is \
computed anew, as at the first call after an outcome; then the same call again. A run prints the time of each list."""


def measure_large_leaderboard(folder: Path, scale: int) -> list[Figure]:
    """Both databases, each with one campaign."""
    collect_rarely()  # as the service does after its start
    layouts = LAYOUTS_A_SCALE * scale
    with closing(Store.open(DataDir(folder / "large"))) as store:
        figures = _figures(store, "SQLite", layouts)
    with ExitStack() as stack:
        server = stack.enter_context(running_server(settings=_SERVER))
        url = stack.enter_context(server.database())
        store = stack.enter_context(closing(Store.connect(url)))
        return [*figures, *_figures(store, "PostgreSQL", layouts)]


def _figures(store: Store, database: str, layouts: int) -> list[Figure]:
    fill_campaign(store, layouts)
    lists_s, figures = {}, []
    for name, (is_list, call) in _calls(store, layouts).items():
        cold_s, warm_s = _seconds_of(store, call)
        measured = f"{cold_s * 1e3:.1f} ms; then {warm_s * 1e3:.1f} ms"
        print(f"{name}, {layouts:,} layouts, {database}: {measured}", flush=True)
        if is_list:
            lists_s[name] = (cold_s, warm_s)
        else:
            figures.append(
                Figure(name=f"{name}, {database}", asked="", measured=measured, reached=None)
            )
    return [*_figures_of_lists(lists_s, database), *figures]


def _figures_of_lists(
    lists_s: Mapping[str, tuple[float, float]], database: str
) -> tuple[Figure, Figure]:
    """The slowest of the lists, and their median."""
    cold, warm = ({name: each[place] for name, each in lists_s.items()} for place in (0, 1))
    slowest, then = max(cold, key=lambda name: cold[name]), max(warm, key=lambda name: warm[name])
    return (
        Figure(
            name=f"the slowest of {len(lists_s)} lists, {database}",
            asked=f"under {MOST_S:g} s",
            measured=f"{cold[slowest] * 1e3:.1f} ms ({slowest}); then {warm[then] * 1e3:.1f} ms ({then})",
            reached=cold[slowest] < MOST_S,
        ),
        Figure(
            name=f"their median, {database}",
            asked="",
            measured=f"{median(cold.values()) * 1e3:.1f} ms; then {median(warm.values()) * 1e3:.1f} ms",
            reached=None,
        ),
    )


def _calls(store: Store, layouts: int) -> Mapping[str, tuple[bool, Callable[[], object]]]:
    """By name: whether a list is asked for, and the call."""

    def page(offset: int = 0, **listing: Any) -> tuple[bool, Callable[[], object]]:
        query = LeaderboardListing(**listing)
        return True, lambda: store.leaderboard.page_of_layouts(
            1, listing=query, limit=LIMIT, offset=offset
        )

    some = TrialFilter(pp=(2,), recompute=("selective",))
    fast = TrialFilter(max_step_time_s=1.2, min_mfu=0.2)
    rare = TrialFilter(tp=(8,), pp=(8,), max_step_time_s=1.01)
    middle, last = layouts // 2, layouts * 97 // 100
    by_number = TrialOrder(key="tokens_per_s", descending=True)
    return {
        "first page": page(),
        "offset 1,000": page(1_000),
        f"offset {middle:,}": page(middle),
        f"offset {last:,}": page(last),
        "filter on two knobs": page(wanted=some),
        "the same, offset 5,000": page(5_000, wanted=some),
        "filter on two metrics": page(wanted=fast),
        "filter that few pass": page(wanted=rare),
        "sorted by tp": page(sort="tp"),
        "sorted by tp, descending, middle": page(middle, sort="tp", descending=True),
        "sorted by peak memory": page(sort="peak_memory_bytes"),
        "sorted by MFU, descending, middle": page(middle, sort="mfu", descending=True),
        "filtered and sorted": page(wanted=some, sort="num_microbatches", descending=True),
        "front": page(front=True),
        "within 5 %": page(within_percent=5.0),
        "by another objective": (
            True,
            lambda: store.leaderboard.page_of_layouts(1, "tokens_per_s", limit=LIMIT, offset=1_000),
        ),
        "rank of a trial": (True, lambda: store.leaderboard.rank_of(1, layouts * 4 // 5)),
        "values of a knob": (True, lambda: store.leaderboard.knob_values(1, "tp")),
        "knobs of one value": (True, lambda: store.leaderboard.constant_knobs(1)),
        "knobs of one value, filtered": (
            True,
            lambda: store.leaderboard.constant_knobs(1, listing=LeaderboardListing(wanted=some)),
        ),
        "points of a plot": (False, lambda: store.plot_data.points(1)),
        "history of the best": (False, lambda: store.history.best_so_far(1)),
        "failures": (False, lambda: store.history.failures(1)),
        "timeline": (False, lambda: store.history.timeline(1)),
        "trials, with total": (
            True,
            lambda: (
                store.trial_pages.page(1, order=by_number, limit=LIMIT),
                store.trial_pages.count(1),
            ),
        ),
        "trials that few pass": (
            False,
            lambda: (
                store.trial_pages.page(1, wanted=rare, limit=LIMIT),
                store.trial_pages.count(1, wanted=rare),
            ),
        ),
    }


def _seconds_of(store: Store, call: Callable[[], object]) -> tuple[float, float]:
    """Medians with a leaderboard that is computed anew, and with the one that was kept."""
    call()
    cold_s, warm_s = [], []
    for _ in range(ROUNDS):
        memo = LeaderboardMemo()
        for section in (store.leaderboard, store.plot_data, store.baselines, store.history):
            section._memo = memo
        for times_s in (cold_s, warm_s):
            start = time.perf_counter()
            call()
            times_s.append(time.perf_counter() - start)
    return sorted(cold_s)[ROUNDS // 2], sorted(warm_s)[ROUNDS // 2]


def fill_campaign(store: Store, layouts: int) -> None:
    """Fills an empty database with one campaign of so many measured layouts."""
    campaign = store.campaigns.create(campaign_spec(), num_legal_layouts=layouts)
    worker = store.workers.register(
        WorkerCreate(
            name="w1",
            host="node-1",
            cluster="benchmark",
            num_nodes=8,
            devices_per_node=8,
            device="a device",
            versions={"torch": "2.13"},
        )
    )
    with store._db.read() as session:
        row = session.get_one(Campaign, campaign.id)
    numbered = enumerate(islice(_layouts(), layouts), 1)
    number = 0
    while some := list(islice(numbered, _AT_ONCE)):
        rows = _Rows(row, worker.id, store.now())
        for place, layout in some:
            number += 1
            rows.add_measured(number, layout, 1.0 + (place * 7919 % 100_003) / 1e5)
            if place % _FAILED_ONE_IN == 0:
                number += 1
                larger = layout.num_microbatches * _TOO_MANY
                rows.add_failed(number, replace(layout, num_microbatches=larger))
        with store._db.write() as session:
            rows.write(session)
    with store._db.write() as session:
        counters = {"last_number": number, "last_ended_seq": number}
        session.execute(update(Campaign).values(**counters))
    tidy(store)


class _Rows:
    """Rows of trials, by table."""

    def __init__(self, campaign: Campaign, worker_id: str, at: datetime) -> None:
        self._campaign = campaign
        self._worker_id = worker_id
        self._at = at
        self._of: dict[type[Base], list[dict[str, Any]]] = {
            table: [] for table in (Trial, Attempt, MeasurementRow, *_OF_MEASUREMENT)
        }

    def add_measured(self, number: int, layout: Layout, step_time_s: float) -> None:
        """Adds a completed trial."""
        self._add_trial(number, layout, state="COMPLETED", reason=None, node="")
        peak_bytes = (8 << 30) + number * 104_729 % (48 << 20) * 1024
        measured = made_measurement(layout, step_time_s, peak_bytes)
        of_trial, columns = {"trial_id": number}, MeasurementRow.__table__.columns.keys()
        values = {name: getattr(measured, name) for name in columns if hasattr(measured, name)}
        of_campaign = {"campaign_id": self._campaign.id, "same_losses_as": 1}
        self._of[MeasurementRow].append({**of_trial, **of_campaign, **values})
        assert measured.breakdown is not None
        self._of[BreakdownRow].append({**of_trial, **asdict(measured.breakdown)})
        self._of[StageMemoryRow] += [
            {**of_trial, "stage": stage, "peak_memory_bytes": peak}
            for stage, peak in enumerate(measured.peak_memory_bytes_by_stage)
        ]
        self._of[IterationRow] += [{**of_trial, **asdict(each)} for each in measured.iterations]

    def add_failed(self, number: int, layout: Layout) -> None:
        """Adds a trial that ran out of memory."""
        node = f"node-{number % 64}"
        self._add_trial(number, layout, state="INFEASIBLE", reason="out_of_memory", node=node)

    def write(self, session: Session) -> None:
        """Inserts all rows."""
        for table, rows in self._of.items():
            insert_many(session, table, rows)

    def _add_trial(self, number: int, layout: Layout, **ended: Any) -> None:
        times = dict.fromkeys(("started_at", "ended_at"), self._at)
        self._of[Trial].append(
            {
                **layout_columns(layout),
                **times,
                **ended,
                "created_at": self._at,
                "campaign_id": self._campaign.id,
                "attempt": 1,
                "id": number,
                "number": number,
                "ended_seq": number,
            }
        )
        self._of[Attempt].append(
            {
                **times,
                "trial_id": number,
                "attempt": 1,
                "worker_id": self._worker_id,
                "seen_at": self._at,
                "ending": "reported",
            }
        )


def _layouts() -> Iterator[Layout]:
    """More than 100,000 layouts on 64 devices."""
    for more, size in product(range(1, 30), (1, 2, 4, 8, 16, 32)):
        for layout in base_layouts():
            count = more * layout.num_microbatches
            yield replace(layout, micro_batch_size=size, num_microbatches=count)
