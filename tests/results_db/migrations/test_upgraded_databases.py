"""A database with a group's rows is upgraded by the next version, and nothing in it is lost."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from results_db.admin.backup_file import back_up
from results_db.admin.integrity import check_database
from results_db.migrations import migrate
from results_db.store import Store
from search_spaces.protocol.worker_messages import BeatBody
from tests.kit.store import (
    START,
    TimelyStore,
    TurnableClock,
    completed,
    post_outcome,
    send_beats,
    take_leases,
)
from tests.results_db.first_weeks import CAMPAIGNS
from tests.results_db.next_version import NEXT, THIS, become_next_version

CHANGED = {("campaigns", "notes")}
"""Columns whose values the next version's migration rewrites."""


@pytest.fixture
def written(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a database that this version wrote; from here on the program is the next version."""
    become_next_version(monkeypatch)
    return url


def rows(path: str) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table of a SQLite, by column, in the order of their keys."""
    with closing(sqlite3.connect(path.removeprefix("sqlite:///"))) as connection:
        connection.row_factory = sqlite3.Row
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {
            name: [dict(row) for row in connection.execute(_in_order(connection, name))]
            for (name,) in names.fetchall()
            if name not in ("alembic_version", "sqlite_sequence")
        }


def _in_order(connection: sqlite3.Connection, table: str) -> str:
    columns = connection.execute(f"PRAGMA table_info({table})").fetchall()
    key = ", ".join(f'"{column["name"]}"' for column in columns if column["pk"])
    return f"SELECT * FROM {table} ORDER BY {key}"


def rows_of(url: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The same of a database of either kind; that of a PostgreSQL goes through a backup."""
    if url.startswith("sqlite"):
        return rows(url)
    path = folder / "rows.sqlite3"
    back_up(url, path, replace=True)
    return rows(str(path))


def test_an_upgrade_keeps_every_value_and_a_downgrade_too(written: str, tmp_path: Path) -> None:
    before = rows_of(written, tmp_path)
    migrate.upgrade(written)
    assert migrate.check(written) == NEXT
    assert check_database(written).findings == ()
    after = rows_of(written, tmp_path)
    for table, kept in before.items():
        assert len(after[table]) == len(kept), table
        for old, new in zip(kept, after[table], strict=True):
            changed = {name for name, value in old.items() if new[name] != value}
            assert {(table, name) for name in changed} <= CHANGED
    assert sum(map(len, before.values())) > 150

    assert {row["notes"] for row in after["campaigns"]} == {"no notes"}
    assert all(row["priority"] == row["last_number"] > 0 for row in after["campaigns"])
    layouts: dict[int, set[str]] = {}
    for trial in after["trials"]:
        layouts.setdefault(trial["campaign_id"], set()).add(trial["layout_key"])
    assert layouts.keys() == {row["id"] for row in after["campaigns"]}
    found = {row["campaign_id"]: row["num_layouts"] for row in after["campaign_layouts"]}
    assert found == {campaign: len(keys) for campaign, keys in layouts.items()}
    migrate.downgrade(written, THIS)
    assert rows_of(written, tmp_path) == before
    migrate.upgrade(written)
    assert check_database(written).findings == ()


@pytest.fixture
def store(written: str) -> Iterator[Store]:
    clock = TurnableClock()
    clock.now = START
    migrate.upgrade(written)
    store = TimelyStore(written, clock=clock)
    clock.forward(600)
    yield store
    store.close()


@pytest.mark.sqlite_is_enough
def test_its_campaigns_read_as_they_stood_and_work_goes_on_where_it_was(store: Store) -> None:
    found = {campaign.name: campaign.state for campaign in store.campaigns.find()}
    assert found == CAMPAIGNS
    pilot = store.campaigns.by_name("pilot")
    (first, *_) = store.leaderboard.ranked_layouts(pilot.id, "tokens_per_s", limit=1)
    assert first.trial.measurement.tokens_per_s == 1000.0 + 70 * 7
    states = store.campaigns.count_trials(pilot.id)
    assert (states["COMPLETED"], states["INFEASIBLE"], states["FAILED"]) == (10, 1, 1)
    campaign = store.campaigns.by_name("at-work")
    (running,) = store.trials.find(campaign.id, states=["RUNNING"])
    beat = BeatBody(trial_id=running.id, attempt=running.attempt, iterations_done=3)
    assert send_beats(store, running.worker_id, [beat]).stop == ()
    assert post_outcome(store, running.id, 1, completed(running.layout)).state == "COMPLETED"
    (lease,) = take_leases(store, running.worker_id, 9)
    assert lease.campaign_name == "at-work"
    assert post_outcome(store, lease.trial_id, 1, completed(lease.layout)).accepted
    assert store.campaigns.resume(store.campaigns.by_name("on-hold").id).state == "RUNNING"
    (lease,) = take_leases(store, running.worker_id, 9)
    assert lease.campaign_name == "on-hold"
