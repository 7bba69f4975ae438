"""Any order of events gives a legal history."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from results_db.database.store_base import Clock
from results_db.store import Store
from tests.kit.postgres import upgraded
from tests.results_db.history_machine import HistoryMachine

ANY: Final = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
FEW: Final = settings(
    ANY,
    max_examples=6,
    stateful_step_count=30,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)
SOME: Final = settings(ANY, max_examples=3, stateful_step_count=40)
MANY: Final = settings(ANY, max_examples=12, stateful_step_count=60)

NewDatabase = Callable[[], AbstractContextManager[str]]
"""Makes a database that is empty and upgraded; yields its URL."""


@pytest.fixture(params=["sqlite", "postgresql"])
def new_database(request: pytest.FixtureRequest) -> NewDatabase:
    if request.param == "postgresql":
        lend: NewDatabase = request.getfixturevalue("empty_databases").lend
        return lend
    return _new_sqlite


@contextmanager
def _new_sqlite() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield upgraded(Path(folder)).database_url


def _run(new_database: NewDatabase, how_many: settings) -> None:
    @contextmanager
    def open_stores(clock: Clock) -> Iterator[Sequence[Store]]:
        with (
            new_database() as url,
            closing(Store(url, clock=clock)) as one,
            closing(Store(url, clock=clock)) as another,
        ):
            yield (one, another)

    class Histories(HistoryMachine):
        pass

    Histories.open_stores = staticmethod(open_stores)
    run_state_machine_as_test(Histories, settings=how_many)


@pytest.mark.sqlite_is_enough
def test_any_order_of_events_gives_a_legal_history(new_database: NewDatabase) -> None:
    _run(new_database, FEW)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_other_orders_each_time_give_legal_histories(new_database: NewDatabase) -> None:
    _run(new_database, SOME)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_many_other_orders_each_time_give_legal_histories(new_database: NewDatabase) -> None:
    _run(new_database, MANY)
