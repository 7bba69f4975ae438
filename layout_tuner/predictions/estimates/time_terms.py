"""The terms of a step: the seconds of each part with the cluster's own constants.

A term is operations over the peak of the matrix units, bytes over a bandwidth, or a count times a
latency. Terms have no efficiencies: those are the factors in `predictions.estimates.step_time`,
which calibration refines. The step time is made of the terms, each times its factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final

import numpy as np

from layout_tuner.array_types import Floats
from layout_tuner.predictions.estimates.step_shape import (
    StepShape,
    SummedParameters,
    mean_of_layers,
)
from layout_tuner.predictions.estimates.tensor_sums import (
    COLLECTIVE_S,
    column_collectives,
    tensor_terms,
    tp_collectives,
)
from layout_tuner.search_spaces.layouts.layout_columns import code_of
from layout_tuner.search_spaces.models.model_shape import ModelShape

_P2P: Final = code_of("cp_comm_type", "p2p")
_A2A: Final = code_of("cp_comm_type", "a2a")

GRADIENT_BYTES: Final = 4.0
"""Gradients are accumulated and reduced in fp32, as Megatron-LM, nanotron and the embedded trainer
do."""
OPTIMIZER_BYTES: Final = 38.0
"""Adam reads gradient, master, two moments and writes the last three and the weight: 30 bytes; the
gradients' norm reads them once more, and clearing them writes them."""
ACCUMULATION_BYTES: Final = 10.0
"""Adding a 16-bit gradient to the fp32 sum: read both, write the sum."""
LOGIT_BYTES: Final = 60.0
"""Bytes that are moved for one logit where nothing is fused: its cast 6, the maximum 4, subtraction
8, exponential 8, sum 4, division 8, gradient 8, scaling 8, and the cast back 6."""
SCORE_PASSES: Final = 5.0
"""Times that a pass reads or writes the attention scores where they are stored: their product, mask
and scaling, softmax, dropout, and the product with the values."""
KERNEL_S: Final = 3e-6
"""Shortest time of a kernel on the device: to start and to drain."""
EACH_MICROBATCH_S: Final = 1e-3
"""Host time of a micro-batch outside the blocks (data, loss, schedule), by order of magnitude."""
EACH_STEP_S: Final = 1e-2
"""Time of a step that is equal for all layouts (logging, learning rate), by order of magnitude."""
HOST_OPERATIONS: Final[dict[str, float]] = {"gpt": 100.0, "llama": 140.0}
"""Operations of a block's forward and backward pass in eager PyTorch; a llama block adds rotations
and gates."""
_HALF_SPEED: Final = 100.0
"""Inner dimension at which a matrix product takes twice the time of its operations: each tile of
the result starts and drains a loop over it."""
HOST_COLLECTIVE: Final = 10.0
"""Host time of a collective, with its waiting and copies, in operations."""


def layer_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """The blocks on a device: matrices, attention, memory traffic."""
    model, slots = step.model, step.layer_slots
    passes = 2.0 + step.forward_passes
    bandwidth = step.cluster.memory_bandwidth_bytes_per_s
    positions = model.attention_positions / model.num_layers
    attention_flops = 4.0 * positions * model.query_size * step.tokens / step.tp
    attention_passes = passes + step.recomputes_attention
    yield (
        "matrices",
        slots * mean_of_layers(model, partial(_matrix_operations, step)) / step.peak_flops_per_s,
    )
    yield "attention", slots * attention_passes * attention_flops / step.wide_flops_per_s
    scores = model.num_heads * positions * step.tokens / step.tp
    score_bytes = step.score_traffic * attention_passes * SCORE_PASSES * step.element_bytes * scores
    yield "attention_bytes", slots * score_bytes / bandwidth
    yield (
        "matrix_bytes",
        slots * passes * mean_of_layers(model, partial(_matrix_bytes, step)) / bandwidth,
    )
    yield (
        "elementwise",
        slots * passes * mean_of_layers(model, partial(_elementwise_bytes, step)) / bandwidth,
    )
    yield "kernels", slots * _operations(step) * KERNEL_S


