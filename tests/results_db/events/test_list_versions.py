"""Versions of lists change with what the lists show, however fast it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from results_db.models.service_tables import WORKER_ALIVE_S
from results_db.store import Store
from search_spaces.protocol.worker_messages import BeatBody, NodeStatusBody, StatusBody
from search_spaces.spec.layout import Layout
from tests.results_db.factories import (
    TurnableClock,
    completed,
    lease_one,
    make_campaign,
    make_worker,
)


def changes(version: Callable[[], str], act: Callable[[], object]) -> bool:
    """Whether a version is another one after an act, and stays so until the next."""
    before = version()
    assert version() == before
    act()
    return version() != before


def test_each_change_of_a_campaign_gives_another_version_though_no_time_passes(
    store: Store,
) -> None:
    version = store.campaigns_version
    assert changes(version, lambda: make_campaign(store))
    assert changes(version, lambda: make_campaign(store, "second"))
    assert changes(version, lambda: store.add_trial(1, Layout()))
    assert changes(version, lambda: store.add_trial(2, Layout()))
    worker = make_worker(store)
    assert changes(version, lambda: store.lease(worker.id, 1))
    assert changes(version, lambda: store.post_outcome(1, 1, completed()))
    assert changes(version, lambda: store.pause_campaign(1))
    assert changes(version, lambda: store.pause_campaign(2))
    assert changes(version, lambda: store.cancel_campaign(2))
    assert not changes(version, lambda: store.pause_campaign(1))


def test_two_histories_of_one_moment_have_two_versions(store: Store) -> None:
    for name in ("one", "two"):
        make_campaign(store, name)
    store.pause_campaign(1)
    paused_first = store.campaigns_version()
    store.resume_campaign(1)
    store.pause_campaign(2)
    assert store.campaigns_version() != paused_first


def test_numbering_is_no_excuse_for_an_old_version(store: Store) -> None:
    """On PostgreSQL events get their numbers after the commit, and versions hold before that."""
    make_campaign(store)
    store.number_events()
    assert changes(store.campaigns_version, lambda: make_campaign(store, "second"))
    store.number_events()
    assert changes(store.campaigns_version, lambda: store.pause_campaign(1))


def test_wall_times_change_a_version_that_shows_them(store: Store, clock: TurnableClock) -> None:
    make_campaign(store)
    clock.forward(2)
    assert not changes(store.campaigns_version, store.move_clocks)
    clock.forward(2)
    assert changes(lambda: store.campaigns_version(beats=True), store.move_clocks)


def beat(
    store: Store, worker_id: str, doing: str, trials: Sequence[BeatBody] = ()
) -> Callable[[], object]:
    node = NodeStatusBody(name="n1", state="busy", doing=doing)
    return lambda: store.heartbeat(worker_id, list(trials), status=StatusBody(nodes=[node]))


def test_each_change_of_workers_and_nodes_gives_another_version_though_no_time_passes(
    store: Store,
) -> None:
    version = store.nodes_version
    make_campaign(store)
    assert changes(version, lambda: make_worker(store))
    assert changes(version, lambda: make_worker(store, "w2", cluster="other"))
    (worker,) = (each for each in store.workers() if each.name == "w1")
    store.add_trial(1, Layout())
    assert changes(version, lambda: lease_one(store, worker.id))
    assert changes(version, beat(store, worker.id, "trial 1"))
    assert changes(version, beat(store, worker.id, "trial 2"))
    assert not changes(version, beat(store, worker.id, "trial 2"))
    assert changes(version, lambda: store.quarantine_node("local-cpu", "n1", "slow"))
    assert changes(version, lambda: store.release_node("local-cpu", "n1"))
    # An attempt that begins and ends between two calls.
    assert changes(version, lambda: store.post_outcome(1, 1, completed()))
    assert changes(version, lambda: store.drain_worker(worker.id))


def test_a_worker_whose_heartbeats_stop_gives_another_version(
    store: Store, clock: TurnableClock
) -> None:
    worker = make_worker(store)
    beat(store, worker.id, "")()
    assert not changes(store.nodes_version, lambda: clock.forward(1))
    assert not changes(store.nodes_version, beat(store, worker.id, ""))
    assert changes(store.nodes_version, lambda: clock.forward(WORKER_ALIVE_S))


def test_a_version_of_one_cluster_does_not_follow_the_nodes_of_others(store: Store) -> None:
    make_worker(store)
    assert not changes(
        lambda: store.nodes_version("local-cpu"),
        lambda: make_worker(store, "w2", cluster="other"),
    )
    assert changes(lambda: store.nodes_version("other"), lambda: make_worker(store, "w2"))


def test_heartbeats_change_a_version_that_shows_them(store: Store, clock: TurnableClock) -> None:
    make_campaign(store)
    worker = make_worker(store)
    store.add_trial(1, Layout())
    lease = lease_one(store, worker.id)
    said = BeatBody(trial_id=lease.trial_id, attempt=1, iterations_done=3)
    beat(store, worker.id, "", [said])()
    more = BeatBody(trial_id=lease.trial_id, attempt=1, iterations_done=4)
    assert changes(lambda: store.nodes_version(beats=True), beat(store, worker.id, "", [more]))
    clock.forward(1)
    assert not changes(store.nodes_version, beat(store, worker.id, "", [more]))
    clock.forward(1)
    assert changes(lambda: store.nodes_version(beats=True), beat(store, worker.id, "", [more]))
