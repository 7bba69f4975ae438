"""PostgreSQL is killed under load and stays away: clients get errors, and all goes on after it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from benchmarks.service.live_service import wait_until
from benchmarks.service.postgres_server import DURABLE, PostgresServer, running_server
from results_db.migrations import migrate
from tests.e2e.test_kill_storm import (
    PATIENCE_S,
    Storm,
    assert_campaigns_are_whole,
    assert_every_outcome_is_there_once,
    services_sharing,
)
from tests.postgres import TEMPLATE
from tests.results_db.legal_history import violations

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(600)]

AWAY_S: Final = 60.0
"""Longer than any lease, and than any wait of a pool."""
NUM_CAMPAIGNS: Final = 40
DONE_BEFORE: Final = 5


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    with running_server(settings=DURABLE) as server:
        server.execute(f"CREATE DATABASE {TEMPLATE}")
        migrate.upgrade(server.url(TEMPLATE))
        yield server


@pytest.fixture
def storm(
    tmp_path: Path, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Storm]:
    url = server.url(TEMPLATE)
    monkeypatch.setenv("LAYOUT_TUNER_DATABASE_URL", url)
    with services_sharing(tmp_path, url, 1) as services:
        yield Storm(*services, seed=0, num_campaigns=NUM_CAMPAIGNS)


@pytest.mark.nightly
def test_a_database_that_is_away_is_said_to_be_and_nothing_is_lost(
    storm: Storm, server: PostgresServer
) -> None:
    storm.start()
    storm.submit_all()
    service, store = storm.service, storm.service.store

    def num_completed() -> int:
        return sum(store.count_trials(c.id)["COMPLETED"] for c in store.campaigns())

    wait_until("some trials are completed", lambda: num_completed() >= DONE_BEFORE, PATIENCE_S)
    server.stop(3)  # SIGQUIT: as a power cut would
    began = time.monotonic()
    answer = service.http.get("/campaigns")
    assert answer.status_code == 503, answer.text
    assert "Retry-After" in answer.headers
    assert answer.json()["type"].startswith("urn:layout-tuner:problem:database")
    assert service.http.get("/ready").status_code == 503
    wait_until("it was away for long", lambda: time.monotonic() - began > AWAY_S)
    for name, process in storm.processes.items():
        assert not process.has_ended(), f"{name} ended:\n{process.said()}"
    server.start()
    wait_until("the service is ready", lambda: service.http.get("/ready").status_code == 200)
    wait_until("every campaign has ended", storm.has_ended, PATIENCE_S)
    for name, process in storm.processes.items():
        if name not in storm.serves:
            assert process.stop() == 0, process.said()
    assert_campaigns_are_whole(storm)
    assert violations(store) == []
    assert_every_outcome_is_there_once(storm)
