"""Live events: progress of running trials, workers and nodes, as soon as the database changes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from layout_tuner.api.background_loops import TICK_S, aligned_pause_s
from layout_tuner.api.live import database_changes
from layout_tuner.api.live.database_changes import WHILE_TIMING_S, DatabaseChanges
from layout_tuner.api.live.live_events import MAX_LISTED, LiveEvent, first_events, live_events
from layout_tuner.api.settings import Settings
from layout_tuner.protocol.worker_messages import BeatBody, NodeStatusBody, StatusBody
from layout_tuner.results_db.campaigns.plans import PlanOptions
from layout_tuner.results_db.database.change_mark import (
    OPEN_SESSION,
    RUNNING_CAMPAIGN,
    RUNNING_TRIAL,
    WAITING_TRIAL,
    ChangeMark,
)
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.events.live_state import (
    LiveState,
    NodeStatus,
    RunningCampaign,
    RunningTrial,
    WorkerSession,
)
from layout_tuner.results_db.models.service_tables import WORKER_ALIVE_S
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.timing_mark import SHARED_CORES_VARIABLE, TIMING_VARIABLE, timing
from tests.kit.api import TOKEN
from tests.kit.live import Watcher, live_service
from tests.kit.postgres import upgraded
from tests.kit.store import (
    START,
    TurnableClock,
    completed,
    lease_one,
    make_campaign,
    make_spec,
    make_worker,
    post_outcome,
    send_beats,
)

LAYOUT = Layout(num_microbatches=8)
SETTINGS = {"token": TOKEN, "event_poll_s": 0.02, "event_idle_poll_s": 0.05, "live_event_s": 0.05}


@pytest.fixture
def url(store: Store) -> Iterator[str]:
    with live_service(Settings(**SETTINGS), store) as url:  # type: ignore[arg-type]
        yield url


def running_trial(store: Store, campaign: int, name: str = "w1") -> tuple[str, int]:
    """A worker and the trial that it has leased."""
    trial = store.trials.add(campaign, LAYOUT)
    worker = make_worker(store, name).id
    lease_one(store, worker)
    return worker, trial.id


def beat(store: Store, worker: str, trial: int, done: int) -> None:
    send_beats(store, worker, [BeatBody(trial_id=trial, attempt=1, iterations_done=done)])


def next_of(watcher: Watcher, kind: str) -> dict[str, Any]:
    while True:
        found, data = watcher.next()
        if found == kind:
            return data


def iterating(done: int) -> dict[str, Any]:
    return {"phase": "iterating", "iterations_done": done}


def progress_at(watcher: Watcher, done: int) -> dict[str, Any]:
    """The progress event in which the first running trial has so many iterations."""
    while True:
        event = next_of(watcher, "campaign.progress")
        trials = event["data"]["trials"]
        if trials and trials[0]["iterations_done"] == done:
            return event


def test_progress_within_a_probe_and_its_end_reach_the_watchers_of_its_campaign_alone(
    url: str, store: Store
) -> None:
    mine, other = make_campaign(store, "mine"), make_campaign(store, "other")
    with (
        Watcher(f"{url}/campaigns/{mine}/events") as watcher,
        Watcher(f"{url}/campaigns/{other}/events") as others,
        Watcher(f"{url}/events") as all_of_them,
    ):
        for each in (watcher, others, all_of_them):
            each.opened()
        worker, trial = running_trial(store, mine)
        beat(store, worker, trial, 3)
        event = progress_at(watcher, 3)
        assert (event["seq"], event["campaign_id"], event["trial_id"]) == (None, mine, None)
        assert event["data"] == {
            "node_hours": 0.0,
            "num_running": 1,
            "trials": [{"id": trial, "number": 1, "attempt": 1, **iterating(3)}],
        }
        assert progress_at(all_of_them, 3)["campaign_id"] == mine
        post_outcome(store, trial, 1, completed(LAYOUT))
        data = next_of(watcher, "campaign.progress")["data"]
        assert (data["num_running"], data["trials"]) == (0, [])
        assert data["node_hours"] == store.campaigns.get(mine).node_seconds / 3600
        store.campaigns.pause(other)
        assert others.kinds(1) == ["campaign.paused"]


def test_live_events_neither_move_the_place_of_a_watcher_nor_are_stored(
    url: str, store: Store
) -> None:
    campaign = make_campaign(store)
    worker, trial = running_trial(store, campaign)
    version, last = store.events.page_version(campaign), store.events.last_seq()
    with Watcher(f"{url}/campaigns/{campaign}/events") as watcher:
        assert watcher.opened() == {"after": last, "missed": False}
        beat(store, worker, trial, 2)
        progress_at(watcher, 2)
        assert watcher.last_id == str(last)
    assert store.events.page_version(campaign) == version
    assert store.events.last_seq() == last
    with Watcher(f"{url}/campaigns/{campaign}/events", last_event_id=watcher.last_id) as again:
        assert again.opened() == {"after": last, "missed": False}
        # What it may have missed of the running trials comes at once.
        assert progress_at(again, 2)["data"]["num_running"] == 1


def test_nothing_is_sent_while_nothing_changes(url: str, store: Store) -> None:
    campaign = make_campaign(store)
    worker, trial = running_trial(store, campaign)
    with Watcher(f"{url}/events") as watcher:
        watcher.opened()
        progress_at(watcher, 0)
        for _ in range(5):
            beat(store, worker, trial, 1)  # the same again and again: only the lease is extended
        progress_at(watcher, 1)
        beat(store, worker, trial, 1)
        store.campaigns.pause(campaign)
        assert watcher.kinds(1) == ["campaign.paused"]


def test_workers_and_nodes_are_told_to_watchers_of_everything(url: str, store: Store) -> None:
    campaign = make_campaign(store)
    with (
        Watcher(f"{url}/events") as watcher,
        Watcher(f"{url}/campaigns/{campaign}/events") as of_campaign,
    ):
        watcher.opened()
        of_campaign.opened()
        worker = make_worker(store).id
        event = next_of(watcher, "worker.changed")
        about = {"worker_id": worker, "name": "w1", "cluster": "local-cpu"}
        assert event["data"] == {**about, "state": "working"}
        assert (event["seq"], event["campaign_id"], event["trial_id"]) == (None, None, None)
        nodes = [NodeStatusBody(name="n0", state="idle")]
        send_beats(store, worker, [], status=StatusBody(state="draining", nodes=nodes))
        assert next_of(watcher, "worker.changed")["data"]["state"] == "draining"
        assert next_of(watcher, "nodes.changed")["data"] == {
            "cluster": "local-cpu",
            "num_changed": 1,
            "nodes": [{"name": "n0", "state": "idle", "quarantine": None}],
        }
        store.allocations.quarantine_node("local-cpu", "n0", "loud")
        assert next_of(watcher, "nodes.changed")["data"]["nodes"] == [
            {"name": "n0", "state": "idle", "quarantine": "loud"}
        ]
        store.workers.drain(worker)
        assert next_of(watcher, "worker.changed")["data"]["state"] == "ended"
        store.campaigns.pause(campaign)
        assert of_campaign.kinds(1) == ["campaign.paused"]


def test_the_end_of_a_plan_is_told_once_to_watchers_of_everything(url: str, store: Store) -> None:
    plan = store.plans.request(make_spec("planned"), PlanOptions())
    with Watcher(f"{url}/events") as watcher:
        watcher.opened()
        store.plans.end(plan.id, "no layout is legal")
        told = next_of(watcher, "plan.ended")
    assert told["data"] == {"plan_id": plan.id, "state": "FAILED"}
    assert (told["campaign_id"], told["seq"]) == (None, None)

    done = LiveState(plans={1: ("DONE", "a"), 2: ("WAITING", "a")})
    assert live_events(done, LiveState(plans={1: ("DONE", "a"), 2: ("WAITING", "a")}), START) == []
    (event,) = live_events(done, LiveState(plans={1: ("DONE", "a"), 2: ("DONE", "a")}), START)
    assert b'"plan_id":2' in event.content


def test_a_heartbeat_at_one_service_reaches_the_watchers_of_both(database_url: str) -> None:
    with (
        closing(Store.connect(database_url)) as first,
        closing(Store.connect(database_url)) as second,
        live_service(Settings(**SETTINGS), first) as url,  # type: ignore[arg-type]
        live_service(Settings(**SETTINGS), second) as other_url,  # type: ignore[arg-type]
    ):
        campaign = make_campaign(first)
        worker, trial = running_trial(first, campaign)
        with (
            Watcher(f"{url}/campaigns/{campaign}/events") as here,
            Watcher(f"{other_url}/events") as there,
        ):
            here.opened()
            there.opened()
            beat(first, worker, trial, 6)
            assert progress_at(here, 6)["data"] == progress_at(there, 6)["data"]


def test_a_worker_that_is_lost_is_told_by_the_clock_alone(tmp_path: Path) -> None:
    clock = TurnableClock()
    with (
        closing(Store.open(upgraded(tmp_path / "data"), clock=clock)) as store,
        live_service(Settings(**SETTINGS), store) as url,  # type: ignore[arg-type]
        Watcher(f"{url}/events") as watcher,
    ):
        watcher.opened()
        make_worker(store)
        assert next_of(watcher, "worker.changed")["data"]["state"] == "working"
        clock.forward(WORKER_ALIVE_S)
        assert next_of(watcher, "worker.changed")["data"]["state"] == "lost"


def campaign_of(*done: int) -> RunningCampaign:
    trials = tuple(
        RunningTrial(id=number, number=number, attempt=1, phase="iterating", iterations_done=each)
        for number, each in enumerate(done, start=1)
    )
    return RunningCampaign(is_open=True, node_seconds=0.0, trials=trials)


def data_of(event: LiveEvent) -> dict[str, Any]:
    lines = event.content.decode().splitlines()
    (line,) = [line for line in lines if line.startswith("data: ")]
    assert not any(line.startswith("id:") for line in lines)
    return json.loads(line.removeprefix("data: "))["data"]


def test_a_campaign_has_at_most_one_event_that_lists_the_running_trials_that_changed() -> None:
    before = [0] * (MAX_LISTED + 50)
    now = list(before)
    now[-1] = now[-3] = 1
    (event,) = live_events(
        LiveState(campaigns={1: campaign_of(*before)}),
        LiveState(campaigns={1: campaign_of(*now)}),
        START,
    )
    data = data_of(event)
    assert data["num_running"] == len(now)
    assert len(data["trials"]) == MAX_LISTED
    assert [trial["number"] for trial in data["trials"][:3]] == [len(now) - 2, len(now), 1]

    before = LiveState(campaigns={1: campaign_of(0, 0), 2: campaign_of()})
    now = LiveState(
        campaigns={1: replace(campaign_of(1, 2), node_seconds=7200.0), 2: campaign_of()}
    )
    (event,) = live_events(before, now, START)
    assert (event.kind, event.campaign_id) == ("campaign.progress", 1)
    assert data_of(event)["node_hours"] == 2.0
    assert live_events(now, now, START) == []


def test_many_nodes_are_one_event_of_each_cluster() -> None:
    def nodes(state: str) -> dict[tuple[str, str], NodeStatus]:
        status = NodeStatus(state=state, quarantine=None, details=())  # type: ignore[arg-type]
        return {("big", f"n{at:04}"): status for at in range(1000)} | {("small", "n"): status}

    events = live_events(LiveState(nodes=nodes("idle")), LiveState(nodes=nodes("lost")), START)
    said = [data_of(event) for event in events]
    assert [(data["cluster"], data["num_changed"]) for data in said] == [
        ("big", 1000),
        ("small", 1),
    ]
    assert len(said[0]["nodes"]) == MAX_LISTED
    assert all(len(event.content) < 20_000 for event in events)


def test_a_watcher_begins_with_running_trials_and_with_what_changed_since_it_opened() -> None:
    worker = WorkerSession(name="w1", cluster="c", state="working")
    opened = LiveState(campaigns={1: campaign_of(3), 2: campaign_of()}, workers={"a": worker})
    now = replace(opened, workers={})
    assert [event.kind for event in first_events(opened, now, START, None)] == [
        "campaign.progress",
        "worker.changed",
    ]
    assert [event.campaign_id for event in first_events(opened, now, START, 1)] == [1]
    assert first_events(opened, now, START, 2) == []


@pytest.fixture
def mark(store: Store) -> Iterator[ChangeMark]:
    mark = store.change_mark()
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


def test_a_mark_finds_campaigns_and_trials_at_work(store: Store, mark: ChangeMark) -> None:
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
    lease_one(store, make_worker(store).id)
    assert work() == [True, False, True]
    post_outcome(store, trial.id, 1, completed(LAYOUT))
    assert work() == [True, False, False]


def test_a_mark_finds_a_session_until_it_drains(store: Store, mark: ChangeMark) -> None:
    worker = make_worker(store).id
    assert mark.finds(OPEN_SESSION, worker)
    store.workers.drain(worker)
    assert not mark.finds(OPEN_SESSION, worker)


def test_a_mark_without_a_database_assumes_changes(tmp_path: Path) -> None:
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


def test_looks_are_seldom_while_ranks_time_on_the_same_cores(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    intervals: list[float] = []

    def pause_s(_now_s: float, interval_s: float) -> float:
        intervals.append(interval_s)
        return 0.0

    monkeypatch.setattr(database_changes, "aligned_pause_s", pause_s)

    async def body(changes: DatabaseChanges) -> None:
        await changes.after(changes.number, within_s=0.05, pause_s=30)

    monkeypatch.setenv(TIMING_VARIABLE, str(tmp_path / "timing"))
    for shares, expected in (("", {0.01}), ("1", {WHILE_TIMING_S})):
        monkeypatch.setenv(SHARED_CORES_VARIABLE, shares)
        with timing():
            run(store, body, stop=Event())
        assert {*intervals} == expected
        intervals.clear()
    run(store, body, stop=Event())
    assert {*intervals} == {0.01}


@pytest.mark.parametrize("now_s", [0.0, 0.03, 0.0999, 12.05, 12.0999999, 100.1])
def test_pauses_end_at_common_moments(now_s: float) -> None:
    pause_s = aligned_pause_s(now_s)
    assert 0.2 * TICK_S <= pause_s <= 1.2 * TICK_S
    ticks = (now_s + pause_s) / TICK_S
    assert ticks == pytest.approx(round(ticks))
