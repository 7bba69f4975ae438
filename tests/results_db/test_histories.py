"""Any order of events gives a legal history."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

from results_db.data_dir import DataDir
from results_db.part import Clock
from results_db.store import Store
from tests.results_db.history_machine import HistoryMachine


@cache
def _empty_database() -> bytes:
    """An upgraded one; migrating each time would take most of the time."""
    with tempfile.TemporaryDirectory() as folder:
        data_dir = DataDir(Path(folder))
        Store.open(data_dir).close()
        return Path(data_dir.database_url.removeprefix("sqlite:///")).read_bytes()


@contextmanager
def sqlite_stores(clock: Clock) -> Iterator[Sequence[Store]]:
    folder = tempfile.mkdtemp()
    data_dir = DataDir(Path(folder))
    Path(data_dir.database_url.removeprefix("sqlite:///")).write_bytes(_empty_database())
    url = data_dir.database_url
    try:
        with closing(Store(url, clock=clock)) as one, closing(Store(url, clock=clock)) as other:
            yield (one, other)
    finally:
        shutil.rmtree(folder)


class Histories(HistoryMachine):
    open_stores = staticmethod(sqlite_stores)


class ManyHistories(Histories):
    """Others each time; a failure prints how to see it again."""


_SHORT: Final = settings(
    max_examples=12,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
_LONG: Final = settings(
    max_examples=40,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)

Histories.TestCase.settings = _SHORT
ManyHistories.TestCase.settings = _LONG

TestHistories = Histories.TestCase
TestManyHistories = pytest.mark.timeout(600)(pytest.mark.slow(ManyHistories.TestCase))
