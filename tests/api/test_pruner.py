"""The service lets go of what is old by itself, and goes on where that fails."""

import asyncio
import logging
from pathlib import Path
from typing import Any, cast

import pytest

from api.pruner import pruning
from results_db.errors import DatabaseUnavailableError
from results_db.retention import Pruned, Retention
from results_db.store import Store
from tests.api.process import run_command


class FakeStore:
    """Fails at first, as while a database is away."""

    def __init__(self, turns: list[Any]) -> None:
        self.turns = turns
        self.asked: list[Retention] = []
        self.done = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def prune(self, retention: Retention) -> Pruned:
        self.asked.append(retention)
        turn = self.turns.pop(0) if self.turns else Pruned()
        if not self.turns:
            self.loop.call_soon_threadsafe(self.done.set)
        if isinstance(turn, Exception):
            raise turn
        return cast("Pruned", turn)


def test_it_prunes_again_and_again_whatever_happens(caplog: pytest.LogCaptureFixture) -> None:
    turns = [DatabaseUnavailableError("it is away"), ValueError("a bug"), Pruned(events=3)]

    async def run() -> list[Retention]:
        store = FakeStore(turns)
        retention = Retention(logs=3)
        async with pruning(cast("Store", store), retention, first_after_s=0, every_s=0.01):
            await asyncio.wait_for(store.done.wait(), 30)
        assert store.asked[:3] == [retention] * 3
        return store.asked

    with caplog.at_level(logging.INFO, "api.pruner"):
        asyncio.run(run())
    assert "nothing old was let go of: it is away" in caplog.text
    assert "a bug" in caplog.text


def test_a_service_that_is_told_nonsense_to_keep_does_not_start(tmp_path: Path) -> None:
    refused = run_command("serve", "--data-dir", str(tmp_path / "data"), "--keep", "trials=3")
    assert refused.returncode == 1
    assert refused.stderr == (
        "Error: 'trials=3' does not say what is kept: write KIND=DAYS, of logs, iterations, events, "
        "audit, requests\n"
    )
    assert not (tmp_path / "data").exists()
