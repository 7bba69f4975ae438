"""What reading one campaign costs must not grow with the number of other campaigns."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Final

from sqlalchemy import event

from layout_tuner.results_db.store import Store
from layout_tuner.results_db.trials.filter import LeaderboardListing, TrialFilter, TrialOrder
from tests.kit.store import TimelyStore, make_campaign, run_trial

READS: Final[dict[str, Callable[[Store], Any]]] = {
    "a page of the leaderboard": lambda store: store.leaderboard.page_of_layouts(1, limit=10),
    "a list by another objective": lambda store: store.leaderboard.page_of_layouts(
        1, "tokens_per_s", listing=LeaderboardListing(sort="tp"), limit=10
    ),
    "the winners": lambda store: store.leaderboard.winners([1]),
    "what must be beaten": lambda store: store.leaderboard.to_beat(1),
    "ties": lambda store: store.leaderboard.tied_layouts(1, among=10),
    "values of a knob": lambda store: store.leaderboard.knob_values(1, "tp"),
    "points of a plot": lambda store: store.plot_data.points(1),
    "history of the best": lambda store: store.history.best_so_far(1),
    "failures": lambda store: store.history.failures(1),
    "timeline": lambda store: store.history.timeline(1),
    "a page of trials": lambda store: store.trial_pages.page(
        1, order=TrialOrder(key="tokens_per_s", descending=True), limit=10
    ),
    "trials of a state": lambda store: store.trial_pages.count(
        1, wanted=TrialFilter(states=("COMPLETED",))
    ),
    "phases": lambda store: store.reports.running_phases(1),
    "progress": lambda store: store.campaigns.get(1),
}


@contextmanager
def statements_of(store: Store) -> Iterator[list[tuple[str, Any]]]:
    """The statements that run in the block, with their parameters; one of many rows is one."""
    ran: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, sql: str, values: Any, *_: Any) -> None:
        ran.append((sql, values))

    engine = store._db.engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield ran
    finally:
        event.remove(engine, "before_cursor_execute", note)


def test_a_campaign_is_read_without_the_rows_of_others(sqlite_url: str) -> None:
    with closing(TimelyStore(sqlite_url)) as store:
        run_trial(store, make_campaign(store))
    for name, read in READS.items():
        # A store of its own, which keeps no leaderboard of an earlier read.
        with closing(Store(sqlite_url)) as store, statements_of(store) as ran:
            read(store)
        with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as database:
            for sql, values in (each for each in ran if "SELECT" in each[0]):
                steps = [row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
                assert [step for step in steps if not _reads_what_it_needs(step)] == [], (name, sql)


def _reads_what_it_needs(step: str) -> bool:
    """Whether a step of a plan finds rows of trials by their campaign, trial, or id."""
    of_trials = ("trials", "measurements", "attempts", "iterations", "breakdowns")
    verb, table, *_ = step.split()
    if verb not in ("SCAN", "SEARCH") or not table.startswith(of_trials):
        return True
    return any(f"({key}=?" in step for key in ("campaign_id", "trial_id", "rowid", "id"))
