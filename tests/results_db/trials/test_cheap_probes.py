"""Cheap probes in the store: trials that run a part of a layout, and stand for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from layout_tuner.protocol.outcome import Outcome
from layout_tuner.results_db.admin.integrity import check_database
from layout_tuner.results_db.campaigns.start_from import knowledge_of
from layout_tuner.results_db.errors import TrialDuplicateError, TrialStateError
from layout_tuner.results_db.records import LeaseRecord, ProbeCount, TrialRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.campaigns.fidelity import Fidelity, is_cheap, with_layers
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.store import TurnableClock, completed, failed, lease_one, make_worker, post_outcome
from tests.results_db.first_weeks import DEVICES, DOCUMENT

pytestmark = pytest.mark.sqlite_is_enough

WHOLE = Layout(dp=2, num_microbatches=32)
FEWER = Fidelity(num_microbatches=8, dp=2, num_layers=4)
"""Eight of 32 micro-batches, with all of tiny's four layers."""
SMALLEST = Fidelity(num_microbatches=8, dp=1, num_layers=2)


@dataclass(slots=True)
class Bench:
    """A campaign with cheap probes, and a worker."""

    store: Store
    spec: CampaignSpec
    campaign: int
    worker: str

    @classmethod
    def of(cls, store: Store, name: str = "large") -> Bench:
        spec = CampaignSpec.from_mapping(
            {
                **DOCUMENT,
                "name": name,
                "strategy": "guided",
                "budget": {"node_hours": 1.0},
                "space": {"global_batch_size": 64, "tp": [1, 2], "precision": "fp32"},
            }
        )
        created = store.campaigns.create(spec.to_mapping(), num_legal_layouts=9)
        worker = make_worker(store, cluster="box", num_nodes=2, devices_per_node=DEVICES)
        return cls(store=store, spec=spec, campaign=created.id, worker=worker.id)

    def add(self, layout: Layout = WHOLE, fidelity: Fidelity | None = None) -> TrialRecord:
        return self.store.trials.add(self.campaign, layout, fidelity=fidelity)

    def run(self, outcome: Outcome | None = None) -> TrialRecord:
        lease = lease_one(self.store, self.worker)
        post_outcome(self.store, lease.trial_id, 1, outcome or self.completed(lease))
        return self.store.trials.get(lease.trial_id)

    def probe(
        self, layout: Layout = WHOLE, fidelity: Fidelity | None = None, **changes: Any
    ) -> TrialRecord:
        return self.run(self.completed(self.add(layout, fidelity), **changes))

    def completed(self, trial: TrialRecord | LeaseRecord, **changes: Any) -> Outcome:
        request = self.spec.probe_request(trial.layout, num_layers=trial.num_layers)
        return completed(trial.layout, model=request.model, timed=request.iterations, **changes)


@pytest.fixture
def bench(store: Store) -> Bench:
    return Bench.of(store)


def test_a_cheap_probe_is_leased_as_a_part_and_stands_for_its_layout(bench: Bench) -> None:
    added = bench.add(fidelity=SMALLEST)
    part = Layout(num_microbatches=8)
    assert added == bench.store.trials.get(added.id)
    assert (added.layout, added.full_layout, added.num_layers) == (part, WHOLE, 2)
    assert added.layout_key == f"{WHOLE.key}~mb8-dp1-l2"
    (size,) = bench.store.trials.open_sizes(bench.campaign)
    assert (size.num_nodes, size.num_devices) == (1, 1)
    lease = lease_one(bench.store, bench.worker)
    assert (lease.layout, lease.num_layers) == (part, 2)
    request = bench.spec.probe_request(lease.layout, num_layers=lease.num_layers)
    assert request.model == with_layers(bench.spec.model, 2)
    assert request.layout.global_batch_size == 8

    # A layout has one trial of each fidelity.
    bench.add(fidelity=FEWER)
    whole = bench.add()
    assert (whole.layout, whole.full_layout, whole.num_layers) == (WHOLE, None, None)
    with pytest.raises(TrialDuplicateError, match=f"{WHOLE.key} at the same fidelity already"):
        bench.add(fidelity=FEWER)
    with pytest.raises(TrialDuplicateError, match=f"{WHOLE.key} already"):
        bench.add()


def test_a_cheap_probe_is_repeated_and_queued_again_as_it_was(bench: Bench) -> None:
    bench.add(fidelity=SMALLEST)
    first = bench.run(failed("crashed"))
    again = bench.store.trials.requeue(first.id)
    with pytest.raises(TrialStateError, match="is of the same layout"):
        bench.store.trials.requeue(first.id)
    third = bench.store.trials.repeat(bench.run().id)
    for each, index in ((again, 1), (third, 2)):
        assert each.layout_key == first.layout_key
        assert (each.layout, each.full_layout) == (first.layout, first.full_layout)
        assert (each.num_layers, each.repeat_index) == (2, index)
    repeats = bench.store.trials.count_repeats(bench.campaign)
    assert {key: count.total for key, count in repeats.items()} == {first.layout_key: 2}


@pytest.fixture
def cheap(bench: Bench) -> TrialRecord:
    """A cheap probe of a layout, measured twice."""
    cheap = bench.probe(fidelity=FEWER, tokens_per_s=9000.0)
    assert cheap.state == "COMPLETED"
    bench.store.trials.repeat(cheap.id)
    bench.run(bench.completed(cheap, tokens_per_s=9500.0))
    return cheap


