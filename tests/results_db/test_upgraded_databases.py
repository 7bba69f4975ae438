"""Databases that every released schema has written are upgraded, and nothing in them is lost."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from results_db import migrate
from results_db.integrity import check_database
from results_db.records import TrialBeat
from results_db.store import Store
from tests.results_db.factories import START, TurnableClock, completed

RELEASED = Path(__file__).with_name("released")
REVISIONS = tuple(sorted(path.stem for path in RELEASED.glob("*.sql")))
CAMPAIGNS = {
    "pilot": "COMPLETED",
    "given-up": "CANCELLED",
    "on-hold": "PAUSED",
    "at-work": "RUNNING",
}
"""What every one of them holds."""
CHANGED = {("campaigns", "spec")}
"""Columns whose values a migration may rewrite."""


def write_released(path: Path, revision: str) -> str:
    """Writes the database of a released schema; returns its URL."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((RELEASED / f"{revision}.sql").read_text())
    return f"sqlite:///{path}"


@pytest.fixture(params=REVISIONS)
def released(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a SQLite database as a released schema wrote it; a test runs with each."""
    return write_released(tmp_path / "results.sqlite3", str(request.param))


def test_there_is_a_database_of_every_schema_but_those_of_this_release() -> None:
    known = {script.revision for script in migrate.scripts().walk_revisions()}
    assert known - set(REVISIONS) == {"0006", "0007"}


def rows(path: str) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table, by column, in the order of their keys."""
    with closing(sqlite3.connect(path.removeprefix("sqlite:///"))) as connection:
        connection.row_factory = sqlite3.Row
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {
            name: [dict(row) for row in connection.execute(_in_order(connection, name))]
            for (name,) in names.fetchall()
            if name not in ("alembic_version", "driver_beats", "sqlite_sequence")
        }


def _in_order(connection: sqlite3.Connection, table: str) -> str:
    columns = connection.execute(f"PRAGMA table_info({table})").fetchall()
    key = ", ".join(f'"{column["name"]}"' for column in columns if column["pk"])
    return f"SELECT * FROM {table} ORDER BY {key}"


def test_an_upgrade_keeps_every_row_and_every_value(released: str) -> None:
    before = rows(released)
    migrate.upgrade(released)
    after = rows(released)
    for table, kept in before.items():
        assert len(after[table]) == len(kept), table
        for old, new in zip(kept, after[table], strict=True):
            changed = {name for name, value in old.items() if new[name] != value}
            assert {(table, name) for name in changed} <= CHANGED
    assert sum(map(len, before.values())) > 150


def test_an_upgraded_database_is_whole(released: str) -> None:
    migrate.upgrade(released)
    assert check_database(released).findings == ()


def test_a_downgrade_to_what_it_was_keeps_every_value_that_it_had(released: str) -> None:
    revision = migrate.revision(released)
    assert revision is not None
    before = rows(released)
    migrate.upgrade(released)
    migrate.downgrade(released, revision)
    after = rows(released)
    assert set(after) == set(before)
    for table, kept in before.items():
        for old, new in zip(kept, after[table], strict=True):
            assert {name for name in old if new[name] != old[name]} <= {"spec"}, table
    migrate.upgrade(released)
    assert check_database(released).findings == ()


@pytest.fixture
def store(released: str) -> Iterator[Store]:
    clock = TurnableClock()
    clock.now = START
    migrate.upgrade(released)
    store = Store(released, clock=clock)
    clock.forward(600)
    yield store
    store.close()


def test_its_campaigns_read_as_they_stood_and_its_winner_is_the_same(store: Store) -> None:
    found = {campaign.name: campaign.state for campaign in store.campaigns()}
    assert CAMPAIGNS.items() <= found.items()
    pilot = store.campaign_by_name("pilot")
    (first, *_) = store.standings(pilot.id, "tokens_per_s", limit=1)
    assert first.trial.measurement is not None
    assert first.trial.measurement.tokens_per_s == 1000.0 + 70 * 7
    states = store.count_trials(pilot.id)
    assert (states["COMPLETED"], states["INFEASIBLE"], states["FAILED"]) == (10, 1, 1)


def test_work_that_was_under_way_goes_on_where_it_was(store: Store) -> None:
    campaign = store.campaign_by_name("at-work")
    (running,) = store.trials(campaign.id, states=["RUNNING"])
    assert running.worker_id is not None
    beat = TrialBeat(trial_id=running.id, attempt=running.attempt, iterations_done=3)
    assert store.heartbeat(running.worker_id, [beat]).stop == ()
    assert store.post_outcome(running.id, 1, completed(running.layout)).state == "COMPLETED"
    (lease,) = store.lease(running.worker_id, 9)
    assert lease.campaign_name == "at-work"
    assert store.post_outcome(lease.trial_id, 1, completed(lease.layout)).accepted
    assert store.resume_campaign(store.campaign_by_name("on-hold").id).state == "RUNNING"
    (lease,) = store.lease(running.worker_id, 9)
    assert lease.campaign_name == "on-hold"
