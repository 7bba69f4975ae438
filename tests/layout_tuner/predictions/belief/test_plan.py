"""A plan against the estimates of single layouts, the rules of single layouts, and by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.errors import ModelTooLargeError, NoLegalLayoutError
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.job import estimate_job, extrapolated
from layout_tuner.predictions.belief.known_measurements import Knowledge, Sample
from layout_tuner.predictions.belief.layout_predictions import LayoutPredictions, _capacity_for
from layout_tuner.predictions.belief.peaks.corrected_peak import MemoryBelief
from layout_tuner.predictions.belief.peaks.memory_evidence import usable_bytes
from layout_tuner.predictions.belief.plan import Plan, make_plan
from layout_tuner.predictions.belief.plan_parts.step_parts import PARTS, step_shares
from layout_tuner.predictions.belief.plan_text import plan_lines
from layout_tuner.predictions.estimates.step_time import FACTOR_PRIORS, step_time_s
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.predictions.estimates.trainer_storage import (
    EMBEDDED_ON_GPU,
    EMBEDDED_TRAINER,
    MEGATRON_LIKE,
)
from layout_tuner.predictions.statistics.job_duration import StepInterval, TrainingJob
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.legality_rules import violations
from layout_tuner.search_spaces.spaces import layout_tiles
from tests.kit.campaigns import spec_of

SPACE = {
    "global_batch_size": 256,
    "num_nodes": [1, 4],
    "tp": [1, 2, 4, 8],
    "pp": [1, 2, 4],
    "micro_batch_size": [1, 4],
    "zero_stage": 1,
    "recompute": ["none", "full"],
    "precision": "bf16",
}


def campaign(**fields: Any) -> CampaignSpec:
    least = {"model": "llama-7b", "cluster": {"preset": "frontier", "num_nodes": 4}}
    return spec_of(**{**least, "space": SPACE, "budget": {"trials": 10}} | fields)


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


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Of all layouts of the space."""
    return all_of(campaign())


@pytest.mark.parametrize(
    ("objective", "is_measured"), [("tokens_per_s_per_device", True), ("tokens_per_s", False)]
)
def test_the_order_is_that_of_each_layouts_own_estimates(
    objective: str, is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_tiles, "_TOGETHER", 13)
    spec = campaign(objective=objective)
    knowledge = measured(spec) if is_measured else Knowledge()
    plan = all_of(spec, knowledge=knowledge)

    time = TimeCalibration.fit(knowledge)
    memory = MemoryBelief.prior(spec.cluster).updated(knowledge, elsewhere=True)
    values = {}
    for layout in map(spec.legal_set().layout, range(plan.num_legal)):
        (log_s,), _ = time.predict(layout, spec.model, spec.cluster)
        (fits,) = memory.fits(layout, spec.model, spec.cluster.device_memory_bytes)
        tokens = layout.global_batch_size * spec.model.seq_length
        if objective == "tokens_per_s_per_device":
            tokens = tokens / layout.num_devices
        values[layout.key] = fits * tokens / math.exp(log_s)

    assert [each.rank for each in plan.layouts] == list(range(1, len(values) + 1))
    assert len(values) > 3 * 13
    ranked = [values[each.layout_key] for each in plan.layouts]
    assert len(set(values)) == len(ranked)
    assert ranked == pytest.approx(sorted(values.values(), reverse=True))


MIXED = {
    "global_batch_size": {"min": 1, "max": 1 << 20},
    "num_nodes": [4, 8],
    "tp": 1,
    "pp": [1, 2, 4],
    "vpp": [1, 3],
    "schedule": ["1f1b", "gpipe", "zero_bubble"],
    "micro_batch_size": 1,
    "num_microbatches": [20, 1, 8, 2, 4],
    "zero_stage": [0, 1, 3],
    "recompute": ["none", "full"],
    "rank_order": ["tp_cp_dp_pp", "tp_cp_pp_dp"],
    "pipeline_split": ["layers", "embedding_and_head"],
    "precision": "bf16",
}