def _matrix_operations(step: StepShape, model: ModelShape) -> Floats:
    """Operations of a block's matrix products for a micro-batch, small inner dimensions weighed up.

    The forward product of [rows, inner] and [inner, columns] is followed by two of the same size:
    the gradient of the input, whose inner dimension is the columns, and that of the weight, whose
    inner dimension is the rows. Each expert has a product of its own, with its share of the rows.
    """
    t, tokens = step.tp, step.tokens
    h, q, kv = model.hidden_size / step.tp_columns, float(model.query_size), model.kv_hidden_size
    ups = 2.0 if model.family == "llama" else 1.0
    products: list[tuple[Floats | float, Floats, Floats | float, Floats | float]] = [
        (1.0, tokens, h, (q + 2.0 * kv) / t),
        (1.0, tokens, q / t, h),
    ]
    for count, rows, f, ranks in _feed_forwards(step, model):
        products += [(count, rows, h, ups * f / ranks), (count, rows, f / ranks, h)]
    total = np.zeros(np.broadcast_shapes(t.shape, tokens.shape, h.shape))
    for count, rows, inner, columns in products:
        passes = 2.0 + step.forward_passes
        passes = passes + _HALF_SPEED * (step.forward_passes / inner + 1.0 / columns + 1.0 / rows)
        total += count * (2.0 * rows * inner * columns * passes)
    return total


def _feed_forwards(
    step: StepShape, model: ModelShape
) -> Iterator[tuple[Floats | float, Floats, float, Floats]]:
    """The feed-forwards of a layer on a rank.

    Yields how many are alike, the tokens of each, their width, and the ranks that divide it.
    """
    if not model.num_experts:
        yield 1.0, step.tokens, float(model.ffn_hidden_size), step.tp
        return
    experts = model.num_experts / step.ep
    rows = step.expert_tokens * model.experts_per_token / experts
    yield experts, rows, float(model.moe_ffn_hidden_size), step.etp
    if model.shared_expert_ffn_hidden_size:
        yield 1.0, step.tokens, float(model.shared_expert_ffn_hidden_size), step.tp


def _sorted_rows(step: StepShape, model: ModelShape) -> Floats | float:
    """Rows that go through the experts of a rank, for each token that the rank holds."""
    return model.experts_per_token * step.expert_tokens / step.tokens if model.num_experts else 0.0


def _rows_and_width(step: StepShape, model: ModelShape) -> tuple[Floats | float, float]:
    """Rows of a token in a rank's feed-forwards of a layer, and the width of all its rows."""
    shared = model.shared_expert_ffn_hidden_size
    if not model.num_experts:
        return 1.0, float(model.ffn_hidden_size)
    width = float(model.experts_per_token * model.moe_ffn_hidden_size + shared)
    return _sorted_rows(step, model) + float(shared > 0), width


def _operations(step: StepShape) -> Floats:
    """Operations of a block for a micro-batch; each is about one kernel on the device."""
    return HOST_OPERATIONS[step.model.family] / 3.0 * (2.0 + step.forward_passes)


def _matrix_bytes(step: StepShape, model: ModelShape) -> Floats:
    """Bytes that the matrices of a block move in one pass: weights, inputs and outputs.

    This bounds the speed where a rank's matrices are small (roofline, Williams et al. 2009).
    """
    rows, f = _rows_and_width(step, model)
    h, q, kv = model.hidden_size, model.query_size, model.kv_hidden_size
    ups = 2.0 if model.family == "llama" else 1.0
    whole = (2.0 * h + rows * 2.0 * h) / step.tp_columns
    shared = (q + 2.0 * kv) + q + ups * f + f
    weights = float(model.num_layer_matrix_parameters - model.num_expert_parameters) / step.tp_ranks
    weights = weights + model.num_expert_parameters / (step.etp * step.ep)
    return step.element_bytes * (weights + step.tokens * (whole + shared / step.tp))


