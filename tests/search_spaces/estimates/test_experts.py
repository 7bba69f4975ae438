"""Memory and time of models with experts, beside those of dense models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from search_spaces.estimates.memory import stage_memory
from search_spaces.estimates.storage import MEGATRON_LIKE
from search_spaces.estimates.time import step_time_s
from search_spaces.estimates.time_terms import StepShape, layer_terms
from search_spaces.spec.layout import Layout
from search_spaces.spec.layout_columns import LayoutColumns
from search_spaces.spec.model_shape import ModelShape
from search_spaces.spec.presets.clusters import resolve_cluster
from search_spaces.spec.presets.models import model_preset

MIXTRAL = model_preset("mixtral-8x7b")
H100 = resolve_cluster("h100-sxm")[0]
LAYOUT = Layout(num_nodes=1, tp=2, pp=4, num_microbatches=8, precision="bf16")


def one_expert(model: ModelShape) -> ModelShape:
    """A mixture of one expert, which every token takes: a dense model and a small router."""
    return replace(model, num_experts=1, experts_per_token=1)


def terms(model: ModelShape) -> dict[str, float]:
    step = StepShape.of(LayoutColumns.of(LAYOUT), model, H100)
    return {name: float(np.ravel(value)[0]) for name, value in layer_terms(step)}


def test_all_parameters_are_held_whatever_a_token_takes() -> None:
    stages = stage_memory(LAYOUT, MIXTRAL)
    routers = MIXTRAL.num_layers * MIXTRAL.hidden_size * (8 + 2) + MIXTRAL.hidden_size
    held = sum(stage.weights_bytes for stage in stages) / 2
    assert held == pytest.approx((MIXTRAL.num_parameters - routers) / 2 + routers, rel=1e-9)
    fewer = replace(MIXTRAL, experts_per_token=1)
    assert [s.weights_bytes for s in stage_memory(LAYOUT, fewer)] == [
        s.weights_bytes for s in stages
    ]


def test_dense_first_layers_are_held_by_the_first_stages() -> None:
    mixed = replace(MIXTRAL, num_dense_layers=12, ffn_hidden_size=4096)
    layer = stage_memory(replace(LAYOUT, tp=1), MIXTRAL)[1].weights_bytes / 2 / 8
    dense = stage_memory(replace(LAYOUT, tp=1), mixed.dense)[1].weights_bytes / 2 / 8
    found = [stage.weights_bytes / 2 for stage in stage_memory(replace(LAYOUT, tp=1), mixed)]
    assert found[1] == pytest.approx(4 * layer + 4 * dense)
    assert found[2] == pytest.approx(8 * layer)
    embedding = mixed.vocab_size * mixed.hidden_size
    assert found[0] == pytest.approx(8 * dense + embedding)
    assert sum(found) == pytest.approx(mixed.num_parameters)


def test_each_expert_of_a_token_keeps_rows_of_its_own() -> None:
    """2 f in 16 bits and 28 bytes; other trainers also keep the sorted input and two more f."""
    more = replace(MIXTRAL, experts_per_token=3)
    tokens, layers = MIXTRAL.seq_length * 4, 8  # micro-batches in flight on the first stage
    for storage, elements in ((None, 2 * 14336 / 2), (MEGATRON_LIKE, 4096 + 4 * 14336 / 2)):
        given = {} if storage is None else {"storage": storage}
        a, b = (stage_memory(LAYOUT, m, **given)[0].activations_bytes for m in (MIXTRAL, more))
        assert b - a == pytest.approx(tokens * layers * (2 * elements + 28))


def test_the_work_is_that_of_the_experts_that_a_token_takes() -> None:
    dense = terms(MIXTRAL.dense)
    one, two = terms(one_expert(MIXTRAL)), terms(replace(one_expert(MIXTRAL), num_experts=2))
    assert one["matrices"] == dense["matrices"]
    assert one["attention"] == dense["attention"] == two["attention"]
    assert two["matrices"] == pytest.approx(one["matrices"], rel=0.05)  # rows are halved
    assert two["matrix_bytes"] > one["matrix_bytes"]
    both = terms(replace(MIXTRAL, num_experts=2))
    active = MIXTRAL.num_attention_matrix_parameters + 2 * 3 * 4096 * 14336
    assert both["matrices"] / one["matrices"] == pytest.approx(
        active / MIXTRAL.dense.num_layer_matrix_parameters, rel=0.05
    )


def test_a_window_shortens_attention_and_a_wide_head_lengthens_it() -> None:
    windowed = replace(MIXTRAL, attention_window=1024)
    share = (4096**2 - 3072**2) / 4096**2
    assert terms(windowed)["attention"] == pytest.approx(share * terms(MIXTRAL)["attention"])
    wide = replace(MIXTRAL, head_dim=256)
    assert terms(wide)["attention"] == 2 * terms(MIXTRAL)["attention"]


def test_layers_of_both_kinds_take_the_mean_time() -> None:
    mixed = replace(MIXTRAL, num_dense_layers=8)
    found, expert, dense = (terms(m)["matrices"] for m in (mixed, MIXTRAL, mixed.dense))
    assert found == pytest.approx(0.75 * expert + 0.25 * dense)
    assert float(step_time_s(LAYOUT, mixed, H100)[0]) > 0
