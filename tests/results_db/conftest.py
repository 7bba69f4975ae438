from __future__ import annotations

from collections.abc import Iterator

import pytest

from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.store import TimelyStore, TurnableClock, lease_one, make_campaign, make_worker


@pytest.fixture
def clock() -> TurnableClock:
    return TurnableClock()


@pytest.fixture
def store(database_url: str, clock: TurnableClock) -> Iterator[Store]:
    """A store on SQLite and, in a second run of the test, on PostgreSQL."""
    store = TimelyStore(database_url, clock=clock)
    yield store
    store.close()


@pytest.fixture
def campaign(store: Store) -> int:
    """The campaign "first", which runs."""
    return make_campaign(store)


@pytest.fixture
def worker(store: Store) -> str:
    """The session of a worker of one node with eight devices."""
    return make_worker(store).id


@pytest.fixture
def running(store: Store, campaign: int, worker: str) -> int:
    """A trial of the plain layout that runs, in its first attempt."""
    trial = store.trials.add(campaign, Layout())
    lease_one(store, worker)
    return trial.id
