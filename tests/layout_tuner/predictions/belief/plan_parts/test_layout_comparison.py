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
from layout_tuner.predictions.belief.plan import Plan, PlannedBaseline, make_plan
from layout_tuner.predictions.belief.plan_parts.layout_comparison import (
    LayoutComparison,
    compare_layouts,
)
from layout_tuner.predictions.belief.plan_text import plan_lines
from layout_tuner.predictions.estimator import Estimator, LayoutEstimate
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


@pytest.fixture(scope="module", params=["", "megatron-lm"])
def software(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def compared(software: str) -> LayoutComparison:
    return compare_layouts(predictions(campaign(), software=software), FIRST, SECOND)


SIDES = pytest.mark.parametrize(("side", "layout"), [("first", FIRST), ("second", SECOND)])


def estimate_of(layout: Layout, software: str) -> LayoutEstimate:
    spec = campaign()
    return Estimator(model=spec.model, cluster=spec.cluster, software=software).estimate(layout)


@SIDES
def test_the_figures_of_a_comparison_are_each_layouts_estimate(
    compared: LayoutComparison, software: str, side: str, layout: Layout
) -> None:
    figures, estimate = getattr(compared, side), estimate_of(layout, software)
    assert figures.layout_key == layout.key
    names = {
        "step_time_s": "step_time_s",
        "objective_value": "tokens_per_s_per_device",
        "peak_memory_bytes": "peak_memory_bytes",
        "fits": "fits",
    }
    assert {name: getattr(figures, name) for name in names} == pytest.approx(
        {name: getattr(estimate, of) for name, of in names.items()}
    )


@SIDES
def test_the_parts_of_a_step_add_up_to_its_time(
    compared: LayoutComparison, software: str, side: str, layout: Layout
) -> None:
    seconds = sum(getattr(each, side) for each in compared.step)
    assert seconds == pytest.approx(estimate_of(layout, software).step_time_s)


@SIDES
def test_the_parts_of_memory_are_of_the_fullest_stage(
    compared: LayoutComparison, software: str, side: str, layout: Layout
) -> None:
    stages = estimate_of(layout, software).stages
    fullest = max(stages, key=lambda stage: stage["peak_bytes"])
    parts = {each.part: getattr(each, side) for each in compared.memory}
    assert parts["weights"] == fullest["weights_bytes"]
    assert parts["activations"] == fullest["activations_bytes"]


def test_a_comparison_has_the_ratio_of_the_objectives(compared: LayoutComparison) -> None:
    ratio = compared.second.objective_value / compared.first.objective_value
    assert compared.ratio == pytest.approx(ratio)


def test_parts_of_a_step_that_differ_most_come_first(compared: LayoutComparison) -> None:
    differences = [abs(each.second - each.first) for each in compared.step]
    assert differences == sorted(differences, reverse=True)


def test_a_comparison_lists_the_knobs_that_change(compared: LayoutComparison) -> None:
    assert {(each.knob, each.first, each.second) for each in compared.changes} == {
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


ON_FOUR = SPACE | {"num_nodes": 4}


@pytest.fixture(scope="module")
def plan() -> Plan:
    """The three best layouts, and a baseline that is none of them."""
    return make_plan(campaign(space=ON_FOUR, baseline=FIRST.to_mapping()), top=3)


@pytest.fixture(scope="module")
def beside(plan: Plan) -> PlannedBaseline:
    """What the plan says of its baseline."""
    assert plan.baseline is not None
    return plan.baseline


def test_a_baseline_has_its_rank_among_all_layouts(beside: PlannedBaseline) -> None:
    everything = make_plan(campaign(space=ON_FOUR), top=1000)
    ranks = {each.layout_key: each.rank for each in everything.layouts}
    assert (beside.planned.rank, beside.planned.layout) == (ranks[FIRST.key], FIRST)


def test_a_baseline_is_a_row_after_the_best(plan: Plan, beside: PlannedBaseline) -> None:
    assert beside.planned.rank > 3
    assert plan.rows == (*plan.layouts, beside.planned)


def test_a_baseline_is_compared_with_the_best(plan: Plan, beside: PlannedBaseline) -> None:
    best = plan.layouts[0]
    assert beside.to_best is not None
    assert beside.to_best.second.layout_key == best.layout_key
    ratio = best.objective_value / beside.planned.objective_value
    assert beside.to_best.ratio == pytest.approx(ratio)


def test_a_plan_says_what_to_change_of_the_baseline(plan: Plan, beside: PlannedBaseline) -> None:
    text = " ".join(" ".join(plan_lines(plan, 100)).split())
    said = f"baseline is rank {beside.planned.rank} of {plan.num_legal}: rank 1 gives"
    assert said in text
    assert "(baseline)" in text
    changes = [f"{each.first} -> {each.second}" for each in beside.to_best.changes]
    assert [change for change in changes if change not in text] == []


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
