"""Objectives against the formulas for a trainer's figures, and the Pareto front by brute force."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from layout_tuner.errors import ObjectiveInvalidError
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_presets import resolve_model
from layout_tuner.search_spaces.objectives import (
    ALL_OBJECTIVES,
    OBJECTIVES,
    objective_factors,
    pareto_front,
    read_objectives,
)
from layout_tuner.search_spaces.throughput import Throughput

MODEL = resolve_model("llama-1b")
LAYOUTS = (
    Layout(num_nodes=2, tp=2, pp=2, dp=4, num_microbatches=8, recompute="full"),
    Layout(tp=4, micro_batch_size=2, num_microbatches=3, recompute="selective"),
    Layout(num_nodes=3, dp=24, micro_batch_size=4),
    Layout(tp=2, pp=4, num_microbatches=8, recompute="full", recompute_layers="4/2/1/0"),
    Layout(tp=4, pp=2, vpp=2, num_microbatches=4, recompute="mlp", recompute_layers="2"),
)
STEP_S = np.array([0.5, 2.0, 8.0, 3.0, 1.0])


COLUMNS = LayoutColumns.of_each(LAYOUTS)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_throughput_is_what_the_trainer_reports_for_the_same_step_time(name: str) -> None:
    values = objective_factors(name, COLUMNS, MODEL) / STEP_S
    for layout, step_s, value in zip(LAYOUTS, STEP_S, values, strict=True):
        tokens_per_s = layout.global_batch_size * MODEL.seq_length / step_s
        reported = Throughput(
            model=MODEL, layout=layout, tokens_per_s=tokens_per_s, peak_tflops_per_device=989.0
        )
        a_node_hour = 3600 * tokens_per_s / layout.num_nodes
        expected = a_node_hour if name == "tokens_per_node_hour" else getattr(reported, name)
        assert value == pytest.approx(expected, rel=1e-12)
        alone = objective_factors(name, LayoutColumns.of(layout), MODEL)
        assert float(alone) / step_s == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("speed", "'speed' is unknown; choose from tokens_per_s_per_device"),
        ([], r"\[\] is neither a name nor a list of 1 to 3"),
        (["tokens_per_s", 3], "3 is unknown"),
        (["tokens_per_s", ["tokens_per_s"]], "is unknown"),
        (["tokens_per_s"] * 2, "'tokens_per_s' is listed more than once"),
        (list(ALL_OBJECTIVES), "neither a name nor a list of 1 to 3"),
        (["memory_headroom", "tokens_per_s"], "'memory_headroom' cannot rank alone"),
        ("memory_headroom", "'memory_headroom' cannot rank alone"),
        (None, "None is neither"),
    ],
)
def test_objectives_that_cannot_be_weighed_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ObjectiveInvalidError, match=message):
        read_objectives(value)
    assert read_objectives("tokens_per_s") == ("tokens_per_s",)
    with pytest.raises(ObjectiveInvalidError, match="'memory_headroom' is not one of the through"):
        objective_factors("memory_headroom", COLUMNS, MODEL)


FIGURES = st.one_of(st.integers(0, 4).map(float), st.just(float("nan")))


@settings(max_examples=50)
@given(
    values=st.integers(1, 3).flatmap(
        lambda width: st.integers(0, 12).flatmap(
            lambda rows: arrays(np.float64, (rows, width), elements=FIGURES)
        )
    )
)
def test_the_front_holds_the_rows_that_no_other_beats(values: np.ndarray) -> None:
    known = np.where(np.isnan(values), -np.inf, values)
    expected = [not any((o >= row).all() and (o > row).any() for o in known) for row in known]
    assert pareto_front(values).tolist() == expected
