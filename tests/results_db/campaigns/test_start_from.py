"""What a campaign starts from, fixed when it is kept, and the history of what it tried."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from sqlalchemy import update

from benchmarks.service.postgres_server import PostgresServer
from layout_tuner.errors import CampaignInvalidError
from layout_tuner.results_db.access.owners_and_groups import Sharing
from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.allocations.leases import LEASE_S
from layout_tuner.results_db.campaigns import campaigns
from layout_tuner.results_db.campaigns.start_from import (
    MAX_KNOWN_TRIALS,
    PlannedCampaign,
    software_of,
)
from layout_tuner.results_db.errors import CampaignNotFoundError, CampaignStateError
from layout_tuner.results_db.models.tables import Campaign
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.stored_campaign import StoredCampaign
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.postgres import is_anybody_waiting
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
)
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.sqlite_is_enough

TORCH = {"python": "3.11", "torch": "2.13.0+cpu"}
BOX = {"name": "box", "device": "A100", "num_nodes": 4, "devices_per_node": 8}


@pytest.fixture
def lab(store: Store, clock: TurnableClock) -> Lab:
    return Lab(store, clock)


@dataclass
class Lab:
    """Campaigns one after another, a second apart."""

    store: Store
    clock: TurnableClock

    def worker(self, versions: Mapping[str, str] = TORCH, *, cluster: str = "box") -> str:
        self.clock.forward(1)
        return make_worker(self.store, cluster=cluster, num_nodes=4, versions=dict(versions)).id

    def campaign(self, name: str, *, box: Mapping[str, Any] = BOX, **changes: Any) -> int:
        self.clock.forward(1)
        sharing = Sharing(visibility=changes.pop("visibility", "everyone"))
        actor = Actor(name="token", owner=changes.pop("owner", "system"), role="submitter")
        own = self.store.by(actor).campaigns
        spec = make_spec(name) | {"cluster": dict(box)} | changes
        return own.create(spec, num_legal_layouts=100, sharing=sharing).id

    def trial(self, campaign: int, worker: str, layout: Layout, outcome: Any = None) -> int:
        self.clock.forward(1)
        return run_trial(self.store, campaign, layout, outcome, worker=worker)

    def end(self, campaign: int) -> None:
        self.clock.forward(1)
        self.store.campaigns.end(campaign, "COMPLETED", "budget", "")

    def ended(self, name: str, worker: str, *layouts: Layout, **changes: Any) -> int:
        campaign = self.campaign(name, **changes)
        for layout in layouts:
            self.trial(campaign, worker, layout)
        self.end(campaign)
        return campaign

    def known(self, campaign: int) -> list[Layout]:
        record = self.store.campaigns.get(campaign)
        found = self.store.plans.known_trials(record)
        assert self.store.plans.count_known_trials(record) == len(found)
        return [trial.layout for trial in found]


A, B, C, D = (Layout(micro_batch_size=size) for size in (1, 2, 3, 4))


def test_a_campaign_starts_from_what_ended_on_the_same_cluster_before_it(lab: Lab) -> None:
    worker = lab.worker()
    earlier = lab.ended("earlier", worker, A, B, model={"name": "other"})
    running = lab.campaign("running")
    lab.trial(running, worker, C)
    mine = lab.campaign("mine")
    lab.end(running)
    lab.ended("later", worker, D)
    assert lab.known(mine) == [A, B], "neither what still ran nor what came later"
    assert lab.known(earlier) == []
    (first, _) = lab.store.plans.known_trials(lab.store.campaigns.get(mine))
    assert (first.campaign.name, first.campaign.hardware) == ("earlier", ("A100", 8))
    assert first.software == ""
    assert (first.step_time_s, first.peak_memory_bytes) == (0.128, 5 << 30)


def test_other_hardware_and_other_releases_of_torch_teach_nothing(lab: Lab) -> None:
    assert lab.known(lab.campaign("before any worker")) == []
    for number, change in enumerate(({"name": "crate"}, {"device": "H100"})):
        box = {**BOX, **change}
        lab.ended(f"other{number}", lab.worker(cluster=box["name"]), A, box=box)
    lab.ended("fewer", lab.worker(), B, box={**BOX, "devices_per_node": 4})
    lab.ended("old", lab.worker({"torch": "2.12.1"}), C)
    lab.ended("same", lab.worker({"torch": "2.13.4+cu128"}), D)
    lab.worker()
    mine = lab.campaign("mine")
    assert lab.known(mine) == [D]
    # The software is that of the newest worker when the campaign was created.
    lab.worker({"torch": "3.0"})
    assert lab.known(mine) == [D], "what comes later changes nothing"
    assert lab.known(lab.campaign("next")) == []


def test_failures_teach_too_but_not_those_that_say_nothing_of_the_layout(lab: Lab) -> None:
    worker = lab.worker()
    earlier = lab.campaign("earlier")
    lab.trial(earlier, worker, A, failed("out_of_memory"))
    lab.trial(earlier, worker, B, failed("crashed"))
    lab.trial(earlier, worker, C, completed(C, oversubscribed=True))
    lost = lab.store.trials.add(earlier, D)
    for attempt in (1, 2, 3):
        lease_one(lab.store, worker)
        post_outcome(lab.store, lost.id, attempt, failed("node_lost"))
    assert lab.store.trials.get(lost.id).reason == "node_lost"
    lab.trial(earlier, worker, Layout(pp=8), failed("host_resource"))
    lab.store.trials.add(earlier, Layout(tp=8))
    lab.end(earlier)
    mine = lab.campaign("mine")
    assert lab.known(mine) == [A, B]
    states = [trial.state for trial in lab.store.plans.known_trials(lab.store.campaigns.get(mine))]
    assert states == ["INFEASIBLE", "FAILED"]


def test_named_campaigns_count_whatever_they_ran_on_and_even_while_they_run(lab: Lab) -> None:
    other_box = {**BOX, "name": "crate"}
    other = lab.worker({"torch": "2.5.1"}, cluster="crate")
    elsewhere = lab.campaign("elsewhere", box=other_box)
    lab.trial(elsewhere, other, A)
    worker = lab.worker()
    lab.ended("here", worker, B)
    mine = lab.campaign("mine", knowledge="none", start_from=["elsewhere", "here"])
    both = lab.campaign("both", start_from=["elsewhere"])
    lab.worker({"torch": "2.5.1"}, cluster="crate")
    assert lab.known(mine) == [A, B]
    assert lab.known(both) == [A, B]
    software = [
        trial.software for trial in lab.store.plans.known_trials(lab.store.campaigns.get(mine))
    ]
    assert software == ["torch 2.5", ""], "the newest worker of box runs 2.13"


def test_only_the_newest_trials_are_known(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layout_tuner.results_db.campaigns.start_from.MAX_KNOWN_TRIALS", 3)
    assert MAX_KNOWN_TRIALS == 2000
    lab.ended("earlier", lab.worker(), A, B, C, D)
    assert lab.known(lab.campaign("mine")) == [B, C, D]
    named = lab.campaign("named", start_from=["earlier"])
    assert lab.known(named) == [B, C, D], "those that are named and alike count once"
    assert lab.known(lab.campaign("nothing", knowledge="none")) == []


def test_a_plan_knows_what_the_campaign_would_start_from_if_it_were_submitted_now(lab: Lab) -> None:
    worker = lab.worker()
    lab.ended("first", worker, A, B)
    lab.ended("elsewhere", worker, C, box={**BOX, "devices_per_node": 4})
    lab.clock.forward(1)
    spec = make_spec("planned") | {"cluster": dict(BOX)}
    planned = PlannedCampaign(
        stored=StoredCampaign(document=spec),
        cluster_name="box",
        trainer="embedded",
        created_at=lab.store.now(),
        created_by="system",
    )
    known = lab.store.plans.known_trials(planned)
    submitted = lab.campaign("planned")
    assert known == lab.store.plans.known_trials(lab.store.campaigns.get(submitted))
    assert [trial.layout for trial in known] == [A, B]
    assert lab.store.plans.count_known_trials(planned) == 2


def test_a_private_campaign_calibrates_its_owner_s_alone(lab: Lab) -> None:
    worker = lab.worker()
    lab.ended("hidden", worker, A, owner="ann", visibility="private")
    lab.ended("shown", worker, B, owner="ann")
    assert lab.known(lab.campaign("own", owner="ann")) == [A, B]
    assert lab.known(lab.campaign("other", owner="bob")) == [B]
    admin = lab.store.by(Actor(name="root", role="admin"))
    spec = make_spec("admin's") | {"cluster": dict(BOX)}
    assert lab.known(admin.campaigns.create(spec, num_legal_layouts=1).id) == [B]
    with pytest.raises(CampaignInvalidError, match="there is no campaign named 'hidden'"):
        admin.campaigns.create(
            {**spec, "name": "named", "start_from": ["hidden"]}, num_legal_layouts=1
        )


def test_a_reader_is_told_of_no_hidden_source(lab: Lab) -> None:
    worker = lab.worker()
    lab.ended("hidden", worker, A, owner="ann", visibility="private")
    lab.ended("shown", worker, B, owner="ann")
    named = lab.campaign("named", owner="ann", start_from=["hidden", "shown"])
    for owner, known, names in (("ann", 2, ("hidden", "shown")), ("bob", 1, ("shown",))):
        own = lab.store.seen_by(owner)
        record = own.campaigns.by_name("named")
        assert own.plans.count_known_trials(record) == known
        assert tuple(record.stored.start_from) == names
        assert record == own.campaigns.get(named) == own.campaigns.find()[0]


def test_a_source_s_name_is_resolved_for_the_owner(lab: Lab) -> None:
    worker = lab.worker()
    others = {"knowledge": "none", "start_from": ["twice"]}
    lab.ended("twice", worker, B, owner="bob", visibility="private")
    lab.ended("twice", worker, A, owner="ann")
    assert lab.known(lab.campaign("of-cid", owner="cid", **others)) == [A]
    mine = lab.campaign("of-bob", owner="bob", **others)
    assert lab.known(mine) == [B]


def test_a_plan_is_calibrated_as_its_owner_s_campaign(lab: Lab) -> None:
    worker = lab.worker()
    lab.ended("hidden", worker, A, owner="ann", visibility="private")
    planned = PlannedCampaign(
        stored=StoredCampaign(document=make_spec("planned") | {"cluster": dict(BOX)}),
        cluster_name="box",
        trainer="embedded",
        created_at=lab.store.now(),
        created_by="ann",
    )
    assert lab.store.plans.count_known_trials(planned) == 1
    assert lab.store.plans.count_known_trials(replace(planned, created_by="bob")) == 0


def test_software_is_the_release_of_torch() -> None:
    for version in ("2.13.0", "2.13.0+cpu", "2.13.0a0+gitabc"):
        assert software_of({"torch": version}) == "torch 2.13"
    assert software_of({"torch": "2"}) == "torch 2"
    assert software_of({}) == ""


@pytest.mark.parametrize(
    ("first", "refused", "why", "left"),
    [
        ("heir", CampaignStateError, "'heir' starts from 'source'", ["heir", "source"]),
        ("deletion", CampaignInvalidError, "start_from: there is no campaign named 'sou", []),
    ],
)
def test_of_a_deletion_and_a_campaign_that_starts_from_it_the_later_waits_and_is_refused(
    postgres_server: PostgresServer,
    postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
    refused: type[Exception],
    why: str,
    left: list[str],
) -> None:
    emit, begun = campaigns.emit, []
    with (
        closing(Store(postgres_url)) as here,
        closing(Store(postgres_url)) as there,
        ThreadPoolExecutor(1) as pool,
    ):
        source = make_campaign(here, "source")
        here.campaigns.cancel(source)
        spec = make_spec("heir", start_from=["source"])
        create = partial(here.campaigns.create, spec, num_legal_layouts=1)
        delete = partial(there.campaigns.delete, source)
        one, other = (create, delete) if first == "heir" else (delete, create)

        def tell(*arguments: Any, **named: Any) -> None:
            """Begins the other call within the transaction of the first; waits until it waits."""
            if not begun:
                begun.append(pool.submit(other))
                wait_until("it waits", lambda: is_anybody_waiting(postgres_server, postgres_url))
            emit(*arguments, **named)

        monkeypatch.setattr(campaigns, "emit", tell)
        one()
        with pytest.raises(refused, match=why):
            begun[0].result(30)
        assert [campaign.name for campaign in here.campaigns.find()] == left


OUTCOMES = (
    failed("crashed"),
    completed(tokens_per_s=200.0),
    completed(tokens_per_s=900.0, shortened=True, iterations_asked=9),
    completed(tokens_per_s=150.0),
    completed(tokens_per_s=300.0),
    failed("out_of_memory"),
    completed(tokens_per_s=800.0, oversubscribed=True),
    completed(tokens_per_s=300.0),
    completed(tokens_per_s=310.0, peak_memory_bytes=7 << 30),
)
"""In the order of the ends; the best so far rises at the second and at the fifth, and without a
limit of memory at the last."""


@pytest.fixture
def campaign(store: Store) -> int:
    campaign = make_campaign(store)
    for number, outcome in enumerate(OUTCOMES, 1):
        run_trial(store, campaign, Layout(num_microbatches=number), outcome)
    return campaign


def best_so_far(store: Store, campaign: int) -> list[tuple[int, int, float]]:
    """The end from which a layout led, the number of its trial, and its value."""
    led = store.history.best_so_far(campaign).leaders
    return [(each.ended_seq, each.layout.first.number, each.value) for each in led]


def test_the_best_rises_only_with_trials_that_count(store: Store, campaign: int) -> None:
    assert best_so_far(store, campaign) == [(2, 2, 200.0), (5, 5, 300.0), (9, 9, 310.0)]


def test_a_limit_of_memory_holds_for_the_best_so_far(store: Store, campaign: int) -> None:
    with store._db.write() as session:
        session.execute(update(Campaign).values(max_peak_memory_bytes=6 << 30))
    assert best_so_far(store, campaign) == [(2, 2, 200.0), (5, 5, 300.0)]


def test_the_best_so_far_is_the_leaderboards_winner_at_the_median_of_its_runs(
    store: Store, campaign: int
) -> None:
    for tokens_per_s in (304.0, 320.0):
        run_trial(store, campaign, Layout(num_microbatches=9), completed(tokens_per_s=tokens_per_s))
    run_trial(store, campaign, Layout(num_microbatches=5), completed(tokens_per_s=312.0))
    winner = store.leaderboard.winner(campaign)
    led = best_so_far(store, campaign)
    assert led[-1] == (11, winner.number, winner.value) == (11, 9, 310.0)
    assert led[-2][:2] == (10, 9)
    assert led[-2][2] == pytest.approx(306.97, abs=0.01), "the median of two step times"
    run_trial(store, campaign, Layout(num_microbatches=9), completed(tokens_per_s=100.0))
    run_trial(store, campaign, Layout(num_microbatches=9), completed(tokens_per_s=100.0))
    winner = store.leaderboard.winner(campaign)
    assert best_so_far(store, campaign)[-1][1:] == (winner.number, winner.value)


def test_a_history_has_every_trial_in_the_order_of_the_ends(store: Store, campaign: int) -> None:
    history = store.history.best_so_far(campaign)
    assert [point.value for point in history.points] == [
        None if outcome.measurement is None else outcome.measurement.tokens_per_s
        for outcome in OUTCOMES
    ]
    assert [point.ended_seq for point in history.points] == list(range(1, 10))
    first, second, *_ = history.points
    assert (first.state, first.reason) == ("FAILED", "crashed")
    assert (second.state, second.reason) == ("COMPLETED", None)
    assert (history.num_ended, history.num_left_out) == (9, 0)


def test_the_history_of_an_empty_campaign_is_empty_and_of_an_unknown_one_refused(
    store: Store,
) -> None:
    nothing = store.history.best_so_far(make_campaign(store, "empty"))
    assert (nothing.points, nothing.num_ended) == ([], 0)
    with pytest.raises(CampaignNotFoundError):
        store.history.best_so_far(10**6)


def test_a_history_is_thinned_and_keeps_every_new_best(store: Store, campaign: int) -> None:
    whole = store.history.best_so_far(campaign).points
    for limit in (1, 2, 3, 4, 6, 8, 9):
        history = store.history.best_so_far(campaign, limit=limit)
        assert len(history.points) <= limit
        assert history.num_left_out == 9 - len(history.points)
        assert [point for point in whole if point in history.points] == list(history.points)
        risen = [point.number for point in history.points if point.number in (2, 5, 9)]
        assert len(risen) == min(limit, 3)
        assert risen[-1] == 9


@pytest.mark.sqlite_is_enough(False)
def test_failures_are_counted_by_reason_and_node_most_first(store: Store, campaign: int) -> None:
    for number, reason in ((11, "crashed"), (12, "crashed"), (13, "cancelled")):
        run_trial(store, campaign, Layout(num_microbatches=number), failed(reason))
    assert store.history.failures(campaign) == [
        ("FAILED", "crashed", "node-1", 3, 11),
        ("INFEASIBLE", "out_of_memory", "node-1", 1, 6),
    ]
    assert store.history.failures(campaign)[0].num_trials == 3
    assert store.history.failures(10**6) == []


@pytest.fixture
def tried(store: Store, clock: TurnableClock, worker: str) -> int:
    """A campaign of four attempts: one failed, one was lost, and two run."""
    campaign = make_campaign(store, "tried")
    for number in (1, 2, 3):
        store.trials.add(campaign, Layout(num_microbatches=number))
    first = lease_one(store, worker)
    clock.forward(1)
    post_outcome(store, first.trial_id, first.attempt, failed("crashed", duration_s=1.0))
    lease_one(store, worker)
    clock.forward(LEASE_S + 1)
    store.leases.expire()
    again = lease_one(store, worker)
    assert again.attempt == 2
    clock.forward(1)
    lease_one(store, worker)
    return campaign


@pytest.mark.sqlite_is_enough(False)
def test_a_timeline_has_every_attempt_the_newest_first(
    store: Store, worker: str, tried: int
) -> None:
    timeline = store.history.timeline(tried)
    found = [(each.number, each.attempt, each.ending, each.state) for each in timeline.attempts]
    assert found == [
        (3, 1, None, "RUNNING"),
        (2, 2, None, "RUNNING"),
        (2, 1, "lost", "RUNNING"),
        (1, 1, "reported", "FAILED"),
    ]
    newest, *_, oldest = timeline.attempts
    assert (newest.worker_id, newest.worker_name) == (worker, "w1")
    assert (newest.num_nodes, newest.ended_at) == (1, None)
    assert oldest.started_at == START
    assert oldest.ended_at is not None
    assert (oldest.reason, newest.reason) == ("crashed", None)
    assert (timeline.num_attempts, timeline.num_left_out) == (4, 0)


@pytest.mark.sqlite_is_enough(False)
def test_a_timeline_that_is_cut_has_the_newest_attempts(store: Store, tried: int) -> None:
    some = store.history.timeline(tried, limit=2)
    assert some.attempts == store.history.timeline(tried).attempts[:2]
    assert some.num_left_out == 2


@pytest.mark.sqlite_is_enough(False)
@pytest.mark.usefixtures("tried")
def test_the_timeline_of_a_campaign_without_attempts_is_empty(store: Store) -> None:
    other = store.history.timeline(make_campaign(store, "other"))
    assert other.attempts == []
    assert other.num_attempts == 0
