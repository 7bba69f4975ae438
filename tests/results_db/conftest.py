from __future__ import annotations

from collections.abc import Iterator

import pytest

from results_db.store import Store
from tests.kit.store import TimelyStore, TurnableClock


@pytest.fixture
def clock() -> TurnableClock:
    return TurnableClock()


@pytest.fixture
def store(database_url: str, clock: TurnableClock) -> Iterator[Store]:
    """A store on SQLite and, in a second run of the test, on PostgreSQL."""
    store = TimelyStore(database_url, clock=clock)
    yield store
    store.close()
