"""Objectives against the formulas for a trainer's figures, and the Pareto front by brute force."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from search_spaces.errors import ObjectiveInvalidError
from search_spaces.spec.layout import Layout
from search_spaces.spec.layout_columns import LayoutColumns
from search_spaces.spec.objectives import (
    ALL_OBJECTIVES,
    OBJECTIVES,
    objective_factors,
    pareto_front,
    read_objectives,
)
from search_spaces.spec.presets.models import resolve_model
from search_spaces.spec.throughput import Throughput

MODEL = resolve_model("llama-1b")
LAYOUTS = (
    Layout(num_nodes=2, tp=2, pp=2, dp=4, num_microbatches=8, recompute="full"),
    Layout(tp=4, micro_batch_size=2, num_microbatches=3, recompute="selective"),
    Layout(num_nodes=3, dp=24, micro_batch_size=4),
)
STEP_S = np.array([0.5, 2.0, 8.0])


def columns(layouts: tuple[Layout, ...] = LAYOUTS) -> LayoutColumns:
    return LayoutColumns.of_each(layouts)


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "tokens_per_node_hour"])
def test_a_throughput_is_what_the_trainer_reports_for_the_same_step_time(name: str) -> None:
    values = objective_factors(name, columns(), MODEL) / STEP_S
    for layout, step_s, value in zip(LAYOUTS, STEP_S, values, strict=True):
        reported = Throughput(
            model=MODEL,
            layout=layout,
            tokens_per_s=layout.global_batch_size * MODEL.seq_length / step_s,
            peak_tflops_per_device=989.0,
        )
        assert value == pytest.approx(getattr(reported, name), rel=1e-12)


def test_a_node_hour_buys_the_tokens_of_an_hour_over_the_nodes() -> None:
    values = objective_factors("tokens_per_node_hour", columns(), MODEL) / STEP_S
    tokens = [layout.global_batch_size * MODEL.seq_length for layout in LAYOUTS]
    assert values == pytest.approx(
        [
            3600 * count / step / layout.num_nodes
            for count, step, layout in zip(tokens, STEP_S, LAYOUTS, strict=True)
        ]
    )


def test_the_factors_of_one_layout_are_those_of_columns() -> None:
    for name in OBJECTIVES:
        together = objective_factors(name, columns(), MODEL)
        alone = [objective_factors(name, LayoutColumns.of(x), MODEL) for x in LAYOUTS]
        assert together == pytest.approx([float(value) for value in alone], rel=1e-15)


def test_only_throughputs_have_a_factor() -> None:
    with pytest.raises(ObjectiveInvalidError, match="'memory_headroom' is not one of the through"):
        objective_factors("memory_headroom", columns(), MODEL)


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


def test_one_objective_is_a_list_of_one() -> None:
    assert read_objectives("tokens_per_s") == ("tokens_per_s",)
    assert read_objectives(["tokens_per_s", "memory_headroom"])[1] == "memory_headroom"


FIGURES = st.one_of(st.integers(0, 4).map(float), st.just(float("nan")))


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