def _elementwise_bytes(step: StepShape, model: ModelShape) -> Floats:
    """Bytes that norms, residual sums, activations and rotations of a block move in one pass.

    Two norms and two residual sums read and write the residual stream (10 elements, shared only
    with sequence parallelism); the activation reads and writes the feed-forward's inside, and
    position and layout changes read and write query, key and value. Tokens are sorted by expert and
    put in order again, each row read and written.
    """
    ups = 2.0 if model.family == "llama" else 1.0
    inside = 2.0 * (ups + 1.0) * _rows_and_width(step, model)[1]
    inside += 2.0 * (model.query_size + 2.0 * model.kv_hidden_size)
    residual = 10.0 * model.hidden_size * step.residual_share
    residual = residual + 4.0 * _sorted_rows(step, model) * model.hidden_size
    return step.element_bytes * step.tokens * (residual + inside / step.tp)


def head_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """The output on a device, as if it were split over the stages like the layers."""
    bandwidth = step.cluster.memory_bandwidth_bytes_per_s
    logit_bytes = LOGIT_BYTES * step.model.vocab_size * step.tokens / step.tp_ranks
    flops = 3.0 * step.model.logit_forward_flops_per_token * step.tokens / step.tp_ranks
    yield "head", step.slots * (flops / step.wide_flops_per_s) / step.pp
    yield "logits", step.slots * logit_bytes / bandwidth / step.pp


def exchange_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """Expert parallelism: each pass sends rows to the ranks of their experts, and back.

    Of the rows of a rank, under balanced routing, g - 1 of n shares go to the other ranks of its
    node, and n - g over its network card, g being the ranks of the group on a node. Before the rows
    of a forward pass the ranks tell each other how many there are.
    """
    if not step.model.num_experts:
        return
    links, n, g = step.links.expert, step.ep, step.links.expert.here
    rows = step.expert_tokens * step.model.experts_per_token
    count = np.where(n > 1, step.expert_slots, 0.0)
    passes = 1.0 + step.forward_passes
    sent = 2.0 * passes * count * step.element_bytes * rows * step.model.hidden_size / n
    yield "exchange_inside", sent * (g - 1.0) / links.near_bytes_per_s
    yield "exchange_across", sent * (n - g) / step.cluster.inter_node_bandwidth_bytes_per_s
    yield "exchange_latency", count * _exchanges(step) * (COLLECTIVE_S + links.latency_s)


def _exchanges(step: StepShape) -> Floats:
    """All-to-alls of a layer with experts: of rows and back, and of their counts."""
    return 2.0 * (1.0 + step.forward_passes) + step.forward_passes


def context_terms(step: StepShape, attention_s: Floats) -> Iterator[tuple[str, Floats]]:
    """Context parallelism: what attention exchanges, by `cp_comm_type`.

    Of n ranks, each sends (n - 1) / n of the keys and values of all, which are n times its own. One
    pass gathers them, or passes them around a ring; the backward pass does so again and returns
    their gradients, in fp32 where a ring adds them up (arXiv:2310.01889). An exchange of tokens for
    heads sends (n - 1) / n of the own queries, keys, values and outputs once a pass
    (arXiv:2309.14509).

    A ring runs beside `attention_s`, the seconds of attention in the step.
    """
    model, n = step.model, step.cp
    if (n == 1.0).all():
        return
    again = np.where(step.recomputes_attention + step.forward_passes > 1.0, 1.0, 0.0)
    keys = 2.0 * (n - 1.0) * step.tokens * model.kv_hidden_size / step.tp
    gathered = keys * step.element_bytes * (3.0 + again)
    passed = keys * (step.element_bytes * (2.0 + again) + GRADIENT_BYTES)
    heads = 2.0 * (model.hidden_size + model.kv_hidden_size) * step.tokens / step.tp
    exchanged = heads * (n - 1.0) / n * step.element_bytes * (1.0 + step.forward_passes)
    is_ring, is_exchange = (step.cp_comm_type == code for code in (_P2P, _A2A))
    sent = np.where(is_exchange, exchanged, np.where(is_ring, passed, gathered))
    count = np.where(is_exchange, 2.0 * (1.0 + step.forward_passes), 3.0 + again)
    latency_s = count * (COLLECTIVE_S + (n - 1.0) * step.links.context.latency_s)
    seconds = step.layer_slots * (sent / step.links.context.bytes_per_s + latency_s)
    # All steps of a ring but its share of latency run beside a block of attention.
    exposed = np.where(is_ring, np.maximum(seconds - attention_s, 0.1 * seconds), seconds)
    yield "context", np.where(n > 1.0, exposed, 0.0)


