"""Campaigns from their request to their end: what changes, by what they are found, and deletion."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from layout_tuner.errors import CampaignInvalidError
from layout_tuner.protocol.worker_messages import HeartbeatReply
from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.campaigns.filter import CampaignFilter
from layout_tuner.results_db.campaigns.idempotency_keys import RequestKey
from layout_tuner.results_db.errors import (
    CampaignDuplicateError,
    CampaignNotFoundError,
    CampaignStateError,
    IdempotencyKeyInUseError,
    IdempotencyKeyReusedError,
)
from layout_tuner.results_db.models.table_base import Base
from layout_tuner.results_db.store import Store
from layout_tuner.results_db.wall_time import MAX_CLOCK_GAP_S
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.store import (
    START,
    TurnableClock,
    completed,
    failed,
    lease_one,
    make_campaign,
    make_spec,
    make_worker,
    post_outcome,
    run_trial,
    send_beats,
    take_leases,
)
from tests.results_db.campaigns.test_analyses import make_analysis

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
    with pytest.raises(
        IntegrityError, match=r"campaigns\.strategy|column \"strategy\" of relation \"campaigns\""
    ):
        make_campaign(store, "other", strategy=None)


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


def rows(store: Store, statement: str, **values: Any) -> list[Any]:
    with store._db.read() as session:
        return list(session.execute(text(statement), values))


def told(store: Store, campaign_id: int) -> list[str]:
    found = rows(store, "SELECT kind FROM events WHERE campaign_id = :c ORDER BY id", c=campaign_id)
    return [kind for (kind,) in found]


def audited(store: Store) -> list[str]:
    return [action for (action,) in rows(store, "SELECT action FROM audit ORDER BY id")]


def end(store: Store, campaign_id: int) -> None:
    store.campaigns.end(campaign_id, "COMPLETED", "budget", "done")


def test_a_changed_budget_is_told_and_audited_also_in_a_pause(store: Store, campaign: int) -> None:
    changed = store.campaigns.update(campaign, budget={"trials": 40, "wall_time": "1h"})
    budget = {"trials": 40, "node_hours": None, "wall_time_s": 3600.0}
    assert changed.spec["budget"] == store.campaigns.get(campaign).spec["budget"] == budget
    store.campaigns.update(campaign, budget={"trials": 40}, notes="")
    store.campaigns.update(campaign)
    assert told(store, campaign) == ["campaign.created", "campaign.changed"], "once"
    assert audited(store) == ["campaign.create", "campaign.update"]
    store.campaigns.pause(campaign)
    assert store.campaigns.update(campaign, budget={"trials": 11}).spec["budget"]["trials"] == 11
    assert store.campaigns.get(campaign).state == "PAUSED"


def test_an_ended_campaign_changes_its_notes_alone(store: Store, campaign: int) -> None:
    with pytest.raises(CampaignNotFoundError):
        store.campaigns.update(999, notes="x")
    with pytest.raises(CampaignInvalidError, match=r"budget\.trials"):
        store.campaigns.update(campaign, budget={"trials": -1}, notes="more")
    end(store, campaign)
    with pytest.raises(CampaignStateError, match=r"is COMPLETED and is not reopened.*clone"):
        store.campaigns.update(campaign, budget={"trials": 40}, notes="more")
    record = store.campaigns.get(campaign)
    assert (record.spec["budget"]["trials"], record.notes) == (10, "")
    assert store.campaigns.update(campaign, notes="we took it").notes == "we took it"


def test_an_ending_that_rests_on_another_budget_is_refused(store: Store, campaign: int) -> None:
    store.trials.add(campaign, Layout())
    looked_at = store.campaigns.get(campaign).stored.budget
    store.campaigns.update(campaign, budget={"trials": 40})
    with pytest.raises(CampaignStateError, match="was changed meanwhile"):
        store.campaigns.end(campaign, "COMPLETED", "budget", "10 of 10", budget=looked_at)
    with pytest.raises(CampaignStateError, match="was changed meanwhile"):
        store.campaigns.cancel_pending(campaign, "time is up", budget=looked_at)
    assert store.campaigns.get(campaign).state == "RUNNING"
    assert store.campaigns.count_trials(campaign)["PENDING"] == 1
    budget = store.campaigns.get(campaign).stored.budget
    assert store.campaigns.cancel_pending(campaign, "time is up", budget=budget) == 1
    assert store.campaigns.end(campaign, "COMPLETED", "budget", "", budget=budget).ended_at


def full_campaign(store: Store, name: str = "first") -> int:
    """A campaign with a row in every table that knows of campaigns."""
    campaign = make_campaign(store, name)
    first, _ = run_trial(store, campaign), run_trial(store, campaign)
    run_trial(store, campaign, Layout(tp=2), failed())
    store.reports.keep_analysis(campaign, make_analysis(first))
    end(store, campaign)
    return campaign


def count_rows(store: Store) -> dict[str, int]:
    """Rows of every table but those that tell what happened, and the workers' own."""
    kept = {"audit", "events", "event_counter", "workers", "allocation_nodes"}
    tables = [name for name in Base.metadata.tables if name not in kept]
    with store._db.read() as session:
        return {name: session.scalar(text(f"SELECT count(*) FROM {name}")) or 0 for name in tables}


