"""Events as they are numbered, read and pruned, and the state behind live ones."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from layout_tuner.protocol.worker_messages import BeatBody, NodeStatusBody, StatusBody
from layout_tuner.results_db.database.events import emit
from layout_tuner.results_db.events.live_state import RunningTrial
from layout_tuner.results_db.models.service_tables import WORKER_ALIVE_S
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.store import TurnableClock, completed, make_campaign, post_outcome, send_beats

pytestmark = pytest.mark.sqlite_is_enough


@pytest.mark.sqlite_is_enough(False)
def test_a_reader_that_goes_on_after_a_number_misses_nothing(store: Store) -> None:
    first, second = make_campaign(store, "first"), make_campaign(store, "second")
    for campaign in (first, second, first):
        store.campaigns.pause(campaign)
        store.campaigns.resume(campaign)
    store.events.number()
    whole = store.events.find(after=0, limit=100)
    assert [event.seq for event in whole] == list(range(1, 9))
    assert store.events.last_seq() == 8
    pages, after = [], 0
    while page := store.events.find(after=after, limit=3):
        pages += page
        after = page[-1].seq
    assert pages == whole
    of_second = store.events.find(after=0, campaign_id=second, limit=100)
    assert of_second == [event for event in whole if event.campaign_id == second]


@pytest.mark.sqlite_is_enough(False)
def test_a_campaign_that_has_ended_has_a_last_event_once_its_end_has_a_number(
    store: Store,
) -> None:
    first, _ = make_campaign(store, "first"), make_campaign(store, "second")
    store.trials.add(first, Layout())
    store.events.number()
    assert store.events.end(first) is None, "it runs"
    store.campaigns.cancel(first)
    assert store.events.end(first) == (None if store._db.is_shared else 5)
    store.events.number()
    assert [e.kind for e in store.events.find(after=3, limit=9)] == [
        "campaign.ended",
        "trial.ended",
    ]
    assert store.events.end(first) == 5
    store.events.prune(store._clock())
    assert store.events.end(first) == 5


@pytest.mark.sqlite_is_enough(False)
def test_the_mark_of_a_campaign_changes_with_its_own_events_alone(store: Store) -> None:
    first, second = make_campaign(store, "first"), make_campaign(store, "second")
    marks = [store.events.page_version(first)]
    store.campaigns.pause(second)
    assert store.events.page_version(first) == marks[-1]
    pause, resume, cancel = store.campaigns.pause, store.campaigns.resume, store.campaigns.cancel
    for change in (pause, resume, pause, cancel):
        change(first)
        marks.append(store.events.page_version(first))
        store.events.number()
        marks.append(store.events.page_version(first))
    # On a SQLite an event has its number at once.
    assert len(set(marks)) == (9 if store.is_shared else 5)
    assert store.events.page_version(second) not in marks


def test_a_heartbeat_is_in_the_mark_only_where_it_is_asked_for(
    store: Store, clock: TurnableClock, campaign: int, worker: str, running: int
) -> None:
    plain = store.events.page_version(campaign)
    live = store.events.page_version(campaign, beats=True)
    clock.forward(2)
    send_beats(store, worker, [BeatBody(trial_id=running, attempt=1, iterations_done=1)])
    assert store.events.page_version(campaign) == plain
    assert store.events.page_version(campaign, beats=True) != live


@pytest.mark.sqlite_is_enough(False)
def test_old_events_go_a_few_at_a_time_and_the_newest_of_each_campaign_stays(
    store: Store, clock: TurnableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (store.events.pruned_seq(), store.events.last_seq(), store.events.number()) == (0, 0, 0)
    monkeypatch.setattr("layout_tuner.results_db.events.event_log.MAX_PRUNED", 3)
    transactions: list[int] = []
    campaigns = [make_campaign(store, name) for name in ("first", "second", "third")]
    for campaign in campaigns:
        store.campaigns.pause(campaign)
        store.campaigns.resume(campaign)
    store.events.number()
    mark = store.events.page_version(campaigns[1])
    clock.forward(3600)
    store.campaigns.pause(campaigns[0])
    store.events.number()
    write = store._db.write

    def counted() -> Any:
        transactions.append(store.events.pruned_seq())
        return write()

    monkeypatch.setattr(store._db, "write", counted)
    assert store.events.prune(clock()) == 7
    assert len(transactions) == 3
    assert transactions == sorted(set(transactions))
    kept = store.events.find(after=0, limit=9)
    assert [event.campaign_id for event in kept] == [*campaigns[1:], campaigns[0]]
    assert (store.events.pruned_seq(), store.events.last_seq()) == (8, 10)
    assert store.events.page_version(campaigns[1]) == mark
    assert (store.events.prune(clock()), store.events.pruned_seq()) == (0, 8)


def test_what_commits_late_is_numbered_late_so_that_no_reader_passes_it(postgres_url: str) -> None:
    with closing(Store(postgres_url)) as store:
        slow, quick = make_campaign(store, "slow"), make_campaign(store, "quick")
        store.events.number()
        with store._db.write() as session:
            emit(session, slow, "campaign.changed", now=store._clock())
            store.campaigns.pause(quick)
            assert store.events.number() == 1
            assert [e.campaign_id for e in store.events.find(after=2, limit=9)] == [quick]
        assert store.events.number() == 1
        assert [e.campaign_id for e in store.events.find(after=3, limit=9)] == [slow]


def test_a_reader_misses_nothing_of_many_writers_and_numberers(postgres_url: str) -> None:
    with closing(Store(postgres_url)) as store, ThreadPoolExecutor(8) as pool:
        campaigns = [make_campaign(store, f"c{i}") for i in range(6)]

        def write(campaign: int) -> None:
            for _ in range(8):
                store.campaigns.pause(campaign)
                store.campaigns.resume(campaign)

        writing = [pool.submit(write, campaign) for campaign in campaigns]
        numbering = [pool.submit(number_until, store, writing) for _ in range(2)]
        heard: list[int] = []
        while not all(done.done() for done in numbering) or store.events.find(
            after=len(heard), limit=1
        ):
            heard += [e.seq for e in store.events.find(after=heard[-1] if heard else 0, limit=50)]
        for done in (*writing, *numbering):
            done.result()
        assert heard == list(range(1, 6 * 17 + 1))


def number_until(store: Store, writing: list[Future[None]]) -> None:
    """Numbers events until everything is written and numbered."""
    while True:
        all_written = all(done.done() for done in writing)
        numbered = store.events.number()
        if all_written and not (numbered or store.statistics.service_stats().unnumbered_events):
            return


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
