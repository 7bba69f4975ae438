"""Memory and time of models with experts, beside those of dense models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from search_spaces.estimates.memory import stage_memory
from search_spaces.estimates.storage import EMBEDDED_TRAINER, MEGATRON_LIKE
from search_spaces.estimates.time import step_time_s
from search_spaces.estimates.time_terms import StepShape, layer_terms
from search_spaces.mesh import coordinates, expert_coordinates
from search_spaces.spec.layout import ZERO_STAGES, Layout
from search_spaces.spec.layout_columns import LayoutColumns
from search_spaces.spec.model_shape import ModelShape
from search_spaces.spec.presets.clusters import resolve_cluster
from search_spaces.spec.presets.models import model_preset

MIXTRAL = model_preset("mixtral-8x7b")
H100 = resolve_cluster("h100-sxm")[0]
LAYOUT = Layout(
    num_nodes=4, tp=2, etp=2, pp=4, num_microbatches=8, sequence_parallel=True, precision="bf16"
)
MIXED = replace(
    MIXTRAL,
    num_layers=8,
    num_dense_layers=3,
    ffn_hidden_size=12288,
    shared_expert_ffn_hidden_size=2048,
    qk_norm=True,
)
"""Dense layers first, then experts beside a shared one."""
FOLDED = [
    replace(LAYOUT, dp=4, ep=4),
    replace(LAYOUT, dp=4, ep=8, etp=1),
    replace(LAYOUT, dp=4, ep=2, etp=1),
    replace(LAYOUT, dp=4, etp=4),
    replace(LAYOUT, dp=2, cp=2, ep=2, pp=2),
    replace(LAYOUT, dp=8, tp=1, ep=2, etp=4, pp=2),
]


def one_expert(model: ModelShape) -> ModelShape:
    """A mixture of one expert, which every token takes: a dense model and a small router."""
    return replace(model, num_experts=1, experts_per_token=1)


def terms(model: ModelShape) -> dict[str, float]:
    step = StepShape.of(LayoutColumns.of(LAYOUT), model, H100)
    return {name: float(np.ravel(value)[0]) for name, value in layer_terms(step)}


def test_all_parameters_are_held_whatever_a_token_takes() -> None:
    """Of two ranks, each half of every matrix, and all norms and routers."""
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
    layer = stage_memory(replace(LAYOUT, tp=1, etp=1), MIXTRAL)[1].weights_bytes / 2 / 8
    dense = stage_memory(replace(LAYOUT, tp=1, etp=1), mixed.dense)[1].weights_bytes / 2 / 8
    found = [stage.weights_bytes / 2 for stage in stage_memory(replace(LAYOUT, tp=1, etp=1), mixed)]
    assert found[1] == pytest.approx(4 * layer + 4 * dense)
    assert found[2] == pytest.approx(8 * layer)
    embedding = mixed.vocab_size * mixed.hidden_size
    assert found[0] == pytest.approx(8 * dense + embedding)
    assert sum(found) == pytest.approx(mixed.num_parameters)


def layer_parameters(layout: Layout, layer: int) -> tuple[int, int]:
    """Parameters of a layer of `MIXED` on a rank, summed by matrix: others, and experts."""
    h, kv, tp = 4096, 1024, layout.tp
    others = 2 * h + 2 * 128 + (2 * h * h + 2 * h * kv) // tp
    if not MIXED.has_experts(layer):
        return others + 3 * h * 12288 // tp, 0
    expert = 3 * h * (14336 // layout.etp)
    return others + 8 * h + 3 * h * 2048 // tp, 8 // layout.ep * expert


def sharing(layout: Layout) -> tuple[int, int]:
    """Ranks that share a copy of what rank 0 holds: of what is not experts, and of experts."""
    ranks = range(layout.tp * layout.cp * layout.dp)
    others = [coordinates(rank, layout).tp_rank for rank in ranks].count(0)
    places = [expert_coordinates(rank, layout) for rank in ranks]
    experts = [(place.etp_rank, place.ep_rank) for place in places].count((0, 0))
    return others // layout.zero_replicas, experts // layout.zero_replicas


@pytest.mark.parametrize("zero_stage", ZERO_STAGES)
@pytest.mark.parametrize(
    "layout",
    [*FOLDED, *(replace(each, zero_replicas=2) for each in FOLDED if each.edp > 1)],
    ids=lambda layout: layout.key,
)
def test_experts_are_shared_by_the_ranks_that_hold_the_same_ones(
    layout: Layout, zero_stage: int
) -> None:
    layout = replace(layout, zero_stage=zero_stage)
    shards = sharing(layout) if zero_stage else (1, 1)
    for stage, found in enumerate(stage_memory(layout, MIXED)):
        layers = layout.layers_of_stage(stage, MIXED.num_layers)
        others, experts = map(sum, zip(*(layer_parameters(layout, i) for i in layers), strict=True))
        norm = 4096 if stage == layout.pp - 1 else 0
        end = MIXED.vocab_size * 4096 // layout.tp + norm if stage in (0, layout.pp - 1) else 0
        whole = others + end + experts
        share = (others + end) / shards[0] + experts / shards[1]
        # The last layer, and the one before it or an end; what nobody shares is no copy.
        layer = sum(n for n, d in zip(layer_parameters(layout, 7), shards, strict=True) if d > 1)
        gathered = share + layer + max(layer, end if shards[0] > 1 else 0)
        assert found.optimizer_bytes == pytest.approx(12 * share)
        assert found.gradients_bytes == pytest.approx(4 * (gathered if zero_stage > 1 else whole))
        assert found.weights_bytes == pytest.approx(2 * (gathered if zero_stage == 3 else whole))


@pytest.mark.parametrize("layout", FOLDED, ids=lambda layout: layout.key)
def test_a_rank_holds_the_rows_of_the_tokens_that_come_to_its_experts(layout: Layout) -> None:
    """Per row 2 f / etp in 16 bits and 28 bytes; the input where it came from elsewhere.

    Other trainers keep the sorted input always, and the activation and its product beside 2 f.
    """
    more = replace(MIXTRAL, experts_per_token=3)
    rows = layout.etp * 4096 // (layout.cp * layout.tp)  # one a token; a sequence a micro-batch
    layers = len(layout.layers_of_stage(0, 32)) * layout.pp  # micro-batches in flight there
    width = 14336 / layout.etp
    came = 4096 if layout.ep > 1 else 0
    for storage, elements in (
        (EMBEDDED_TRAINER, 2 * width + came),
        (MEGATRON_LIKE, 4 * width + 4096),
    ):
        a, b = (stage_memory(layout, m, storage)[0].activations_bytes for m in (MIXTRAL, more))
        assert b - a == pytest.approx(layers * rows * (2 * elements + 28))


@pytest.mark.parametrize("layout", FOLDED, ids=lambda layout: layout.key)
def test_inputs_are_gathered_for_attention_and_a_shared_expert_over_tp_and_for_others_over_etp(
    layout: Layout,
) -> None:
    """What the embedded trainer keeps beyond one that gathers again."""
    own = 4096 // (layout.cp * layout.tp)  # tokens of a rank between layers
    layers = 4096 * 2 * len(layout.layers_of_stage(0, 32)) * layout.pp
    for shared in (0, 2048):
        model = replace(MIXTRAL, shared_expert_ffn_hidden_size=shared)
        kept, again = (
            stage_memory(layout, model, replace(EMBEDDED_TRAINER, gathered_share=share))[0]
            for share in (1.0, 0.0)
        )
        tokens = (1 + bool(shared)) * (layout.tp - 1) * own + (layout.etp - 1) * own
        assert kept.activations_bytes - again.activations_bytes == layers * tokens


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
