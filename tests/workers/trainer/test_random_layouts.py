"""The same loss under every layout: random legal layouts, drawn by hypothesis.

What is legal is what the search space's own rules say, so that a knob whose range is opened there
is trained here.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from search_spaces.spec.cluster import detect_local_cpu
from search_spaces.spec.layout import (
    CP_COMM_TYPES,
    PIPELINE_SPLITS,
    RANK_ORDERS,
    RECOMPUTE_MODES,
    SCHEDULES,
    ZERO_STAGES,
    Layout,
)
from search_spaces.spec.model_shape import ModelShape
from search_spaces.spec.rules import ALL_SCOPES, violations
from search_spaces.spec.space import SearchSpace, enumerate_legal
from tests.workers.trainer.cases import assert_same_training, make_layout, make_shape, train
from workers.trainer.parallel.optimizer import OptimizerSettings

pytestmark = pytest.mark.ranks

GLOBAL_BATCH = 8
NUM_STEPS = 4

MODELS = [
    make_shape("gpt", num_layers=4, tied_embeddings=True),
    make_shape("llama", num_layers=4),
    make_shape("llama", num_layers=4, num_kv_heads=1, tied_embeddings=True),
    make_shape("gpt", num_layers=3, tied_embeddings=True),
    make_shape("llama", num_layers=6),
    make_shape("moe", num_layers=4, num_dense_layers=1),
]
CLIPPING = [None, 0.5]
"""The second is below every gradient norm of these models, so that each step is clipped."""


SPACE = SearchSpace(
    global_batch_size=GLOBAL_BATCH,
    tp=(1, 2, 4, 8),
    tp_columns=(1, 2, 4),
    cp=(1, 2, 4),
    cp_comm_type=CP_COMM_TYPES,
    pp=(1, 2, 4, 8),
    dp=(1, 2, 4, 8),
    vpp=(1, 2, 4),
    pipeline_split=PIPELINE_SPLITS,
    micro_batch_size=(1, 2, 4),
    zero_stage=ZERO_STAGES,
    zero_replicas=(1, 2, 4),
    recompute=RECOMPUTE_MODES,
    sequence_parallel=(False, True),
)
OF_EXPERTS = replace(
    SPACE,
    tp=(1, 2),
    tp_columns=1,
    ep=(1, 2, 4),
    etp=(1, 2, 4),
    vpp=(1, 2),
    pipeline_split=("layers", "head"),
)
"""For models with experts; with fewer values of other knobs, for there may not be too many."""


@functools.cache
def legal_layouts(model: ModelShape) -> dict[int, list[Layout]]:
    """Every layout of the space by its number of ranks, which need not be cores of this machine."""
    space = OF_EXPERTS if model.num_experts else SPACE
    legal = enumerate_legal(space, model, detect_local_cpu(), scopes=ALL_SCOPES - {"machine"})
    layouts: dict[int, list[Layout]] = {}
    for index in range(len(legal)):
        layout = legal.layout(index)
        layouts.setdefault(layout.num_devices, []).append(layout)
    return layouts


def legal_variants(model: ModelShape, layout: Layout) -> list[Layout]:
    """The layout under every schedule and order of ranks, which would make the space too large."""
    cluster, scopes = detect_local_cpu(), ALL_SCOPES - {"machine"}
    variants = [
        replace(layout, schedule=schedule, rank_order=order)
        for schedule, order in itertools.product(SCHEDULES, RANK_ORDERS)
    ]
    return [each for each in variants if not violations(each, model, cluster, scopes=scopes)]


def _degrees(layout: Layout) -> tuple[Any, ...]:
    cp = layout.cp, layout.cp_comm_type
    experts = layout.ep, layout.etp
    return (
        layout.tp,
        layout.tp_columns,
        *cp,
        layout.pp,
        layout.dp,
        *experts,
        layout.vpp,
        layout.pipeline_split,
    )


@st.composite
def cases(draw: st.DrawFn, *, sizes: tuple[int, ...]) -> tuple[ModelShape, Layout, float | None]:
    model = draw(st.sampled_from(MODELS))
    legal = legal_layouts(model)[draw(st.sampled_from(sizes))]
    # By its degrees first: else those with the most variants would be nearly all that is drawn.
    degrees = draw(st.sampled_from(sorted({_degrees(layout) for layout in legal})))
    layout = draw(st.sampled_from([layout for layout in legal if _degrees(layout) == degrees]))
    variant = draw(st.sampled_from(legal_variants(model, layout)))
    return model, variant, draw(st.sampled_from(CLIPPING))


def assert_trains_as_one_process(model: ModelShape, layout: Layout, clip: float | None) -> None:
    optimizer = OptimizerSettings(clip_grad_norm=clip)
    found = train.__wrapped__(model, layout, optimizer, NUM_STEPS)
    expected = train(model, make_layout(), optimizer, NUM_STEPS)
    assert_same_training(found, expected)


def test_the_rules_open_every_knob_to_the_drawn_layouts() -> None:
    """Else the tests below would not try what they are there for."""
    four = [layout for model in MODELS for layout in legal_layouts(model)[4]]
    eight = [layout for model in MODELS for layout in legal_layouts(model)[8]]
    for layouts in (four, eight):
        degrees = ("tp", "tp_columns", "cp", "pp", "dp", "ep", "etp")
        for knob in (*degrees, "cp_comm_type", "micro_batch_size", "zero_stage"):
            assert len({getattr(layout, knob) for layout in layouts}) > 1, knob
        assert {layout.recompute for layout in layouts} == set(RECOMPUTE_MODES)
        assert {layout.sequence_parallel for layout in layouts} == {False, True}
        assert {layout.vpp for layout in layouts} >= {1, 2}
        assert {layout.zero_replicas for layout in layouts} >= {1, 2}
        assert {layout.pipeline_split for layout in layouts} == set(PIPELINE_SPLITS)


def test_every_schedule_and_order_of_ranks_is_drawn() -> None:
    for model in MODELS:
        layouts = legal_layouts(model)[4]
        found = {
            (each.schedule, each.rank_order)
            for layout in layouts
            if layout.pp == 2 and layout.vpp == 1
            for each in legal_variants(model, layout)
        }
        assert found == set(itertools.product(SCHEDULES, RANK_ORDERS))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(sizes=(2, 4)))
def test_random_layouts_train_as_one_process(case: tuple[ModelShape, Layout, float | None]) -> None:
    assert_trains_as_one_process(*case)


@pytest.mark.slow
@pytest.mark.timeout(300)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(sizes=(2, 4, 8)))
def test_random_layouts_of_eight_ranks_train(case: tuple[ModelShape, Layout, float | None]) -> None:
    assert_trains_as_one_process(*case)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(sizes=(2, 4, 8)))
def test_many_random_layouts_train_alike(case: tuple[ModelShape, Layout, float | None]) -> None:
    assert_trains_as_one_process(*case)