@pytest.mark.sqlite_is_enough(False)
def test_deletion_takes_all_that_was_measured_and_nothing_of_others(store: Store) -> None:
    full_campaign(store, "other")
    before = count_rows(store)
    campaign = full_campaign(store)
    assert count_rows(store)["trials"] == before["trials"] + 3
    store.campaigns.delete(campaign)
    assert count_rows(store) == {**before, "past_use": before["past_use"] + 1}  # its usage stays
    assert told(store, campaign) == ["campaign.deleted"]
    assert audited(store)[-1] == "campaign.delete"
    with pytest.raises(CampaignNotFoundError):
        store.campaigns.delete(campaign)
    assert store.campaigns.get(make_campaign(store)).name == "first", "the name is free again"


@pytest.mark.sqlite_is_enough(False)
def test_a_campaign_is_deleted_when_nothing_of_it_runs(
    store: Store, campaign: int, running: int
) -> None:
    for state in ("RUNNING", "PAUSED"):
        with pytest.raises(CampaignStateError, match=f"is {state}; cancel it before"):
            store.campaigns.delete(campaign)
        store.campaigns.pause(campaign)
    store.campaigns.cancel(campaign)
    with pytest.raises(CampaignStateError, match="still stopping 1 trial of"):
        store.campaigns.delete(campaign)
    post_outcome(store, running, 1, failed("cancelled"))
    store.campaigns.delete(campaign)


@pytest.mark.sqlite_is_enough(False)
def test_a_campaign_that_an_open_one_starts_from_is_not_deleted(store: Store) -> None:
    source = full_campaign(store, "source")
    heir = make_campaign(store, "heir", start_from=["source"])
    with pytest.raises(CampaignStateError, match="'heir' starts from 'source'"):
        store.campaigns.delete(source)
    store.campaigns.cancel(heir)
    store.campaigns.delete(source)
    assert store.plans.known_trials(store.campaigns.get(heir)) == []


@pytest.fixture
def names(store: Store, clock: TurnableClock) -> Store:
    """Four campaigns, a minute apart."""
    physics = store.by(Actor(name="physics", role="submitter"))
    make_campaign(physics, "Sweep-1", model={"name": "gpt"})
    clock.forward(60)
    make_campaign(store, "sweep_2", cluster="frontier")
    clock.forward(60)
    make_campaign(store, "both", objective=["tokens_per_s", "memory_headroom"])
    clock.forward(60)
    store.campaigns.pause(make_campaign(store, "50%", strategy="guided"))
    return store