@pytest.fixture
def whole(bench: Bench, cheap: TrialRecord) -> TrialRecord:
    """The same layout measured whole, after the cheap probe."""
    return bench.probe(tokens_per_s=1000.0)


@pytest.mark.sqlite_is_enough(False)
@pytest.mark.usefixtures("cheap")
def test_a_cheap_probe_alone_wins_nothing(bench: Bench) -> None:
    board, objective = bench.store.leaderboard, bench.spec.objective
    assert board.ranked_layouts(bench.campaign, objective) == []
    assert board.winner(bench.campaign, objective) is None
    assert board.to_beat(bench.campaign) is None


@pytest.mark.sqlite_is_enough(False)
def test_a_cheap_probe_has_no_rank_beside_whole_layouts(
    bench: Bench, cheap: TrialRecord, whole: TrialRecord
) -> None:
    board = bench.store.leaderboard
    (first,) = board.ranked_layouts(bench.campaign, bench.spec.objective)
    assert (first.trial.id, first.value) == (whole.id, 1000.0)
    assert board.rank_of(bench.campaign, cheap.id) is None


@pytest.mark.sqlite_is_enough(False)
def test_a_cheap_probe_is_in_no_plot(bench: Bench, whole: TrialRecord) -> None:
    points = bench.store.plot_data.points(bench.campaign)
    assert ([point.trial_id for point in points.points], points.num_unranked) == ([whole.id], 0)
    history = bench.store.history.best_so_far(bench.campaign)
    assert [point.trial_id for point in history.points] == [whole.id]
    assert [(each.layout.trial_id, each.value) for each in history.leaders] == [(whole.id, 1000.0)]
    assert history.num_ended == 1


@pytest.mark.sqlite_is_enough(False)
def test_a_cheap_probe_is_not_counted_as_a_whole_one(bench: Bench, whole: TrialRecord) -> None:
    ended = bench.store.trials.ended_probes(bench.campaign, cheap=False)
    assert ended == ProbeCount(number=1, node_seconds=whole.node_seconds)


@pytest.mark.sqlite_is_enough(False)
@pytest.mark.usefixtures("whole")
def test_a_database_with_cheap_probes_is_consistent(database_url: str) -> None:
    assert check_database(database_url).findings == ()


def test_losses_are_compared_among_runs_of_as_many_layers(bench: Bench) -> None:
    other = Layout(tp=2, num_microbatches=64)
    bench.probe(fidelity=FEWER)
    bench.probe(other, Fidelity(num_microbatches=16, dp=1, num_layers=4))
    of_fewer_layers = bench.probe(
        other, Fidelity(num_microbatches=16, dp=1, num_layers=2), loss_off=0.5
    )
    assert of_fewer_layers.state == "COMPLETED", "of the same batch, but of another model"
    layout = Layout(pp=2, num_microbatches=64)
    off = bench.probe(layout, Fidelity(num_microbatches=16, dp=1, num_layers=4), loss_off=0.5)
    assert (off.state, off.reason) == ("FAILED", "diverged")
    assert "several layouts agree" in off.message


def test_two_cheap_probes_with_other_losses_are_both_measured_again(bench: Bench) -> None:
    first = bench.probe(fidelity=SMALLEST)
    other = Layout(tp=2, num_microbatches=64)
    second = bench.probe(other, Fidelity(num_microbatches=8, dp=1, num_layers=2), loss_off=0.5)
    assert second.reason == "diverged"
    assert bench.store.trials.in_doubt(bench.campaign) == [first.id, second.id]


def test_a_later_campaign_learns_of_the_part_that_ran(store: Store, clock: TurnableClock) -> None:
    bench = Bench.of(store)
    bench.probe(fidelity=FEWER)
    bench.probe(fidelity=SMALLEST)
    bench.probe()
    clock.forward(1)
    store.campaigns.end(bench.campaign, "COMPLETED", "budget", "")
    clock.forward(1)
    later = store.campaigns.get(Bench.of(store, "later").campaign)
    known = store.plans.known_trials(later)
    samples = knowledge_of(known).samples
    model = bench.spec.model
    assert [(each.model, each.layout) for each in samples] == [
        (model, FEWER.reduced(WHOLE)),
        (with_layers(model, 2), SMALLEST.reduced(WHOLE)),
        (model, WHOLE),
    ]
    for sample, trial in zip(samples, known, strict=True):
        assert (sample.cluster, sample.state) == (bench.spec.cluster, "completed")
        assert (sample.step_time_s, sample.software) == (trial.step_time_s, trial.software)
        assert sample.peak_memory_bytes == trial.peak_memory_bytes


@pytest.mark.sqlite_is_enough(False)
def test_a_cheap_probe_of_a_job_keeps_its_settings(store: Store, database_url: str) -> None:
    bench, job = Bench.of(store), replace(WHOLE, job=JobSettings({"compile": True, "bucket": 4}))
    whole, cheap = bench.add(job), bench.add(job, SMALLEST)
    bench.add(WHOLE, SMALLEST)
    assert (whole.layout, whole.full_layout, is_cheap(whole.layout_key)) == (job, None, False)
    assert (cheap.layout.job, cheap.full_layout) == (job.job, job)
    assert [is_cheap(trial.layout_key) for trial in store.trials.find(bench.campaign)] == [
        False,
        True,
        True,
    ]
    assert check_database(database_url).findings == ()
