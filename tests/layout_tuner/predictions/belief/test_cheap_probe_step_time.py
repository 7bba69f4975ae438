"""Extrapolated steps against the closed form, and their intervals against the stated errors."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from layout_tuner.predictions.belief.cheap_probe_step_time import (
    COMMON_LOG_SD,
    LAYERS_LOG_SD,
    MICROBATCHES_LOG_SD,
    REPLICAS_LOG_SD,
    extrapolated_step,
    extrapolation_log_sd,
    ratio_log_sd,
)
from layout_tuner.predictions.estimates.step_time import (
    PRIOR,
    TERM_NAMES,
    TimeTerms,
    step_time_s,
    time_terms,
)
from layout_tuner.predictions.estimates.trainer_kernels import ANY_TRAINER, TrainerKernels
from layout_tuner.search_spaces.campaigns.fidelity import Fidelity, fidelities
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.units import NORMAL_95

MODEL = model_preset("llama-7b")
CLUSTER = CLUSTER_PRESETS["frontier"]
LAYOUT = Layout(num_nodes=8, tp=2, pp=4, dp=8, micro_batch_size=1, num_microbatches=64)
LARGE = (
    model_preset("gpt-175b"),
    Layout(num_nodes=16, tp=8, pp=4, dp=4, num_microbatches=320, zero_stage=1, recompute="full"),
)
WHOLE = Fidelity(num_microbatches=64, dp=8, num_layers=MODEL.num_layers)


def test_a_part_that_takes_what_the_closed_form_expects_stands_for_the_expected_step() -> None:
    expected = float(step_time_s(LAYOUT, MODEL, CLUSTER)[0])
    parts = fidelities(LAYOUT, MODEL, CLUSTER)
    reduced = ("", ", 1 of 8 replicas", ", 1 of 8 replicas, 8 of 32 layers")
    assert [part.words(LAYOUT, MODEL) for part in parts] == [
        f"{num} of 64 micro-batches{others}" for num in (8, 16, 32) for others in reduced
    ]
    for part in parts:
        ran = float(step_time_s(part.reduced(LAYOUT), part.reduced_model(MODEL), CLUSTER)[0])
        step = extrapolated_step(2 * ran, part, LAYOUT, MODEL, CLUSTER, ANY_TRAINER)
        assert step.expected_s == pytest.approx(2 * expected)
        assert ran < 1.5 * expected * part.num_microbatches / 64  # its pipeline fills as often


@pytest.mark.parametrize(
    "kernels",
    [TrainerKernels(score_traffic=20.0), TrainerKernels(overlaps_from=1)],
    ids=["its attention is slow", "it hides the reduction of gradients"],
)
def test_a_step_is_extrapolated_with_the_kernels_of_the_trainer_that_ran_it(
    kernels: TrainerKernels,
) -> None:
    """The less of a part is the reduction, the more of the layout is what it measured."""
    model, layout = LARGE
    part = fidelities(layout, model, CLUSTER)[0]
    ran, whole, others_ran, others_whole = (
        float(step_time_s(each, model, CLUSTER, kernels=of)[0])
        for of in (kernels, ANY_TRAINER)
        for each in (part.reduced(layout), layout)
    )
    step = extrapolated_step(ran, part, layout, model, CLUSTER, kernels)
    assert step.expected_s == pytest.approx(whole)
    assert abs(others_whole / others_ran * ran / whole - 1) > 0.01


def terms_of(part: Fidelity, layout: Layout, model: ModelShape) -> tuple[TimeTerms, TimeTerms]:
    return (
        time_terms(part.reduced(layout), part.reduced_model(model), CLUSTER),
        time_terms(layout, model, CLUSTER),
    )


def own_log_sd(part: Fidelity, layout: Layout = LAYOUT, model: ModelShape = MODEL) -> float:
    return extrapolation_log_sd(part, layout, model, *terms_of(part, layout, model))


@pytest.mark.parametrize(
    ("reduced", "log_sd"),
    [
        ({}, 0.0),
        ({"num_microbatches": 8}, MICROBATCHES_LOG_SD),
        ({"dp": 1}, REPLICAS_LOG_SD),
        ({"num_layers": 8}, LAYERS_LOG_SD),
        (
            {"num_microbatches": 8, "dp": 1, "num_layers": 8},
            math.sqrt(MICROBATCHES_LOG_SD**2 + REPLICAS_LOG_SD**2 + LAYERS_LOG_SD**2),
        ),
    ],
)
def test_the_interval_holds_the_errors_of_the_parts_that_are_reduced(
    reduced: dict[str, int], log_sd: float
) -> None:
    part = replace(WHOLE, **reduced)
    own, ratio = own_log_sd(part), ratio_log_sd(*terms_of(part, LAYOUT, MODEL))
    assert own == pytest.approx(math.hypot(log_sd, ratio))
    step = extrapolated_step(3.0, part, LAYOUT, MODEL, CLUSTER, ANY_TRAINER)
    wide, stated = (NORMAL_95 * math.hypot(each, COMMON_LOG_SD) for each in (own, log_sd))
    assert math.log(step.high_s / step.expected_s) == pytest.approx(wide)
    assert math.log(step.expected_s / step.low_s) == pytest.approx(wide)
    assert wide == pytest.approx(stated) if part == WHOLE else stated < wide < 3 * stated


@pytest.mark.parametrize("times", [0.3, 3.0])
def test_the_interval_holds_a_step_whose_reduction_takes_other_than_expected(times: float) -> None:
    """It is a third of a part with eight micro-batches, and a hundredth of the layout."""
    model, layout = LARGE
    part = fidelities(layout, model, CLUSTER)[0]
    factors = PRIOR * np.where(np.array(TERM_NAMES) == "data_across", times, 1.0)
    ran, whole = (
        float(time_terms(each, model, CLUSTER).step_time_s(factors)[0])
        for each in (part.reduced(layout), layout)
    )
    step = extrapolated_step(ran, part, layout, model, CLUSTER, ANY_TRAINER)
    assert step.low_s < whole < step.high_s
    stated = 1.96 * math.hypot(MICROBATCHES_LOG_SD, COMMON_LOG_SD)
    assert times < 1 or math.log(step.expected_s / whole) > stated


def test_more_micro_batches_leave_less_of_the_ratio_open() -> None:
    model, layout = LARGE
    parts = [each for each in fidelities(layout, model, CLUSTER) if each.keeps_memory(model)]
    errors = [own_log_sd(each, layout, model) for each in parts]
    assert [each.num_microbatches for each in parts] == [8, 16, 32, 64, 128]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 4 * errors[-1]
