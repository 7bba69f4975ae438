from results_db.records import TrialBeat
from results_db.store import Store
from search_spaces.layout import Layout
from tests.results_db.factories import (
    TurnableClock,
    completed,
    lease_one,
    make_campaign,
    make_worker,
)

LAYOUT = Layout(num_microbatches=8)


def test_a_trial_s_life_is_told_in_order(store: Store) -> None:
    campaign = make_campaign(store)
    trial = store.add_trial(campaign, LAYOUT)
    worker = make_worker(store)
    lease_one(store, worker.id)
    store.post_outcome(trial.id, 1, completed(LAYOUT))
    store.number_events()
    events = store.events(after=0, campaign_id=campaign, limit=10)
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
        store.pause_campaign(campaign)
        store.resume_campaign(campaign)
    store.number_events()
    whole = store.events(after=0, limit=100)
    assert [event.seq for event in whole] == list(range(1, 9))
    assert store.last_event_seq() == 8
    pages, after = [], 0
    while page := store.events(after=after, limit=3):
        pages += page
        after = page[-1].seq
    assert pages == whole
    of_second = store.events(after=0, campaign_id=second, limit=100)
    assert of_second == [event for event in whole if event.campaign_id == second]


def test_the_mark_of_a_campaign_changes_with_each_of_its_events_and_no_other(store: Store) -> None:
    first, second = make_campaign(store, "first"), make_campaign(store, "second")
    marks = [store.campaign_mark(first)]
    store.pause_campaign(second)
    assert store.campaign_mark(first) == marks[-1]
    for change in (store.pause_campaign, store.resume_campaign, store.cancel_campaign):
        change(first)
        marks.append(store.campaign_mark(first))
    assert len(set(marks)) == 4
    assert store.campaign_mark(second) not in marks


def test_a_heartbeat_is_in_the_mark_only_where_it_is_asked_for(
    store: Store, clock: TurnableClock
) -> None:
    campaign = make_campaign(store)
    store.add_trial(campaign, LAYOUT)
    worker = make_worker(store)
    lease = lease_one(store, worker.id)
    plain, live = store.campaign_mark(campaign), store.campaign_mark(campaign, beats=True)
    clock.forward(2)
    beat = TrialBeat(trial_id=lease.trial_id, attempt=1, iterations_done=1)
    store.heartbeat(worker.id, [beat])
    assert store.campaign_mark(campaign) == plain
    assert store.campaign_mark(campaign, beats=True) != live


def test_old_events_go_but_for_the_newest_of_each_campaign(
    store: Store, clock: TurnableClock
) -> None:
    first, second = make_campaign(store, "first"), make_campaign(store, "second")
    store.pause_campaign(first)
    mark = store.campaign_mark(second)
    clock.forward(3600)
    store.resume_campaign(first)
    store.number_events()
    assert store.prune_events(clock()) == 2
    assert [(e.seq, e.campaign_id) for e in store.events(after=0, limit=9)] == [
        (2, second),
        (4, first),
    ]
    assert (store.pruned_event_seq(), store.last_event_seq()) == (3, 4)
    assert store.campaign_mark(second) == mark
    assert store.prune_events(clock()) == 0
    assert store.pruned_event_seq() == 3


def test_an_empty_log_has_no_numbers(store: Store) -> None:
    assert (store.pruned_event_seq(), store.last_event_seq()) == (0, 0)
    assert store.events(after=0, limit=10) == []
    assert store.number_events() == 0
