"""Two layouts compared, and the baseline beside the best of a plan."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from layout_tuner.errors import LayoutInvalidError
from layout_tuner.predictions.belief.best_chances import LayoutDraws
from layout_tuner.predictions.belief.known_measurements import Knowledge
from layout_tuner.predictions.belief.layout_predictions import LayoutPredictions
from layout_tuner.predictions.belief.plan import make_plan
from layout_tuner.predictions.belief.plan_parts.layout_comparison import compare_layouts
from layout_tuner.predictions.belief.plan_text import plan_lines
from layout_tuner.predictions.estimator import Estimator
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from tests.layout_tuner.predictions.belief.test_plan import SPACE, campaign, measured

FIRST = Layout(
    num_nodes=4, tp=8, dp=4, micro_batch_size=4, num_microbatches=16, zero_stage=1, precision="bf16"
)
SECOND = replace(FIRST, tp=2, pp=2, dp=8, num_microbatches=8)


def predictions(spec: CampaignSpec | None = None, **options: Any) -> LayoutPredictions:
    return LayoutPredictions(spec=spec or campaign(), **options)


@pytest.mark.parametrize("software", ["", "megatron-lm"])
def test_the_parts_of_step_and_memory_add_up_to_each_layouts_own_estimate(software: str) -> None:
    spec = campaign()
    found = compare_layouts(predictions(spec, software=software), FIRST, SECOND)
    estimator = Estimator(model=spec.model, cluster=spec.cluster, software=software)
    for side, layout in (("first", FIRST), ("second", SECOND)):
        estimate, figures = estimator.estimate(layout), getattr(found, side)
        assert figures.layout_key == layout.key
        assert figures.step_time_s == pytest.approx(estimate.step_time_s)
        assert figures.objective_value == pytest.approx(estimate.tokens_per_s_per_device)
        assert figures.peak_memory_bytes == pytest.approx(estimate.peak_memory_bytes)
        assert figures.fits == pytest.approx(estimate.fits)
        seconds = sum(getattr(each, side) for each in found.step)
        assert seconds == pytest.approx(estimate.step_time_s)
        fullest = max(estimate.stages, key=lambda stage: stage["peak_bytes"])
        parts = {each.part: getattr(each, side) for each in found.memory}
        assert parts["weights"] == fullest["weights_bytes"]
        assert parts["activations"] == fullest["activations_bytes"]
    assert found.ratio == pytest.approx(found.second.objective_value / found.first.objective_value)
    differences = [abs(each.second - each.first) for each in found.step]
    assert differences == sorted(differences, reverse=True)
    assert {(each.knob, each.first, each.second) for each in found.changes} == {
        ("tp", 8, 2),
        ("pp", 1, 2),
        ("dp", 4, 8),
        ("num_microbatches", 16, 8),
    }


def test_the_interval_of_the_ratio_is_that_of_joint_draws() -> None:
    here = predictions()
    found = compare_layouts(here, FIRST, SECOND)
    draws = LayoutDraws(
        model=here.spec.model,
        cluster=here.spec.cluster,
        software="",
        time=here.time,
        memory=here.memory,
    )
    log_s, _ = draws.joint(LayoutColumns.of_each([FIRST, SECOND]), 64 * 2.0**30)
    ratios = log_s[:, 0] - log_s[:, 1]  # stalls lengthen the second alone: take the median
    assert math.log(found.ratio) == pytest.approx(float(np.median(ratios)), abs=0.1)
    low, high = np.quantile(ratios, [0.16, 0.84])
    one_sd = math.log(found.ratio_high / found.ratio_low) / (2 * 1.96)
    assert one_sd == pytest.approx((high - low) / 2, rel=0.25)
    assert found.second_is_better == pytest.approx(float((ratios > 0).mean()), abs=0.1)
    assert sum(each.share for each in found.uncertain) == pytest.approx(1.0)


def test_what_was_measured_and_what_both_share_make_the_ratio_surer() -> None:
    spec = campaign()
    cold = compare_layouts(predictions(spec), FIRST, SECOND)
    known = compare_layouts(predictions(spec, knowledge=measured(spec)), FIRST, SECOND)
    alike = replace(FIRST, micro_batch_size=2, num_microbatches=32)
    near = compare_layouts(predictions(spec), FIRST, alike)
    widths = [math.log(each.ratio_high / each.ratio_low) for each in (cold, known, near)]
    assert widths[1] < widths[0]
    assert widths[2] < widths[0]
    assert cold.second.stall_risk > 0.0 == cold.first.stall_risk


def test_reversing_the_two_reverses_the_comparison() -> None:
    one, two = (
        compare_layouts(predictions(), *both) for both in ((FIRST, SECOND), (SECOND, FIRST))
    )
    assert one.ratio == pytest.approx(1 / two.ratio)
    assert one.ratio_low == pytest.approx(1 / two.ratio_high)
    assert one.second_is_better == pytest.approx(1 - two.second_is_better)


def test_a_plan_says_how_good_the_baseline_is_and_what_to_change() -> None:
    space = SPACE | {"num_nodes": 4}
    spec = campaign(space=space, baseline=FIRST.to_mapping())
    plan = make_plan(spec, top=3)
    everything = make_plan(campaign(space=space), top=1000)
    ranks = {each.layout_key: each.rank for each in everything.layouts}
    assert plan.baseline is not None
    assert plan.baseline.to_best is not None
    baseline = plan.baseline.planned
    assert (baseline.rank, baseline.layout) == (ranks[FIRST.key], FIRST)
    assert baseline.rank > 3
    assert plan.rows == (*plan.layouts, baseline)
    best = plan.layouts[0]
    assert plan.baseline.to_best.second.layout_key == best.layout_key
    assert plan.baseline.to_best.ratio == pytest.approx(
        best.objective_value / baseline.objective_value
    )
    text = " ".join(" ".join(plan_lines(plan, 100)).split())
    assert f"baseline is rank {baseline.rank} of {plan.num_legal}: rank 1 gives" in text
    for change in plan.baseline.to_best.changes:
        assert f"{change.first} -> {change.second}" in text
    assert "(baseline)" in text


@pytest.mark.parametrize(
    ("stages", "micro_batch_size", "says"),
    [
        ([1, 3], 1, "z3-rc_none-sp1-bf16, the best that torchtitan-0.2 runs, gives"),
        ([1, 3], 2, "the baseline is rank 2 of 2: no layout that torchtitan-0.2 runs is"),
        ([1], 1, "rank 1, which torchtitan-0.2 refuses, gives"),
    ],
)
def test_a_baseline_is_compared_with_what_runs(
    stages: list[int], micro_batch_size: int, says: str
) -> None:
    layout = replace(FIRST, num_nodes=1, tp=2, zero_stage=3, sequence_parallel=True)
    size = {"micro_batch_size": micro_batch_size, "num_microbatches": 8 // micro_batch_size}
    space = {
        "global_batch_size": 32,
        "num_nodes": 1,
        "tp": 2,
        "pp": 1,
        "recompute": "none",
        "micro_batch_size": 2,
        "zero_stage": stages,
        "sequence_parallel": True,
    }
    probe = {"trainer": "torchtitan-0.2"}
    spec = campaign(space=space, baseline=layout.to_mapping() | size, probe=probe)
    plan = make_plan(spec, top=1)
    assert plan.layouts[0].refused
    assert says in " ".join(" ".join(plan_lines(plan, None)).split())


def test_a_baseline_outside_of_the_space_has_the_rank_that_it_would_have() -> None:
    narrow = SPACE | {"num_nodes": 4, "tp": [1, 2, 4]}
    spec = campaign(space=narrow, baseline=FIRST.to_mapping())
    plan = make_plan(spec, top=500)
    assert plan.baseline is not None
    assert plan.baseline.is_outside
    value = FIRST.global_batch_size * spec.model.seq_length / 32
    scores = [each.objective_value * each.predicted.fits for each in plan.layouts]
    own = value / plan.baseline.planned.predicted.step_time_s
    better = sum(score > own * plan.baseline.planned.predicted.fits for score in scores)
    assert plan.baseline.planned.rank == better + 1
    text = " ".join(" ".join(plan_lines(plan, None)).split())
    assert "(it is outside of the space)" in text


def test_a_baseline_that_is_the_best_is_said_to_be() -> None:
    best = make_plan(campaign(), top=1).layouts[0].layout
    plan = make_plan(campaign(baseline=best.to_mapping()), top=2)
    assert plan.baseline is not None
    assert (plan.baseline.planned.rank, plan.baseline.to_best) == (1, None)
    assert plan.rows == plan.layouts
    text = " ".join(plan_lines(plan, None))
    assert "no layout is predicted to be better" in text


def test_a_plan_compares_two_keys_in_words_and_tables() -> None:
    plan = make_plan(campaign(), compare=(FIRST.key, SECOND.key))
    assert plan.comparison == compare_layouts(predictions(), FIRST, SECOND)
    text = "\n".join(plan_lines(plan, None))
    assert f"A is {FIRST.key}, B is {SECOND.key}" in " ".join(text.split())
    assert "from A to B: pp 1 -> 2, tp 8 -> 2" in text or "tp 8 -> 2" in text
    assert "seconds of a step" in text
    assert "GiB of the fullest device" in text
    assert "the ratio is uncertain because of" in text
    for each in plan.comparison.step:
        assert each.part in text
    assert [line for line in plan_lines(plan, 80) if len(line) > 80] == []


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("tp8", SECOND.key), "'tp8' is not the key of a layout"),
        ((FIRST.key, FIRST.key), "name two different ones"),
        (
            (FIRST.key, replace(SECOND, tp=16, dp=1, num_microbatches=64).key),
            "is not legal here: tp=16",
        ),
        ((FIRST.key, replace(SECOND, num_microbatches=4).key), "global_batch_size"),
    ],
)
def test_keys_that_cannot_be_compared_are_refused(keys: tuple[str, str], says: str) -> None:
    with pytest.raises(LayoutInvalidError, match=says):
        make_plan(campaign(), compare=keys)


def test_knowledge_of_no_campaign_is_the_prior() -> None:
    empty = compare_layouts(predictions(knowledge=Knowledge()), FIRST, SECOND)
    assert empty == compare_layouts(predictions(), FIRST, SECOND)
