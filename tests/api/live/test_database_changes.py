"""Waiting for a change of the database, by this process or another."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest

from api.background_loops import TICK_S, aligned_pause_s
from api.live.database_changes import DatabaseChanges
from results_db.database.change_mark import (
    OPEN_SESSION,
    RUNNING_CAMPAIGN,
    RUNNING_TRIAL,
    WAITING_TRIAL,
    ChangeMark,
)
from results_db.database.data_dir import DataDir
from results_db.store import Store
from search_spaces.spec.layout import Layout
from tests.kit.store import completed, lease_one, make_campaign, make_worker, post_outcome

LAYOUT = Layout(num_microbatches=8)


@pytest.fixture
def mark(store: Store) -> Iterator[ChangeMark]:
    mark = store.change_mark()
    assert mark is not None
    with closing(mark):
        mark.has_changed()
        yield mark


def test_a_mark_sees_each_commit_once_of_this_and_other_processes_and_no_reading(
    store: Store, mark: ChangeMark, data_dir: DataDir
) -> None:
    assert not mark.has_changed()
    campaign = make_campaign(store)
    assert mark.has_changed()
    assert not mark.has_changed()
    store.campaigns.get(campaign)
    assert not mark.has_changed()
    store.campaigns.pause(campaign)
    assert mark.has_changed()
    path = data_dir.database_url.removeprefix("sqlite:///")
    program = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); "
        "c.execute('UPDATE event_counter SET last_seq = last_seq + 1'); c.commit()"
    )
    subprocess.run([sys.executable, "-c", program, path], check=True)
    assert mark.has_changed()
    assert not mark.has_changed()


def test_a_mark_finds_work_and_says_yes_where_it_cannot_look(
    store: Store, mark: ChangeMark, tmp_path: Path
) -> None:
    def work() -> list[bool]:
        return [mark.finds(each) for each in (RUNNING_CAMPAIGN, WAITING_TRIAL, RUNNING_TRIAL)]

    assert work() == [False, False, False]
    campaign = make_campaign(store)
    assert work() == [True, False, False]
    trial = store.trials.add(campaign, LAYOUT)
    assert work() == [True, True, False]
    store.campaigns.pause(campaign)
    assert work() == [False, False, False]
    store.campaigns.resume(campaign)
    worker = make_worker(store).id
    lease_one(store, worker)
    assert work() == [True, False, True]
    post_outcome(store, trial.id, 1, completed(LAYOUT))
    assert work() == [True, False, False]
    assert mark.finds(OPEN_SESSION, worker)
    store.workers.drain(worker)
    assert not mark.finds(OPEN_SESSION, worker)
    lost = ChangeMark(tmp_path / "nowhere.sqlite3")
    assert lost.has_changed()
    assert lost.finds(RUNNING_TRIAL)
    assert not (tmp_path / "nowhere.sqlite3").exists()


def test_a_postgresql_has_no_mark(postgres_url: str) -> None:
    with closing(Store.connect(postgres_url)) as store:
        assert store.change_mark() is None


def run(store: Store, body: Callable[[DatabaseChanges], Awaitable[None]], *, stop: Event) -> None:
    async def within() -> None:
        changes = DatabaseChanges(store.change_mark(), stopping=stop, look_s=0.01)
        with closing(changes):
            await body(changes)

    asyncio.run(within())


def test_a_change_wakes_all_waiters_also_one_just_before_the_wait(store: Store) -> None:
    async def body(changes: DatabaseChanges) -> None:
        await changes.after(changes.number, within_s=30, pause_s=30)  # the first look
        seen = changes.number
        waiting = [
            asyncio.create_task(changes.after(seen, within_s=30, pause_s=30)) for _ in range(3)
        ]
        await asyncio.sleep(0.05)
        assert not any(each.done() for each in waiting)
        await asyncio.to_thread(make_campaign, store)
        assert await asyncio.gather(*waiting) == [True] * 3
        assert not await changes.after(changes.number, within_s=0.05, pause_s=30)
        seen = changes.number
        await asyncio.to_thread(make_campaign, store, "second")
        assert await changes.after(seen, within_s=30, pause_s=30)

    run(store, body, stop=Event())


def test_nobody_waits_any_longer_when_the_service_stops(store: Store) -> None:
    stop = Event()

    async def body(changes: DatabaseChanges) -> None:
        await changes.after(changes.number, within_s=30, pause_s=30)
        waiting = asyncio.create_task(changes.after(changes.number, within_s=30, pause_s=30))
        await asyncio.sleep(0.03)
        stop.set()
        assert await waiting

    run(store, body, stop=stop)


@pytest.mark.parametrize("now_s", [0.0, 0.03, 0.0999, 12.05, 12.0999999, 100.1])
def test_pauses_end_at_common_moments(now_s: float) -> None:
    pause_s = aligned_pause_s(now_s)
    assert 0.2 * TICK_S <= pause_s <= 1.2 * TICK_S
    ticks = (now_s + pause_s) / TICK_S
    assert ticks == pytest.approx(round(ticks))
