"""The state behind live events, on both databases."""

from __future__ import annotations

from typing import Any

import pytest

from results_db.events.live_state import RunningTrial
from results_db.models.service_tables import WORKER_ALIVE_S
from results_db.store import Store
from search_spaces.protocol.worker_messages import BeatBody, NodeStatusBody, StatusBody
from tests.kit.store import TurnableClock, completed, make_campaign, post_outcome, send_beats

pytestmark = pytest.mark.sqlite_is_enough


@pytest.mark.sqlite_is_enough(False)
def test_a_running_trial_shows_its_last_heartbeat(
    store: Store, campaign: int, worker: str, running: int
) -> None:
    idle = make_campaign(store, "idle")
    shown = RunningTrial(id=running, number=1, attempt=1, phase=None, iterations_done=0)
    assert store.live.state().campaigns[campaign].trials == (shown,)
    said = BeatBody(trial_id=running, attempt=1, iterations_done=7)
    send_beats(store, worker, [said])
    state = store.live.state()
    shown = RunningTrial(id=running, number=1, attempt=1, phase="iterating", iterations_done=7)
    assert state.campaigns[campaign].trials == (shown,)
    assert state.campaigns[idle].trials == ()


def test_an_ended_campaign_is_shown_once_more(store: Store, campaign: int, running: int) -> None:
    before = store.live.state()
    post_outcome(store, running, 1, completed())
    store.campaigns.cancel(campaign)
    assert campaign not in store.live.state().campaigns
    then = store.live.state(before)
    ended = then.campaigns[campaign]
    assert (ended.is_open, ended.trials) == (False, ())
    assert ended.node_seconds == store.campaigns.get(campaign).node_seconds
    assert campaign not in store.live.state(then).campaigns
    store.campaigns.delete(campaign)
    assert store.live.state(before).campaigns == {}


def test_a_silent_worker_is_lost(store: Store, clock: TurnableClock, worker: str) -> None:
    assert store.live.state().workers[worker].state == "working"
    send_beats(store, worker, [], status=StatusBody(state="draining"))
    assert store.live.state().workers[worker].state == "draining"
    clock.forward(WORKER_ALIVE_S)
    assert store.live.state().workers[worker].state == "lost"
    store.workers.drain(worker)
    assert store.live.state().workers == {}


def test_a_node_differs_when_anything_that_is_shown_of_it_does(store: Store, worker: str) -> None:
    def shown(**said: Any) -> object:
        node = NodeStatusBody(name="n0", **{"state": "idle", "health": {"ok": True}, **said})
        send_beats(store, worker, [], status=StatusBody(nodes=[node]))
        return store.live.state().nodes

    assert store.live.state().nodes != shown(health=None) != shown()
    before = shown()
    for change in (
        {"state": "busy"},
        {"health": {"ok": False}},
        {"doing": "a probe"},
        {"free_devices": 3},
    ):
        assert shown(**change) != before
        assert shown() == before
    assert shown(health=None) == before, "the health stays until another report comes"


def test_a_quarantine_outlives_its_worker(store: Store, clock: TurnableClock, worker: str) -> None:
    idle = NodeStatusBody(name="n0", state="idle")
    send_beats(store, worker, [], status=StatusBody(nodes=[idle]))
    store.allocations.quarantine_node("local-cpu", "n0", "loud")
    node = store.live.state().nodes["local-cpu", "n0"]
    assert (node.state, node.quarantine) == ("idle", "loud")
    clock.forward(WORKER_ALIVE_S)
    node = store.live.state().nodes["local-cpu", "n0"]
    assert (node.state, node.quarantine) == (None, "loud")
    store.allocations.release_node("local-cpu", "n0")
    assert store.live.state().nodes == {}