@pytest.mark.parametrize("software", ["", "torchtitan-0.3", "a trainer of one's own"])
def test_a_layout_is_predicted_among_others_as_it_is_alone(software: str) -> None:
    spec = campaign(model="gpt-22b", cluster="frontier", space=MIXED)
    legal = spec.legal_set()
    layouts = [legal.layout(position) for position in range(len(legal))]
    factors = zip((1.2, 1.5, 1.3) * 20, layouts[:: len(layouts) // 20], strict=False)
    samples = [
        Sample(
            model=spec.model,
            cluster=spec.cluster,
            layout=layout,
            state="completed",
            step_time_s=factor * float(step_time_s(layout, spec.model, spec.cluster)[0]),
        )
        for factor, layout in factors
    ]
    knowledge = Knowledge(samples=tuple(samples))
    predictions = LayoutPredictions(spec=spec, software=software, knowledge=knowledge)
    ranked = predictions.rank(legal)

    few = slice(None, None, 37)
    for position, *figures in zip(
        ranked.order[few], ranked.step_time_s[few], ranked.fits[few], ranked.score[few], strict=True
    ):
        layout = layouts[position]
        (fits,) = predictions.fits(LayoutColumns.of_each([layout]))
        alone = [predictions.step(layout).expected_s, fits, predictions.score(layout)]
        assert figures == pytest.approx(alone, rel=1e-9), layout.key


def test_equal_layouts_are_ranked_in_the_order_of_the_space() -> None:
    # Where all groups span nodes, the order of ranks changes little.
    space = MIXED | {"pp": 2, "vpp": 1, "schedule": "1f1b"}
    spec = campaign(model="gpt-22b", cluster="frontier", space=space)
    ranked = LayoutPredictions(spec=spec).rank(spec.legal_set())
    by_score = sorted(zip(-ranked.score, ranked.order, strict=True))
    assert ranked.order.tolist() == [position for _, position in by_score]
    assert len(set(ranked.score.tolist())) <= len(ranked.score) / 2


def test_a_plan_does_not_load_what_it_does_not_need(tmp_path: Path) -> None:
    (tmp_path / "campaign.json").write_text(json.dumps(campaign().to_mapping()))
    program = """
import json, sys
from layout_tuner.predictions.belief.plan import make_plan
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
make_plan(CampaignSpec.from_mapping(json.load(open(sys.argv[1]))))
print(*sorted(sys.modules))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "campaign.json")]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert "numpy.random" in loaded
    assert not {"numpy.ma", "torch", "sqlalchemy"} & set(loaded)


def test_the_figures_of_a_layout_follow_from_its_predicted_step(plan: Plan) -> None:
    spec, best = campaign(), plan.layouts[0]
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


def test_the_layouts_of_a_plan_have_chances_to_fit_and_to_be_the_best(plan: Plan) -> None:
    fits = [each.predicted.fits for each in plan.layouts]
    assert plan.expected_fitting == pytest.approx(sum(fits))
    assert 0 < plan.expected_fitting < plan.num_legal
    chances = [each.best_chance for each in plan.layouts if each.best_chance is not None]
    assert sum(chances) == pytest.approx(1.0)
    assert 1 <= plan.probes_needed <= len(chances)
    assert plan.fits_depend_on is None
    document = json.loads(json.dumps(asdict(plan), allow_nan=False))
    assert document["layouts"][0]["rank"] == 1
    assert len(make_plan(campaign()).layouts) == 10


def test_illegal_combinations_are_counted_by_each_rule_that_they_break() -> None:
    spec = campaign(space=SPACE | {"zero_stage": [0, 1], "pp": [1, 8], "micro_batch_size": 1})
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


def test_headroom_lowers_the_probability_of_fitting_to_that_of_a_smaller_peak(plan: Plan) -> None:
    free = {each.layout_key: each for each in plan.layouts}
    tight = all_of(campaign(constraints={"memory_headroom": 0.4})).layouts
    assert all(each.predicted.fits <= free[each.layout_key].predicted.fits for each in tight)
    near = min(tight, key=lambda each: abs(each.predicted.peak_memory_bytes - 0.6 * 64 * 2**30))
    assert near.predicted.fits == pytest.approx(0.5, abs=0.2)
    assert free[near.layout_key].predicted.fits > 0.95


def test_a_peak_fits_exactly_into_the_device_that_is_named_for_it() -> None:
    for storage in (EMBEDDED_TRAINER, EMBEDDED_ON_GPU, MEGATRON_LIKE):
        for peak_bytes in (1e8, 5e8, 1e9, 5e10):
            capacity = _capacity_for(peak_bytes, storage)
            assert usable_bytes(capacity, storage) == pytest.approx(peak_bytes)


@pytest.mark.parametrize(
    ("budget", "ended_by"),
    [
        ({"trials": 4}, "trials"),
        ({"trials": 40, "node_hours": 1.0}, "node_hours"),
        ({"node_hours": 1.0, "wall_time": "10m"}, "wall_time_s"),
        ({"trials": 10_000}, "layouts"),
        ({"node_hours": 1e-3}, "node_hours"),
    ],
    ids=str,
)
def test_the_budget_buys_probes_of_the_best_layouts_in_order(
    budget: dict[str, Any], ended_by: str, plan: Plan
) -> None:
    spec = campaign(budget=budget, probe={"warmup": 3, "iterations": 7, "deadline": "170s"})
    bought = make_plan(spec, probe_start_s=45.0).budget

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
    assert (bought.num_probes, bought.ended_by) == (num_probes, ended_by)
    assert bought.node_hours == pytest.approx(node_s / 3600)
    assert bought.wall_time_s == pytest.approx(wall_s)
    assert bought.expected_fitting == pytest.approx(fits)
    assert (bought.iterations, bought.probe_start_s) == (10, 45.0)


def test_the_knowledge_is_named_and_moves_the_predictions(plan: Plan) -> None:
    spec = campaign()
    knowledge = measured(spec, times=1.5)
    informed = all_of(spec, knowledge=knowledge)
    assert plan.knowledge.basis == "data sheets"
    assert plan.knowledge.constants == spec.cluster.source
    used = informed.knowledge
    assert used.basis == "measurements"
    assert used.num_measurements == used.num_step_times == used.num_peaks == len(knowledge)
    assert (used.models, used.clusters) == (("llama-7b",), ("frontier",))
    first = plan.layouts[0]
    same = next(each for each in informed.layouts if each.layout_key == first.layout_key)
    ratio = same.predicted.step_time_s / first.predicted.step_time_s
    assert ratio == pytest.approx(1.5, rel=0.05)
    width = same.predicted.step_time_high_s / same.predicted.step_time_low_s
    assert width < first.predicted.step_time_high_s / first.predicted.step_time_low_s


def test_of_what_is_known_failures_constants_and_what_lies_beyond_are_told_apart() -> None:
    spec = campaign()
    layout = spec.legal_set().layout(0)
    failed = Sample(model=spec.model, cluster=spec.cluster, layout=layout, state="infeasible")
    used = make_plan(spec, knowledge=Knowledge(samples=(failed,))).knowledge
    assert (used.num_measurements, used.num_step_times, used.num_peaks) == (1, 0, 0)
    source = "measured by layout-tuner calibrate on node1, 2026-01-01 00:00 UTC"
    calibrated = replace(spec, cluster=replace(spec.cluster, source=source))
    assert make_plan(calibrated, top=1).knowledge.basis == "calibration"
    other = campaign(space=SPACE | {"tp": 1, "pp": 1, "micro_batch_size": 1})
    warnings = make_plan(spec, knowledge=measured(other)).warnings
    assert any("micro_batch_size 4, measured 1" in warning for warning in warnings), warnings


def test_the_bubble_is_the_idle_part_of_the_slots() -> None:
    predictions = LayoutPredictions(spec=campaign())
    layout = Layout(num_nodes=1, pp=8, num_microbatches=8, recompute="full", precision="bf16")
    plain, interleaved = (
        {each.part: each.share for each in step_shares(layout, predictions)}
        for layout in (layout, replace(layout, vpp=4))
    )
    assert sum(plain.values()) == pytest.approx(1.0)
    # 8 micro-batches on 8 stages: 7 of 15 slots are idle, besides unequal stages.
    assert plain["pipeline bubble"] == pytest.approx(7 / 15, abs=0.08)
    assert interleaved["pipeline bubble"] < plain["pipeline bubble"]


SLOW = {"inter_node_bandwidth_bytes_per_s": 1e8}


@pytest.mark.parametrize(
    ("knobs", "slower", "part"),
    [
        ({"pp": 8, "num_microbatches": 1}, {}, "pipeline bubble"),
        (
            {"tp": 8, "num_microbatches": 8},
            {"intra_node_bandwidth_bytes_per_s": {2: 1e9}},
            "tensor parallel",
        ),
        ({"num_nodes": 4, "dp": 32, "num_microbatches": 1}, SLOW, "data parallel"),
        ({"num_nodes": 4, "pp": 4, "dp": 8, "num_microbatches": 64}, SLOW, "pipeline transfers"),
        ({"num_nodes": 4, "dp": 32, "ep": 32, "num_microbatches": 64}, SLOW, "expert parallel"),
        ({"dp": 8, "num_microbatches": 4}, {"host_operation_s": 0.1}, "host"),
        ({"dp": 8, "num_microbatches": 32, "micro_batch_size": 4}, {}, "compute"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_largest_share_is_what_was_made_slow(
    knobs: dict[str, Any], slower: dict[str, Any], part: str
) -> None:
    spec = campaign(model="qwen3-30b-a3b" if "ep" in knobs else "llama-7b")
    spec = replace(spec, cluster=replace(spec.cluster, **slower))
    layout = Layout(**{"num_nodes": 1, "precision": "bf16", **knobs})
    shares = step_shares(layout, LayoutPredictions(spec=spec))
    assert shares[0].part == part
    assert ("expert parallel" in {each.part for each in shares}) == ("ep" in knobs)


def test_only_terms_of_the_device_may_be_compute() -> None:
    unnamed = [name for name, prior in FACTOR_PRIORS.items() if name not in PARTS]
    assert {FACTOR_PRIORS[name].kind for name in unnamed} == {"device"}
    # Offloaded activations are a part of the term `each_microbatch`.
    assert set(PARTS) - set(FACTOR_PRIORS) == {"offload"}


def test_a_job_is_predicted_on_its_own_nodes_or_why_it_does_not_divide_over_them() -> None:
    spec = campaign(space=SPACE | {"num_nodes": 4})
    job = TrainingJob(tokens=10**12, num_nodes=8)
    best = make_plan(spec, top=1, job=job).layouts[0]

    layout = best.layout
    larger = replace(
        layout, num_nodes=8, dp=2 * layout.dp, num_microbatches=layout.num_microbatches // 2
    )
    assert (best.job.layout_key, best.job.step_source) == (larger.key, "predicted")
    tokens = 256 * spec.model.seq_length
    step = LayoutPredictions(spec=spec).step(larger)
    assert best.job.duration == job.duration(step, tokens_per_step=tokens, num_nodes=8)
    assert best.job.duration.num_steps == -(-(10**12) // tokens)

    none = make_plan(spec, top=1, job=replace(job, num_nodes=2)).layouts[0].job
    assert none.duration is None
    assert "num_nodes=2 is fewer than the 4 of the layout" in none.problem


def test_a_measured_job_keeps_the_measured_time_on_its_own_nodes() -> None:
    spec = campaign()
    layout = Layout(num_nodes=2, dp=16, num_microbatches=16, precision="bf16")
    step = StepInterval(expected_s=10.0, low_s=9.0, high_s=11.0)
    job = TrainingJob(tokens=10**11)
    kernels = kernels_of(spec.software, spec.cluster)
    step_of = extrapolated(step, layout, spec.model, spec.cluster, kernels)
    here, there = (
        estimate_job(each, layout, spec.model, spec.cluster, step_of, is_measured=True)
        for each in (job, replace(job, num_nodes=4))
    )
    assert here.step_source == "measured"
    tokens = 256 * spec.model.seq_length
    assert here.duration == job.duration(step, tokens_per_step=tokens, num_nodes=2)
    larger = replace(layout, num_nodes=4, dp=32, num_microbatches=8)
    assert (there.step_source, there.layout_key) == ("measured and extrapolated", larger.key)
    was, becomes = (
        step_time_s(each, spec.model, spec.cluster, kernels=kernels)[0] for each in (layout, larger)
    )
    ratio = (1 - here.duration.lost_share) / (1 - there.duration.lost_share) * becomes / was
    assert there.duration.days / here.duration.days == pytest.approx(float(ratio))


def test_spaces_without_a_usable_layout_are_refused_like_a_submission() -> None:
    with pytest.raises(NoLegalLayoutError, match="none of the 2 combinations is legal"):
        make_plan(campaign(space={"global_batch_size": 7, "num_nodes": [2, 4]}))
    with pytest.raises(ModelTooLargeError, match="too large for every one"):
        make_plan(campaign(model="gpt-1t", space={"global_batch_size": 64, "num_nodes": 4}))


def test_node_hours_pay_for_cheap_probes_beside_a_full_one_of_the_best() -> None:
    space = SPACE | {"global_batch_size": 2048, "num_nodes": 4}
    spec = campaign(budget={"node_hours": 4}, space=space, probe={"deadline": "10h"})
    plan = make_plan(spec, probe_start_s=30.0)
    best = plan.layouts[0]
    full_node_s = best.layout.num_nodes * (30.0 + 12 * best.predicted.step_time_s)
    each_node_s = (4 * 3600.0 - full_node_s) / plan.budget.cheap_probes
    assert 30.0 < each_node_s < 0.3 * full_node_s
    dearer = make_plan(replace(spec, budget=replace(spec.budget, node_hours=8.0)), probe_start_s=30)
    expected = (8 * 3600.0 - full_node_s) / each_node_s
    assert dearer.budget.cheap_probes == pytest.approx(expected, abs=1.5)


def test_a_campaign_without_cheap_probes_has_none_in_its_plan() -> None:
    node_hours = {"budget": {"node_hours": 4}, "space": SPACE | {"num_nodes": 4, "tp": 8}}
    for changes in (
        {"budget": {"trials": 10}},
        {"probe": {"fidelity": "full"}},
        {"strategy": "random"},
        {"objective": ["tokens_per_s", "memory_headroom"]},
    ):
        assert make_plan(campaign(**node_hours | changes)).budget.cheap_probes is None, changes


def test_no_probe_is_taken_to_cost_more_than_its_deadline_which_is_warned_of(plan: Plan) -> None:
    best = plan.layouts[0]
    budget = {"node_hours": best.layout.num_nodes * 30.0 / 3600.0}
    short = make_plan(campaign(probe={"deadline": "20s"}, budget=budget))
    assert short.budget.num_probes == 1
    assert short.budget.cheap_probes >= 0, "it pays for the one full probe"
    (warning,) = short.warnings
    seconds = 60.0 + 12 * best.predicted.step_time_s
    assert warning.startswith(
        f"a probe of the best layout is expected to take {seconds:,.0f} s, longer than the "
        "campaign's probe.deadline of 20 s"
    )
    assert make_plan(campaign(probe={"deadline": "20h"})).warnings == ()


def test_a_plan_for_an_unknown_trainer_names_what_decides_whether_layouts_fit() -> None:
    space = SPACE | {"num_nodes": 4, "micro_batch_size": 4}
    plan = make_plan(campaign(space=space), software="a new trainer", top=100)
    text = " ".join(plan_lines(plan, None))
    assert f"depends most on {plan.fits_depend_on.name}" in " ".join(text.split())
    assert "with the largest P(best)" in text
