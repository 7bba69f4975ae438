from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from results_db.database.events import emit
from results_db.store import Store
from search_spaces.protocol.worker_messages import BeatBody
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


def test_a_trial_s_life_is_told_in_order(store: Store, campaign: int) -> None:
    trial = store.trials.add(campaign, LAYOUT)
    worker = make_worker(store)
    lease_one(store, worker.id)
    post_outcome(store, trial.id, 1, completed(LAYOUT))
    store.events.number()
    events = store.events.find(after=0, campaign_id=campaign, limit=10)
    assert [event.kind for event in events] == [
        "campaign.created",
        "trial.added",
        "trial.leased",
        "trial.ended",
    ]
    assert [event.trial_id for event in events] == [None, *[trial.id] * 3]
    assert events[-1].data["state"] == "COMPLETED"


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


def test_the_mark_of_a_campaign_changes_with_each_of_its_events_and_no_other(store: Store) -> None:
    first, second = make_campaign(store, "first"), make_campaign(store, "second")
    marks = [store.events.page_version(first)]
    store.campaigns.pause(second)
    assert store.events.page_version(first) == marks[-1]
    for change in (store.campaigns.pause, store.campaigns.resume, store.campaigns.cancel):
        change(first)
        marks.append(store.events.page_version(first))
    assert len(set(marks)) == 4
    assert store.events.page_version(second) not in marks


def test_a_heartbeat_is_in_the_mark_only_where_it_is_asked_for(
    store: Store, clock: TurnableClock, campaign: int
) -> None:
    store.trials.add(campaign, LAYOUT)
    worker = make_worker(store)
    lease = lease_one(store, worker.id)
    plain, live = (
        store.events.page_version(campaign),
        store.events.page_version(campaign, beats=True),
    )
    clock.forward(2)
    beat = BeatBody(trial_id=lease.trial_id, attempt=1, iterations_done=1)
    send_beats(store, worker.id, [beat])
    assert store.events.page_version(campaign) == plain
    assert store.events.page_version(campaign, beats=True) != live


def test_old_events_go_but_for_the_newest_of_each_campaign(
    store: Store, clock: TurnableClock
) -> None:
    first, second = make_campaign(store, "first"), make_campaign(store, "second")
    store.campaigns.pause(first)
    store.events.number()
    mark = store.events.page_version(second)
    clock.forward(3600)
    store.campaigns.resume(first)
    store.events.number()
    assert store.events.prune(clock()) == 2
    assert [(e.seq, e.campaign_id) for e in store.events.find(after=0, limit=9)] == [
        (2, second),
        (4, first),
    ]
    assert (store.events.pruned_seq(), store.events.last_seq()) == (3, 4)
    assert store.events.page_version(second) == mark
    assert store.events.prune(clock()) == 0
    assert store.events.pruned_seq() == 3


def test_old_events_go_a_few_at_a_time_and_the_newest_of_each_campaign_stays(
    store: Store, clock: TurnableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("results_db.events.event_log.MAX_PRUNED", 3)
    transactions: list[int] = []
    campaigns = [make_campaign(store, name) for name in ("first", "second", "third")]
    for campaign in campaigns:
        store.campaigns.pause(campaign)
        store.campaigns.resume(campaign)
    store.events.number()
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
    assert store.events.pruned_seq() == 8


def test_an_empty_log_has_no_numbers(store: Store) -> None:
    assert (store.events.pruned_seq(), store.events.last_seq()) == (0, 0)
    assert store.events.find(after=0, limit=10) == []
    assert store.events.number() == 0


def test_a_mark_is_never_that_of_before_while_numbers_come_late(store: Store) -> None:
    campaign = make_campaign(store)
    marks = [store.events.page_version(campaign)]
    for change in (store.campaigns.pause, store.campaigns.resume, store.campaigns.pause):
        change(campaign)
        unnumbered = store.events.page_version(campaign)
        assert unnumbered not in marks
        store.events.number()
        numbered = store.events.page_version(campaign)
        assert numbered not in marks
        marks += [unnumbered, numbered]


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
            for _ in range(15):
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
        assert heard == list(range(1, 6 * 31 + 1))


def number_until(store: Store, writing: list[Future[None]]) -> None:
    """Numbers events until everything is written and numbered."""
    while True:
        all_written = all(done.done() for done in writing)
        if (
            store.events.number() == 0
            and all_written
            and not store.statistics.service_stats().unnumbered_events
        ):
            return
