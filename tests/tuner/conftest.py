"""What tests of the driver start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from layout_tuner.results_db.store import Store
from tests.kit.postgres import upgraded
from tests.kit.store import TimelyStore, TurnableClock


@pytest.fixture
def clock() -> TurnableClock:
    return TurnableClock()


@pytest.fixture
def store(tmp_path: Path, clock: TurnableClock) -> Iterator[Store]:
    store = TimelyStore.open(upgraded(tmp_path / "data"), clock=clock)
    yield store
    store.close()
