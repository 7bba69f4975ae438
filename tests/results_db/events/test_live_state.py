"""The state behind live events, on both databases."""

from __future__ import annotations

import pytest

from results_db.events.live_state import RunningTrial
from results_db.models.service_tables import WORKER_ALIVE_S
from results_db.store import Store
from search_spaces.protocol.worker_messages import (
    BeatBody,
    NodeStatusBody,
    StatusBody,
)
from search_spaces.spec.layout import Layout
from tests.kit.store import (
    TurnableClock,
    completed,
    lease_one,
    make_campaign,
    make_worker,
    post_outcome,
    send_beats,
)

LAYOUT = Layout(num_microbatches=8)


def test_a_running_trial_shows_the_phase_and_iterations_of_its_last_heartbeat(
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


def test_a_campaign_that_has_ended_is_shown_once_more_with_its_cost(store: Store) -> None:
    campaign = make_campaign(store)
    trial = store.trials.add(campaign, LAYOUT)
    lease_one(store, make_worker(store).id)
    before = store.live.state()
    post_outcome(store, trial.id, 1, completed(LAYOUT))
    store.campaigns.cancel(campaign)
    assert campaign not in store.live.state().campaigns
    then = store.live.state(before)
    ended = then.campaigns[campaign]
    assert (ended.is_open, ended.trials) == (False, ())
    assert ended.node_seconds == store.campaigns.get(campaign).node_seconds
    assert campaign not in store.live.state(then).campaigns


def test_a_deleted_campaign_is_not_shown_again(store: Store, campaign: int) -> None:
    before = store.live.state()
    store.campaigns.cancel(campaign)
    store.campaigns.delete(campaign)
    assert store.live.state(before).campaigns == {}


def test_a_worker_is_lost_without_heartbeats_and_gone_when_it_ends(
    store: Store, clock: TurnableClock
) -> None:
    worker = make_worker(store).id
    assert store.live.state().workers[worker].state == "working"
    send_beats(store, worker, [], status=StatusBody(state="draining"))
    assert store.live.state().workers[worker].state == "draining"
    clock.forward(WORKER_ALIVE_S)
    assert store.live.state().workers[worker].state == "lost"
    store.workers.drain(worker)
    assert store.live.state().workers == {}


@pytest.mark.parametrize(
    "change",
    [{"state": "busy"}, {"health": {"ok": False}}, {"doing": "a probe"}, {"free_devices": 3}],
)
def test_a_node_differs_when_anything_that_is_shown_of_it_does(
    store: Store, change: dict[str, object]
) -> None:
    worker = make_worker(store).id
    as_it_was = {"state": "idle", "health": {"ok": True}, "doing": "", "free_devices": 4}

    def nodes(**changes: object) -> object:
        node = NodeStatusBody(name="n0", **{**as_it_was, **changes})  # type: ignore[arg-type]
        send_beats(store, worker, [], status=StatusBody(nodes=[node]))
        return store.live.state().nodes

    before = nodes()
    assert nodes() == before
    assert nodes(**change) != before
    assert nodes() == before


def test_the_health_of_a_node_stays_until_another_report_comes(store: Store) -> None:
    worker = make_worker(store).id

    def health_after(health: dict[str, object] | None) -> object:
        node = NodeStatusBody(name="n0", state="idle", health=health)
        send_beats(store, worker, [], status=StatusBody(nodes=[node]))
        ((found,),) = [each.nodes for each in store.allocations.find()]
        return found.health

    assert health_after(None) is None
    assert health_after({"ok": True}) == {"ok": True}
    assert health_after(None) == {"ok": True}
    assert health_after({"ok": False}) == {"ok": False}


def test_a_node_in_quarantine_is_shown_without_an_allocation(
    store: Store, clock: TurnableClock
) -> None:
    worker = make_worker(store).id
    send_beats(
        store, worker, [], status=StatusBody(nodes=[NodeStatusBody(name="n0", state="idle")])
    )
    store.allocations.quarantine_node("local-cpu", "n0", "loud")
    node = store.live.state().nodes["local-cpu", "n0"]
    assert (node.state, node.quarantine) == ("idle", "loud")
    clock.forward(WORKER_ALIVE_S)
    node = store.live.state().nodes["local-cpu", "n0"]
    assert (node.state, node.quarantine) == (None, "loud")
    store.allocations.release_node("local-cpu", "n0")
    assert store.live.state().nodes == {}
