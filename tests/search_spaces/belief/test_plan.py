"""A plan against the estimates of single layouts, the rules of single layouts, and by hand."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import pytest

from search_spaces.belief import layout_predictions as predictions_module
from search_spaces.belief.job import JobEstimate, estimate_job, extrapolated
from search_spaces.belief.known_measurements import Knowledge, Sample
from search_spaces.belief.layout_predictions import LayoutPredictions, _capacity_for
from search_spaces.belief.peaks.memory import MemoryBelief
from search_spaces.belief.peaks.memory_evidence import usable_bytes
from search_spaces.belief.plan import _PARTS, Plan, make_plan, step_shares
from search_spaces.belief.plan_text import plan_lines
from search_spaces.belief.time import TimeCalibration
from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.errors import ModelTooLargeError, NoLegalLayoutError
from search_spaces.estimates.storage import EMBEDDED_ON_GPU, EMBEDDED_TRAINER, MEGATRON_LIKE
from search_spaces.estimates.time import FACTOR_PRIORS, step_time_s
from search_spaces.spec.layout import Layout
from search_spaces.spec.rules import violations
from search_spaces.statistics.job_duration import StepInterval, TrainingJob
from tests.kit.campaigns import spec_of

SPACE = {
    "global_batch_size": 256,
    "num_nodes": [1, 4],
    "tp": [1, 2, 4, 8],
    "pp": [1, 2, 4, 8],
    "micro_batch_size": [1, 4],
    "zero_stage": [0, 1],
    "recompute": ["none", "full"],
    "precision": "bf16",
}


def campaign(**fields: Any) -> CampaignSpec:
    cluster = {"preset": "frontier", "num_nodes": 4}
    least = {"model": "llama-7b", "cluster": cluster, "space": SPACE, "budget": {"trials": 10}}
    return spec_of(**least | fields)


def measured(spec: CampaignSpec, *, times: float = 1.5, peak_times: float = 1.1) -> Knowledge:
    """Runs of another campaign that took longer, and more memory, than the estimates say."""
    memory = MemoryBelief.prior(spec.cluster)
    legal = spec.legal_set()
    samples = (
        Sample(
            model=spec.model,
            cluster=spec.cluster,
            layout=layout,
            state="completed",
            step_time_s=times * float(step_time_s(layout, spec.model, spec.cluster)[0]),
            peak_memory_bytes=round(peak_times * memory.peak_bytes(layout, spec.model)[0].item()),
        )
        for layout in map(legal.layout, range(0, len(legal), 7))
    )
    return Knowledge(samples=tuple(samples))


def all_of(spec: CampaignSpec, **options: Any) -> Plan:
    return make_plan(spec, top=len(spec.legal_set()), **options)


@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize("objective", ["tokens_per_s_per_device", "tokens_per_s"])
def test_the_order_is_that_of_each_layouts_own_estimates(
    objective: str, is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictions_module, "_CHUNK", 37)
    spec = campaign(objective=objective)
    knowledge = measured(spec) if is_measured else Knowledge()
    plan = all_of(spec, knowledge=knowledge)

    time = TimeCalibration.fit(knowledge)
    memory = MemoryBelief.prior(spec.cluster).told_elsewhere(knowledge)
    expected = []
    legal = spec.legal_set()
    for position in range(len(legal)):
        layout = legal.layout(position)
        (log_s,), _ = time.predict(layout, spec.model, spec.cluster)
        (fits,) = memory.fits(layout, spec.model, spec.cluster.device_memory_bytes)
        tokens = layout.global_batch_size * spec.model.seq_length
        if objective == "tokens_per_s_per_device":
            tokens = tokens / layout.num_devices
        expected.append((fits * tokens / math.exp(log_s), layout.key))

    assert [each.rank for each in plan.layouts] == list(range(1, len(legal) + 1))
    values = {key: value for value, key in expected}
    ranked = [values[each.layout_key] for each in plan.layouts]
    assert len(set(values)) == len(ranked)
    assert ranked == pytest.approx(sorted(values.values(), reverse=True))


def test_the_figures_of_a_layout_follow_from_its_predicted_step() -> None:
    spec = campaign()
    best = make_plan(spec, top=1).layouts[0]
    layout, figures, model = best.layout, best.predicted, spec.model

    tokens_per_s = 256 * model.seq_length / figures.step_time_s
    assert figures.tokens_per_s == pytest.approx(tokens_per_s)
    devices = layout.tp * layout.pp * layout.dp
    assert figures.tokens_per_s_per_device == pytest.approx(tokens_per_s / devices)
    flops = tokens_per_s / devices * model.model_flops_per_token
    assert figures.model_tflops_per_device == pytest.approx(flops / 1e12)
    assert figures.mfu == pytest.approx(flops / 191.5e12)
    assert best.objective_value == figures.tokens_per_s_per_device
    (mean,), (deviation,) = TimeCalibration.fit().predict(layout, model, spec.cluster)
    assert math.log(figures.step_time_s) == pytest.approx(mean)
    assert math.log(figures.step_time_low_s) == pytest.approx(mean - 1.96 * deviation)
    assert math.log(figures.step_time_high_s) == pytest.approx(mean + 1.96 * deviation)


def test_illegal_combinations_are_counted_by_each_rule_that_they_break() -> None:
    spec = campaign()
    plan = make_plan(spec, top=1)

    counts: Counter[str] = Counter()
    names = ("num_nodes", "tp", "pp", "micro_batch_size", "zero_stage", "recompute", "precision")
    combinations = list(product(*(spec.space.values(name) for name in names)))
    legal = 0
    for combination in combinations:
        layout = spec.space.layout_of(dict(zip(names, combination, strict=True)), 8)
        broken = violations(layout, spec.model, spec.cluster, global_batch=256, fill_nodes=True)
        counts.update(sentence.split("=")[0].split("*")[0] for sentence in broken)
        legal += not broken
    assert (plan.num_combinations, plan.num_legal) == (len(combinations), legal)
    assert legal < len(combinations)
    # The first word of each rule's sentence, which names no rule.
    first_words = {"world_size": "tp", "global_batch": "global_batch_size"}
    first_words |= {"zero_needs_replicas": "zero_stage"}
    assert {first_words[each.rule]: each.count for each in plan.illegal} == counts
    assert [each.count for each in plan.illegal] == sorted(counts.values(), reverse=True)


def test_layouts_that_are_expected_to_fit_are_the_sum_of_the_probabilities() -> None:
    plan = all_of(campaign())
    fits = [each.predicted.fits for each in plan.layouts]
    assert plan.expected_fitting == pytest.approx(sum(fits))
    assert 0 < plan.expected_fitting < plan.num_legal


def test_headroom_lowers_the_probability_of_fitting_to_that_of_a_smaller_peak() -> None:
    free = {each.layout_key: each for each in all_of(campaign()).layouts}
    tight = all_of(campaign(constraints={"memory_headroom": 0.4})).layouts
    assert all(each.predicted.fits <= free[each.layout_key].predicted.fits for each in tight)
    near = min(tight, key=lambda each: abs(each.predicted.peak_memory_bytes - 0.6 * 64 * 2**30))
    assert near.predicted.fits == pytest.approx(0.5, abs=0.2)
    assert free[near.layout_key].predicted.fits > 0.95


@pytest.mark.parametrize("storage", [EMBEDDED_TRAINER, EMBEDDED_ON_GPU, MEGATRON_LIKE])
@pytest.mark.parametrize("peak_bytes", [1e8, 5e8, 1e9, 5e10])
def test_a_peak_fits_exactly_into_the_device_that_is_named_for_it(
    storage: Any, peak_bytes: float
) -> None:
    assert usable_bytes(_capacity_for(peak_bytes, storage), storage) == pytest.approx(peak_bytes)


@pytest.mark.parametrize(
    ("budget", "ended_by"),
    [
        ({"trials": 4}, "trials"),
        ({"trials": 40, "node_hours": 1.0}, "node_hours"),
        ({"node_hours": 1.0, "wall_time": "10m"}, "wall_time_s"),
        ({"trials": 10_000}, "layouts"),
    ],
)
def test_the_budget_buys_probes_of_the_best_layouts_in_order(
    budget: dict[str, Any], ended_by: str
) -> None:
    spec = campaign(budget=budget, probe={"warmup": 3, "iterations": 7, "deadline": "170s"})
    plan = all_of(spec, probe_start_s=45.0)

    num_probes, node_s, wall_s, fits = 0, 0.0, 0.0, 0.0
    for each in plan.layouts:
        probe_s = min(45.0 + 10 * each.predicted.step_time_s, 170.0)
        after = num_probes + 1, node_s + probe_s * each.layout.num_nodes, wall_s + probe_s
        if after[0] > budget.get("trials", math.inf):
            break
        if after[1] > budget.get("node_hours", math.inf) * 3600:
            break
        if "wall_time" in budget and after[2] > 600:
            break
        (num_probes, node_s, wall_s), fits = after, fits + each.predicted.fits
    bought = plan.budget
    assert (bought.num_probes, bought.ended_by) == (num_probes, ended_by)
    assert bought.node_hours == pytest.approx(node_s / 3600)
    assert bought.wall_time_s == pytest.approx(wall_s)
    assert bought.expected_fitting == pytest.approx(fits)
    assert (bought.iterations, bought.probe_start_s) == (10, 45.0)


def test_a_budget_that_pays_for_no_probe_says_so() -> None:
    bought = make_plan(campaign(budget={"node_hours": 1e-3})).budget
    assert (bought.num_probes, bought.node_hours, bought.ended_by) == (0, 0.0, "node_hours")


def test_the_knowledge_is_named_and_moves_the_predictions() -> None:
    spec = campaign()
    knowledge = measured(spec, times=1.5)
    alone, informed = make_plan(spec, top=1), all_of(spec, knowledge=knowledge)

    assert alone.knowledge.basis == "data sheets"
    assert alone.knowledge.constants == spec.cluster.source
    used = informed.knowledge
    assert used.basis == "measurements"
    assert used.num_measurements == used.num_step_times == used.num_peaks == len(knowledge)
    assert (used.models, used.clusters) == (("llama-7b",), ("frontier",))
    first = alone.layouts[0]
    same = next(each for each in informed.layouts if each.layout_key == first.layout_key)
    ratio = same.predicted.step_time_s / first.predicted.step_time_s
    assert ratio == pytest.approx(1.5, rel=0.05)
    width = same.predicted.step_time_high_s / same.predicted.step_time_low_s
    assert width < first.predicted.step_time_high_s / first.predicted.step_time_low_s


def test_failed_runs_count_as_measurements_but_not_as_step_times() -> None:
    spec = campaign()
    layout = spec.legal_set().layout(0)
    failed = Sample(model=spec.model, cluster=spec.cluster, layout=layout, state="infeasible")
    used = make_plan(spec, knowledge=Knowledge(samples=(failed,))).knowledge
    assert (used.num_measurements, used.num_step_times, used.num_peaks) == (1, 0, 0)


def test_measured_constants_are_called_a_calibration() -> None:
    spec = campaign()
    source = "measured by layout-tuner calibrate on node1, 2026-01-01 00:00 UTC"
    calibrated = replace(spec, cluster=replace(spec.cluster, source=source))
    assert make_plan(calibrated, top=1).knowledge.basis == "calibration"


def test_layouts_beyond_the_measured_ones_are_warned_about() -> None:
    spec = campaign()
    other = campaign(space=SPACE | {"tp": 1, "pp": 1, "micro_batch_size": 1})
    warnings = make_plan(spec, knowledge=measured(other)).warnings
    assert any("tp 2, measured 1" in warning for warning in warnings), warnings


def shares_of(spec: CampaignSpec, layout: Layout) -> dict[str, float]:
    return {each.part: each.share for each in step_shares(layout, LayoutPredictions(spec=spec))}


def test_the_bubble_is_the_idle_part_of_the_slots() -> None:
    spec = campaign()
    layout = Layout(num_nodes=1, pp=8, num_microbatches=8, recompute="full", precision="bf16")
    shares = shares_of(spec, layout)
    assert sum(shares.values()) == pytest.approx(1.0)
    # 8 micro-batches on 8 stages: 7 of 15 slots are idle, besides unequal stages.
    assert shares["pipeline bubble"] == pytest.approx(7 / 15, abs=0.08)
    interleaved = shares_of(spec, replace(layout, vpp=4))
    assert interleaved["pipeline bubble"] < shares["pipeline bubble"]


@pytest.mark.parametrize(
    ("knobs", "slower", "part"),
    [
        ({"pp": 8, "num_microbatches": 1}, {}, "pipeline bubble"),
        (
            {"tp": 8, "num_microbatches": 8},
            {"intra_node_bandwidth_bytes_per_s": {2: 1e9}},
            "tensor parallel",
        ),
        (
            {"num_nodes": 4, "dp": 32, "num_microbatches": 1},
            {"inter_node_bandwidth_bytes_per_s": 1e8},
            "data parallel",
        ),
        (
            {"num_nodes": 4, "pp": 4, "dp": 8, "num_microbatches": 64},
            {"inter_node_bandwidth_bytes_per_s": 1e8},
            "pipeline transfers",
        ),
        ({"dp": 8, "num_microbatches": 4}, {"host_operation_s": 0.1}, "host"),
        ({"dp": 8, "num_microbatches": 32, "micro_batch_size": 4}, {}, "compute"),
    ],
)
def test_the_largest_share_is_what_was_made_slow(
    knobs: dict[str, Any], slower: dict[str, Any], part: str
) -> None:
    spec = campaign()
    spec = replace(spec, cluster=replace(spec.cluster, **slower))
    layout = Layout(**{"num_nodes": 1, "precision": "bf16", **knobs})
    assert step_shares(layout, LayoutPredictions(spec=spec))[0].part == part


def test_the_exchange_of_tokens_with_experts_is_a_part_of_its_own() -> None:
    spec = campaign(model="qwen3-30b-a3b")
    slow = replace(spec.cluster, inter_node_bandwidth_bytes_per_s=1e8)
    layout = Layout(num_nodes=4, dp=32, ep=32, num_microbatches=64, precision="bf16")
    shares = step_shares(layout, LayoutPredictions(spec=replace(spec, cluster=slow)))
    assert shares[0].part == "expert parallel"
    whole = step_shares(replace(layout, ep=1), LayoutPredictions(spec=spec))
    assert "expert parallel" not in {share.part for share in whole}


def test_only_terms_of_the_device_may_be_compute() -> None:
    unnamed = [name for name, prior in FACTOR_PRIORS.items() if name not in _PARTS]
    assert {FACTOR_PRIORS[name].kind for name in unnamed} == {"device"}
    assert set(_PARTS) <= set(FACTOR_PRIORS)


def test_a_job_is_predicted_on_its_own_nodes() -> None:
    spec = campaign(space=SPACE | {"num_nodes": 4})
    job = TrainingJob(tokens=10**12, num_nodes=8)
    best = make_plan(spec, top=1, job=job).layouts[0]

    layout = best.layout
    larger = replace(
        layout, num_nodes=8, dp=2 * layout.dp, num_microbatches=layout.num_microbatches // 2
    )
    assert best.job is not None
    assert best.job.layout_key == larger.key
    assert best.job.step_source == "predicted"
    expected = job.duration(
        LayoutPredictions(spec=spec).step(larger),
        tokens_per_step=256 * spec.model.seq_length,
        num_nodes=8,
    )
    assert best.job.duration == expected
    assert expected.num_steps == -(-(10**12) // (256 * spec.model.seq_length))


def test_a_layout_that_does_not_divide_over_the_jobs_nodes_says_why() -> None:
    spec = campaign(space=SPACE | {"num_nodes": 4})
    best = make_plan(spec, top=1, job=TrainingJob(tokens=10**12, num_nodes=2)).layouts[0]
    assert best.job is not None
    assert best.job.duration is None
    assert "num_nodes=2 is fewer than the 4 of the layout" in best.job.problem


def test_a_measured_job_keeps_the_measured_time_on_its_own_nodes() -> None:
    spec = campaign()
    layout = Layout(num_nodes=2, dp=16, num_microbatches=16, precision="bf16")
    step = StepInterval(expected_s=10.0, low_s=9.0, high_s=11.0)
    job = TrainingJob(tokens=10**11)

    def measured_job(job: TrainingJob) -> JobEstimate:
        step_of = extrapolated(step, layout, spec.model, spec.cluster)
        return estimate_job(job, layout, spec.model, spec.cluster, step_of, is_measured=True)

    here = measured_job(job)
    assert here.step_source == "measured"
    tokens = 256 * spec.model.seq_length
    assert here.duration == job.duration(step, tokens_per_step=tokens, num_nodes=2)

    larger = replace(layout, num_nodes=4, dp=32, num_microbatches=8)
    there = measured_job(replace(job, num_nodes=4))
    assert there.step_source == "measured and extrapolated"
    assert there.layout_key == larger.key
    assert here.duration is not None
    assert there.duration is not None
    was, becomes = (step_time_s(each, spec.model, spec.cluster)[0] for each in (layout, larger))
    ratio = (1 - here.duration.lost_share) / (1 - there.duration.lost_share) * becomes / was
    assert there.duration.days / here.duration.days == pytest.approx(float(ratio))


def test_a_plan_is_plain_json() -> None:
    plan = make_plan(campaign(), job=TrainingJob(tokens=10**12))
    document = json.loads(json.dumps(asdict(plan), allow_nan=False))
    assert document["layouts"][0]["rank"] == 1
    assert len(document["layouts"]) == 10


def test_spaces_without_a_usable_layout_are_refused_like_a_submission() -> None:
    with pytest.raises(NoLegalLayoutError, match="none of the 2 combinations is legal"):
        make_plan(campaign(space={"global_batch_size": 7, "num_nodes": [2, 4]}))
    with pytest.raises(ModelTooLargeError, match="too large for every one"):
        make_plan(campaign(model="gpt-1t", space={"global_batch_size": 64, "num_nodes": 4}))


def test_node_hours_pay_for_cheap_probes_beside_a_full_one_of_the_best() -> None:
    spec = campaign(
        budget={"node_hours": 4},
        space=SPACE | {"global_batch_size": 2048, "num_nodes": 4},
        probe={"deadline": "10h"},
    )
    plan = make_plan(spec, probe_start_s=30.0)
    best = plan.layouts[0].layout
    full_node_s = best.num_nodes * (30.0 + 12 * plan.layouts[0].predicted.step_time_s)
    assert plan.budget.cheap_probes is not None
    left_node_s = 4 * 3600.0 - full_node_s
    each_node_s = left_node_s / plan.budget.cheap_probes
    assert 30.0 < each_node_s < 0.3 * full_node_s
    dearer = make_plan(replace(spec, budget=replace(spec.budget, node_hours=8.0)), probe_start_s=30)
    assert dearer.budget.cheap_probes == pytest.approx(
        (8 * 3600.0 - full_node_s) / each_node_s, abs=1.5
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"budget": {"trials": 10}},
        {"budget": {"node_hours": 4}, "probe": {"fidelity": "full"}},
        {"budget": {"node_hours": 4}, "strategy": "random"},
        {"budget": {"node_hours": 4}, "objective": ["tokens_per_s", "memory_headroom"]},
    ],
)
def test_a_campaign_without_cheap_probes_has_none_in_its_plan(changes: dict[str, Any]) -> None:
    assert make_plan(campaign(**changes)).budget.cheap_probes is None


def test_no_probe_is_taken_to_cost_more_than_its_deadline() -> None:
    best = make_plan(campaign()).layouts[0]
    node_hours = best.layout.num_nodes * 30.0 / 3600.0
    spec = campaign(probe={"deadline": "20s"}, budget={"node_hours": node_hours})
    bought = make_plan(spec).budget
    assert bought.num_probes == 1
    assert bought.cheap_probes is not None
    assert bought.cheap_probes >= 0, "it pays for the one full probe"


def test_a_deadline_that_a_full_probe_does_not_meet_is_warned_of() -> None:
    spec = campaign(probe={"deadline": "20s"})
    (warning,) = make_plan(spec).warnings
    seconds = 60.0 + 12 * make_plan(spec).layouts[0].predicted.step_time_s
    assert warning.startswith(
        f"a probe of the best layout is expected to take {seconds:,.0f} s, longer than the "
        "campaign's probe.deadline of 20 s"
    )
    assert make_plan(campaign(probe={"deadline": "20h"})).warnings == ()


def test_a_plan_states_chances_to_be_the_best_and_how_many_to_probe() -> None:
    plan = make_plan(campaign(), top=1000)
    chances = [each.best_chance for each in plan.layouts if each.best_chance is not None]
    assert sum(chances) == pytest.approx(1.0)
    assert plan.probes_needed is not None
    assert 1 <= plan.probes_needed <= len(chances)
    assert plan.fits_depend_on is None


def test_a_plan_for_an_unknown_trainer_names_what_decides_whether_layouts_fit() -> None:
    plan = make_plan(campaign(), software="a new trainer", top=100)
    assert plan.fits_depend_on is not None
    text = " ".join(plan_lines(plan, None))
    assert f"depends most on {plan.fits_depend_on.name}" in " ".join(text.split())
    assert "with the largest P(best)" in text
