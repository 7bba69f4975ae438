"""Campaigns from their request to their end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy.exc import IntegrityError

from results_db.actor import Actor
from results_db.campaigns.filter import CampaignFilter
from results_db.campaigns.idempotency_keys import RequestKey
from results_db.errors import (
    CampaignDuplicateError,
    CampaignNotFoundError,
    CampaignStateError,
    IdempotencyKeyInUseError,
    IdempotencyKeyReusedError,
)
from results_db.rows import MAX_CLOCK_GAP_S
from results_db.store import Store
from search_spaces.protocol.worker_messages import HeartbeatReply
from search_spaces.spec.layout import Layout
from tests.kit.store import (
    TurnableClock,
    completed,
    lease_one,
    make_campaign,
    make_spec,
    make_worker,
    post_outcome,
    send_beats,
    take_leases,
)

pytestmark = pytest.mark.sqlite_is_enough


def test_a_campaign_is_kept_as_it_was_described(store: Store, clock: TurnableClock) -> None:
    spec = make_spec("mine", strategy="exhaustive")
    created = store.campaigns.create(spec, num_legal_layouts=40)
    read = store.campaigns.get(created.id)
    assert read == created == store.campaigns.by_name("mine")
    assert dict(read.spec) == spec
    assert (read.state, read.reason, read.strategy) == ("RUNNING", None, "exhaustive")
    assert (read.model_name, read.cluster_name, read.num_legal_layouts) == ("tiny", "local-cpu", 40)
    assert read.created_at == clock.now
    assert read.created_at.tzinfo is not None
    with pytest.raises(CampaignNotFoundError, match="no campaign 7"):
        store.campaigns.get(7)
    with pytest.raises(CampaignNotFoundError, match="'nobody'"):
        store.campaigns.by_name("nobody")


@pytest.mark.sqlite_is_enough(False)
def test_only_a_name_that_is_taken_is_refused_as_a_duplicate(store: Store) -> None:
    make_campaign(store, "mine")
    with pytest.raises(CampaignDuplicateError, match="'mine' exists already"):
        make_campaign(store, "mine")
    assert len(store.campaigns.find()) == 1
    spec = make_spec("other", strategy=None)
    with pytest.raises(
        IntegrityError, match=r"campaigns\.strategy|column \"strategy\" of relation \"campaigns\""
    ):
        store.campaigns.create(spec, num_legal_layouts=1)


@pytest.mark.sqlite_is_enough(False)
def test_campaigns_are_listed_by_pages_and_states(store: Store) -> None:
    ids = [make_campaign(store, f"c{n}") for n in range(5)]
    store.campaigns.pause(ids[1])
    assert [c.id for c in store.campaigns.find(limit=2)] == [ids[4], ids[3]]
    assert [c.id for c in store.campaigns.find(before_id=ids[3], limit=2)] == [ids[2], ids[1]]
    assert [c.id for c in store.campaigns.find(chosen=CampaignFilter(states=("PAUSED",)))] == [
        ids[1]
    ]
    assert [c.id for c in store.campaigns.to_drive()] == [ids[0], ids[2], ids[3], ids[4]]


@pytest.mark.parametrize(
    ("steps", "wall_time_s"),
    [
        ([(5, "look"), *[(2, "drive")] * 10, (1, "look")], 19),
        (
            [(2, "drive"), (2, "beat"), (2, "drive"), (3600, "beat"), (0, "drive")],
            4 + MAX_CLOCK_GAP_S,
        ),
        ([(1, "drive"), (5, "pause"), (8, "resume"), (1, "drive"), (3, "end"), (100, "look")], 8),
        ([(1, "drive"), (5, "drive"), (-20, "drive")], 5),
        ([(1, "lose"), *[(2, "drive")] * 9, (0, "find"), (2, "drive"), (3, "drive")], 3),
        ([(1, "drive"), (5, "drive"), (1, "lose"), *[(2, "drive")] * 9, (9, "look")], 5),
        ([(1, "lose"), (0, "find on another cluster"), (2, "drive"), (2, "drive")], 0),
        ([(1, "lose"), (0, "find a small one"), (2, "drive"), (2, "drive")], 0),
    ],
    ids=[
        *("only while a driver is at work", "away for an hour", "paused, and ended"),
        *("a clock that is set back", "no worker, then one", "the worker is gone"),
        *("a worker elsewhere", "a worker that is too small"),
    ],
)
def test_wall_time_counts_while_the_campaign_could_go_on(
    store: Store,
    clock: TurnableClock,
    campaign: int,
    steps: list[tuple[float, str]],
    wall_time_s: float,
) -> None:
    worker = make_worker(store)
    store.trials.add(campaign, Layout(tp=2))
    actions: dict[str, Callable[[], object]] = {
        "beat": lambda: send_beats(store, worker.id, []),
        "lose": lambda: store.workers.drain(worker.id),
        "find": lambda: make_worker(store),
        "find on another cluster": lambda: make_worker(store, cluster="elsewhere"),
        "find a small one": lambda: make_worker(store, devices_per_node=1),
        "drive": store.driver.move_clocks,
        "pause": lambda: store.campaigns.pause(campaign),
        "resume": lambda: store.campaigns.resume(campaign),
        "end": lambda: store.campaigns.end(campaign, "COMPLETED", "budget", ""),
        "look": lambda: None,
    }
    for seconds, action in steps:
        clock.forward(seconds)
        actions[action]()
    assert store.campaigns.get(campaign).wall_time_s == pytest.approx(wall_time_s)


def test_pausing_hands_out_nothing_more_and_lets_what_runs_finish(
    store: Store, campaign: int, worker: str, running: int
) -> None:
    store.trials.add(campaign, Layout(tp=2))
    for _ in range(2):
        assert store.campaigns.pause(campaign).state == "PAUSED"
    assert take_leases(store, worker, 1) == []
    assert store.campaigns.to_drive() == []
    assert send_beats(store, worker, []) == HeartbeatReply(stop=())
    assert post_outcome(store, running, 1, completed()).state == "COMPLETED"
    for _ in range(2):
        assert store.campaigns.resume(campaign).state == "RUNNING"
    assert lease_one(store, worker).attempt == 1


def test_cancelling_ends_waiting_trials_at_once(store: Store, campaign: int, running: int) -> None:
    waiting = store.trials.add(campaign, Layout(tp=2))
    ended = store.campaigns.cancel(campaign)
    assert (ended.state, ended.reason) == ("CANCELLED", "cancelled")
    assert ended.ended_at is not None
    assert store.campaigns.cancel(campaign) == ended
    cancelled = store.trials.get(waiting.id)
    assert (cancelled.state, cancelled.reason) == ("CANCELLED", "cancelled")
    assert "cancelled by the user" in cancelled.message
    assert store.trials.get(running).state == "RUNNING"


def test_an_ended_campaign_stays_ended(store: Store, campaign: int) -> None:
    with pytest.raises(CampaignStateError, match="PAUSED does not end"):
        store.campaigns.end(campaign, "PAUSED", "budget", "")
    store.campaigns.end(campaign, "COMPLETED", "budget", "16 trials")
    for attempt in (store.campaigns.pause, store.campaigns.resume, store.campaigns.cancel):
        with pytest.raises(CampaignStateError, match="COMPLETED"):
            attempt(campaign)
    with pytest.raises(CampaignStateError, match="not RUNNING"):
        store.campaigns.end(campaign, "FAILED", "driver", "")
    with pytest.raises(CampaignStateError, match="COMPLETED"):
        store.trials.add(campaign, Layout())
    assert store.campaigns.get(campaign).reason == "budget"


def test_the_driver_takes_back_what_nobody_has_started(
    store: Store, campaign: int, worker: str, running: int
) -> None:
    store.trials.add(campaign, Layout(tp=2))
    assert store.campaigns.cancel_pending(campaign, "the budget is spent") == 1
    assert store.trials.count_open(campaign) == 1
    assert store.trials.get(running).state == "RUNNING"
    assert send_beats(store, worker, []) == HeartbeatReply(stop=())


KEY = RequestKey(key="k", request_hash="a" * 64)


def create(store: Store, name: str, request: RequestKey = KEY) -> int:
    return store.campaigns.create(make_spec(name), num_legal_layouts=1, request=request).id


def test_a_request_that_is_sent_again_finds_its_campaign_and_makes_no_other(store: Store) -> None:
    assert store.campaigns.of_request(KEY) is None
    made = create(store, "first")
    found = store.campaigns.of_request(KEY)
    assert found.id == made
    with pytest.raises(IdempotencyKeyInUseError):
        create(store, "second")
    with pytest.raises(IdempotencyKeyReusedError, match="'k' was sent with another request"):
        store.campaigns.of_request(RequestKey(key="k", request_hash="b" * 64))
    assert [campaign.name for campaign in store.campaigns.find()] == ["first"]
    other = store.by(Actor(name="somebody", role="submitter"))
    assert other.campaigns.of_request(KEY) is None
    assert create(other, "second") != made


def test_a_key_lives_as_long_as_the_campaign_of_its_request(store: Store, campaign: int) -> None:
    with pytest.raises(CampaignDuplicateError):
        create(store, "first")
    assert store.campaigns.of_request(KEY) is None
    made = create(store, "second")
    store.campaigns.cancel(made)
    store.campaigns.delete(made)
    assert store.campaigns.of_request(KEY) is None
