"""What a campaign starts from: whose trials, of which hardware and software, and fixed when."""

from collections.abc import Mapping
from typing import Any

import pytest

from results_db.campaigns.start_from import MAX_KNOWN_TRIALS, PlannedCampaign, software_of
from results_db.store import Store
from search_spaces.protocol.worker_messages import WorkerCreate
from search_spaces.spec.layout import Layout
from tests.kit.store import TurnableClock, completed, failed, lease_one, make_spec, post_outcome

pytestmark = pytest.mark.sqlite_is_enough

TORCH = {"python": "3.11", "torch": "2.13.0+cpu"}
BOX = {"name": "box", "device": "A100", "num_nodes": 4, "devices_per_node": 8}


@pytest.fixture
def lab(store: Store, clock: TurnableClock) -> "Lab":
    return Lab(store, clock)


class Lab:
    """Campaigns one after another, a second apart."""

    def __init__(self, store: Store, clock: TurnableClock) -> None:
        self.store = store
        self.clock = clock

    def worker(self, versions: Mapping[str, str] = TORCH, *, cluster: str = "box") -> str:
        self.clock.forward(1)
        return self.store.workers.register(
            WorkerCreate(
                name="w1",
                host="node-1",
                cluster=cluster,
                num_nodes=4,
                devices_per_node=8,
                device="A100",
                versions=dict(versions),
            )
        ).id

    def campaign(self, name: str, *, box: Mapping[str, Any] = BOX, **changes: Any) -> int:
        self.clock.forward(1)
        spec = make_spec(name) | {"cluster": dict(box)} | changes
        return self.store.campaigns.create(spec, num_legal_layouts=100).id

    def trial(self, campaign: int, worker: str, layout: Layout, outcome: Any = None) -> int:
        self.clock.forward(1)
        trial = self.store.trials.add(campaign, layout)
        lease_one(self.store, worker)
        post_outcome(self.store, trial.id, 1, outcome or completed(layout))
        return trial.id

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
    assert (first.model, first.cluster, first.software) == ({"name": "other"}, BOX, "")
    assert (first.step_time_s, first.peak_memory_bytes) == (0.128, 5 << 30)


@pytest.mark.parametrize(
    "box", [{**BOX, "name": "crate"}, {**BOX, "device": "H100"}, {**BOX, "devices_per_node": 4}]
)
def test_other_hardware_teaches_nothing(lab: Lab, box: Mapping[str, Any]) -> None:
    worker = lab.worker(cluster=box["name"])
    lab.ended("other", worker, A, box=box)
    lab.worker()
    assert lab.known(lab.campaign("mine")) == []


def test_another_release_of_torch_teaches_nothing_and_a_correction_does_not_matter(
    lab: Lab,
) -> None:
    lab.ended("old", lab.worker({"torch": "2.12.1"}), A)
    lab.ended("same", lab.worker({"torch": "2.13.4+cu128"}), B)
    lab.worker()
    assert lab.known(lab.campaign("mine")) == [B]


def test_the_software_is_that_of_the_newest_worker_when_the_campaign_was_created(lab: Lab) -> None:
    worker = lab.worker()
    lab.ended("earlier", worker, A)
    mine = lab.campaign("mine")
    lab.worker({"torch": "3.0"})
    assert lab.known(mine) == [A], "what comes later changes nothing"
    assert lab.known(lab.campaign("next")) == []


def test_without_any_worker_nothing_is_known(lab: Lab) -> None:
    assert lab.known(lab.campaign("mine")) == []


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
    lab.store.trials.add(earlier, Layout(tp=8))
    lab.end(earlier)
    mine = lab.campaign("mine")
    assert lab.known(mine) == [A, B]
    states = [trial.state for trial in lab.store.plans.known_trials(lab.store.campaigns.get(mine))]
    assert states == ["INFEASIBLE", "FAILED"]


def test_a_campaign_may_start_from_nothing(lab: Lab) -> None:
    lab.ended("earlier", lab.worker(), A)
    assert lab.known(lab.campaign("mine", knowledge="none")) == []


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


def test_a_trial_that_is_named_and_alike_counts_once(lab: Lab) -> None:
    lab.ended("earlier", lab.worker(), A)
    assert lab.known(lab.campaign("mine", start_from=["earlier"])) == [A]


def test_only_the_newest_are_known_the_oldest_of_them_first(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("results_db.campaigns.start_from.MAX_KNOWN_TRIALS", 3)
    assert MAX_KNOWN_TRIALS == 2000
    lab.ended("earlier", lab.worker(), A, B, C, D)
    assert lab.known(lab.campaign("mine")) == [B, C, D]


def test_a_plan_knows_what_the_campaign_would_start_from_if_it_were_submitted_now(lab: Lab) -> None:
    worker = lab.worker()
    lab.ended("first", worker, A, B)
    lab.ended("elsewhere", worker, C, box={**BOX, "devices_per_node": 4})
    lab.clock.forward(1)
    spec = make_spec("planned") | {"cluster": dict(BOX)}
    planned = PlannedCampaign(
        spec=spec, cluster_name="box", trainer="embedded", created_at=lab.store.now()
    )
    known = lab.store.plans.known_trials(planned)
    submitted = lab.campaign("planned")
    assert known == lab.store.plans.known_trials(lab.store.campaigns.get(submitted))
    assert [trial.layout for trial in known] == [A, B]
    assert lab.store.plans.count_known_trials(planned) == 2


@pytest.mark.parametrize(
    ("versions", "software"),
    [
        ({"torch": "2.13.0"}, "torch 2.13"),
        ({"torch": "2.13.0+cpu"}, "torch 2.13"),
        ({"torch": "2.13.0a0+gitabc"}, "torch 2.13"),
        ({"torch": "2"}, "torch 2"),
        ({}, ""),
    ],
)
def test_software_is_the_release_of_torch(versions: Mapping[str, str], software: str) -> None:
    assert software_of(versions) == software