def host_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """The host, which launches every operation on the device."""
    collectives = tp_collectives(step) + column_collectives(step)
    if step.model.num_experts:
        exchanges = np.where(step.ep > 1, _exchanges(step), 0.0)
        gathers = np.where(step.etp > 1, 1.0 + step.forward_passes, 0.0)
        collectives = collectives + step.expert_slots * (exchanges + gathers)
    yield "host", step.layer_slots * _operations(step) * step.cluster.host_operation_s
    yield "host_tensor", HOST_COLLECTIVE * collectives * step.cluster.host_operation_s
    yield "each_microbatch", step.slots * EACH_MICROBATCH_S


def data_terms(step: StepShape, backward_s: Floats) -> Iterator[tuple[str, Floats]]:
    """The reduction of the gradients over dp and cp, and ZeRO's gathering of the weights.

    A ring over d = dp * cp ranks moves 2 (d - 1) / d of the gradients in 2 (d - 1) steps, once per
    training step and bucket. With ZeRO-1 (arXiv:1910.02054) it is a reduce-scatter over the shards,
    half of that, and an all-reduce of a shard over its copies; the weights are gathered after the
    step, where no computation hides it. ZeRO-2 scatters for every micro-batch. ZeRO-3 also gathers
    the weights for every pass forward and backward, instead of after the step; prefetching hides
    it.

    `backward_s` are the passes (`backward_share`) behind which a reduction can hide.
    """
    terms: dict[str, Floats] = {}
    for group in step.summed_parameters:
        for name, term in _sum_terms(step, group):
            terms[name] = terms[name] + term if name in terms else term
    bytes_s = terms["data_inside"] + terms["data_across"]
    hidden = np.minimum(bytes_s + terms["data_latency"], backward_s)
    # Only of ZeRO-1 is the overlap an option.
    terms["data_overlap"] = np.where(step.zero_stage == 1, 0.0, hidden)
    terms["shards_overlap"] = np.where(step.zero_stage == 1, hidden, 0.0)
    yield from terms.items()


def _sum_terms(step: StepShape, group: SummedParameters) -> Iterator[tuple[str, Floats]]:
    """What summing and gathering some of the parameters takes."""
    z, d, links = group.shards, group.ranks, group.links
    copies, is_zero, is_gathering = d / z, step.zero_stage > 0, step.zero_stage == 3
    scatters = np.where(step.zero_stage >= 2, step.num_microbatches, 1.0)
    gathers = np.where(is_gathering, 2.0 * step.num_microbatches, 0.0)
    volume = scatters * (z - 1.0) / z + 2.0 * (copies - 1.0) / d
    volume = np.where(is_zero, volume, 2.0 * (d - 1.0) / d)
    hops = (scatters + gathers) * (z - 1.0) + 2.0 * (copies - 1.0)
    hops = np.where(is_zero, hops, 2.0 * (d - 1.0))
    buckets = step.model.num_layers / step.pp + 1.0
    gather = step.element_bytes * group.count * (z - 1.0) / z / links.bytes_per_s
    bytes_s = GRADIENT_BYTES * group.count * volume / links.bytes_per_s + gathers * gather
    yield "data_inside", np.where(links.inside, bytes_s, 0.0)
    yield "data_across", np.where(links.inside, 0.0, bytes_s)
    yield "data_congestion", bytes_s * links.doublings
    yield "data_latency", buckets * hops * links.latency_s
    is_last = is_zero & ~is_gathering
    yield "weights_gather", np.where(is_last, gather, 0.0)
    yield "gather_latency", np.where(is_last, buckets * (z - 1.0) * links.latency_s, 0.0)