@pytest.mark.sqlite_is_enough(False)
def test_campaigns_are_found_by_what_they_are_and_pages_hold_to_it(names: Store) -> None:
    for asked, found in (
        ({}, ["50%", "both", "sweep_2", "Sweep-1"]),
        ({"model": "gpt"}, ["Sweep-1"]),
        ({"cluster": "frontier"}, ["sweep_2"]),
        ({"strategy": "guided"}, ["50%"]),
        ({"created_by": "physics"}, ["Sweep-1"]),
        ({"states": ("PAUSED",)}, ["50%"]),
        ({"states": ("PAUSED", "RUNNING"), "model": "gpt"}, ["Sweep-1"]),
        ({"objective": "tokens_per_s"}, ["both"]),
        ({"objective": "memory_headroom"}, ["both"]),
        ({"objective": "tokens_per_s_per_device"}, ["50%", "sweep_2", "Sweep-1"]),
        ({"name_contains": "SWEEP"}, ["sweep_2", "Sweep-1"]),
        ({"name_contains": "_"}, ["sweep_2"]),
        ({"name_contains": "%"}, ["50%"]),
        ({"name_contains": "' OR 1=1 --"}, []),
        ({"created_after": START + timedelta(seconds=60)}, ["50%", "both", "sweep_2"]),
        ({"created_before": START + timedelta(seconds=60)}, ["Sweep-1"]),
        ({"model": "nothing"}, []),
    ):
        chosen = CampaignFilter(**asked)
        assert [each.name for each in names.campaigns.find(chosen=chosen)] == found, asked
    driven = [each.name for each in names.campaigns.to_drive()]
    assert driven == ["Sweep-1", "sweep_2", "both"], "the paused one is not"
    chosen = CampaignFilter(name_contains="sweep")
    (first,) = names.campaigns.find(chosen=chosen, limit=1)
    (second,) = names.campaigns.find(chosen=chosen, limit=1, before_id=first.id)
    assert (first.name, second.name) == ("sweep_2", "Sweep-1")


@pytest.mark.sqlite_is_enough(False)
def test_campaigns_are_counted_skipped_and_their_values_listed(store: Store) -> None:
    for name in ("one", "two", "three"):
        make_campaign(store, name)
    store.campaigns.cancel(store.campaigns.by_name("two").id)
    running = CampaignFilter(states=("RUNNING",))
    assert store.reports.count_campaigns(running) == 2
    assert [each.name for each in store.campaigns.find(chosen=running, limit=5, offset=1)] == [
        "one"
    ]
    choices = store.reports.campaign_choices()
    assert choices["state"] == {"CANCELLED": 1, "RUNNING": 2}
    assert choices["cluster_name"] == {"local-cpu": 3}
    later = make_campaign(store, "later", start_from=["one"])
    one = store.campaigns.by_name("one").id
    assert store.reports.campaigns_from(one) == [(later, "later", "RUNNING")]
    assert store.reports.campaigns_from(later) == []


@pytest.mark.sqlite_is_enough(False)
def test_the_newest_events_come_first_and_pages_go_back(store: Store, campaign: int) -> None:
    store.campaigns.pause(campaign)
    store.campaigns.resume(campaign)
    store.events.number()
    newest = store.events.newest(campaign, limit=2)
    assert [event.kind for event in newest] == ["campaign.resumed", "campaign.paused"]
    (older,) = store.events.newest(campaign, before=newest[-1].seq, limit=2)
    assert older.kind == "campaign.created"


@pytest.mark.sqlite_is_enough(False)
def test_only_a_running_trial_has_a_phase(store: Store, campaign: int, running: int) -> None:
    store.trials.add(campaign, Layout(tp=2))
    ((trial, phase),) = store.reports.running_phases(campaign).items()
    assert (trial, phase.waiting_because) == (running, "")