def stage_terms(step: StepShape, layer_s: Floats, head_s: Floats) -> Iterator[tuple[str, Floats]]:
    """The cost of unequal stages: for the best split of the layers, and for an equal split.

    1F1B takes (m - 1) times the slowest stage and once the sum of all stages. An equal split gives
    every stage L / p layers and the last stage the output too; the best split gives the last stage
    fewer layers. Where embedding or output count as a layer, their stages have one layer fewer.

    `layer_s` and `head_s` are the expected seconds of a block and of the output for a micro-batch,
    by the prior.
    """
    layers, later = float(step.model.num_layers), step.num_microbatches - 1.0
    even = (layers * layer_s + head_s) / step.pp
    fewer = np.floor(np.maximum((even - head_s) / layer_s, 0.0))
    slowest = np.minimum(
        _slowest_stage(step, fewer, layer_s, head_s),
        _slowest_stage(step, np.minimum(fewer + 1.0, layers), layer_s, head_s),
    )
    best = np.where(step.pp > 1, np.maximum(slowest - even, 0.0), 0.0)
    embedding, head = step.counted_ends
    counted = layers + embedding + head
    each = np.ceil(counted / step.pp)
    last = np.maximum(counted - each * (step.pp - 1.0) - head, 0.0)
    most = np.where(step.pp > 2, each, each - embedding)
    equal = np.maximum(most * layer_s, last * layer_s + head_s)
    yield "imbalance", later * best
    yield "equal_layers", later * np.maximum(equal - even - best, 0.0)


def _slowest_stage(step: StepShape, last: Floats, layer_s: Floats, head_s: Floats) -> Floats:
    """Seconds of the slowest stage if the last has `last` layers and the others share the rest."""
    others = np.ceil((step.model.num_layers - last) / np.maximum(step.pp - 1.0, 1.0))
    return np.maximum(last * layer_s + head_s, others * layer_s)


def pipeline_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """Point-to-point transfers over the boundary of each chunk, both ways, and their latency."""
    passes = np.where(step.pp > 1, 2.0 * step.vpp * step.slots, 0.0)
    one = step.element_bytes * step.tokens * step.model.hidden_size * step.residual_share
    seconds = passes * one / step.links.pipeline_bytes_per_s
    yield "pipeline_inside", np.where(step.links.pipeline_inside, seconds, 0.0)
    yield "pipeline_across", np.where(step.links.pipeline_inside, 0.0, seconds)
    yield "pipeline_latency", passes * step.links.pipeline_latency_s


def optimizer_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """The optimizer on its shard, and a constant, once per step."""
    bandwidth = step.cluster.memory_bandwidth_bytes_per_s
    moved = sum(OPTIMIZER_BYTES * each.count / each.shards for each in step.summed_parameters)
    yield "optimizer", np.asarray(moved / bandwidth)
    yield "each_step", np.full(step.tp.shape, EACH_STEP_S)


def all_terms(step: StepShape, expected: Mapping[str, float]) -> Iterator[tuple[str, Floats]]:
    """The terms of a step (`TERM_NAMES`), without those of cp and of experts where there are none.

    `expected` are the prior medians of the factors by the terms' names. They decide how long stages
    wait for each other, and how much of a reduction can be hidden.
    """
    blocks = [*layer_terms(step), *tensor_terms(step)]
    blocks += context_terms(step, dict(blocks)["attention"])
    blocks += exchange_terms(step)
    ends = list(head_terms(step))
    layer_s = sum(expected[name] * term for name, term in blocks) / step.layer_slots
    head_s = sum(expected[name] * term for name, term in ends) / step.slots * step.pp
    yield from blocks
    yield from ends
    held = sum(each.count for each in step.summed_parameters)
    accumulation = ACCUMULATION_BYTES * held * step.num_microbatches
    yield "accumulation", accumulation / step.cluster.memory_bandwidth_bytes_per_s
    yield from stage_terms(step, layer_s, head_s)
    yield from host_terms(step)
    stage_s = layer_s * step.model.num_layers / step.pp
    yield from data_terms(step, stage_s * step.backward_share * step.slots)
    yield from pipeline_terms(step)
    yield from optimizer_terms(step)
