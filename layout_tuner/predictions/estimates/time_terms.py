"""The terms of a step: the seconds of each part with the cluster's own constants.

A term is operations over the peak of the matrix units, bytes over a bandwidth, or a count times a
latency. Terms have no efficiencies: those are the factors in `predictions.estimates.step_time`,
which calibration refines. The step time is made of the terms, each times its factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np

from layout_tuner.array_types import Floats
from layout_tuner.predictions.estimates.layer_products import (
    matrix_bytes,
    matrix_seconds,
    product_seconds,
    products_of,
    rates_of,
    rows_and_width,
    sorted_rows,
)
from layout_tuner.predictions.estimates.products import attention_flops_per_s, flash_2_share
from layout_tuner.predictions.estimates.step_shape import (
    StepShape,
    SummedParameters,
    mean_of_kinds,
    mean_of_layers,
)
from layout_tuner.predictions.estimates.tensor_sums import (
    COLLECTIVE_S,
    column_collectives,
    tensor_terms,
    tp_collectives,
)
from layout_tuner.search_spaces.layouts.layout_columns import code_of, of_narrow, wide_codes
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.models.sublayers import has_kinds

_FP32: Final = code_of("precision", "fp32")
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
FUSED_ACCUMULATION_BYTES: Final = 3.0
"""The same, where the product of the weight gradient adds it: SimuMax's operators of an A100 have
0.71 of the peak for such products and 0.745 for those that write 16 bits, 5 % of a product of
4,096 tokens."""
BACKWARD_PRODUCTS: Final = 2.5
"""Products of fused attention's backward pass over those of the forward pass: five and two, since
it computes the scores again (arXiv:2205.14135)."""
BACKWARD_RATE: Final = 0.86
"""Speed of that backward pass over that of the forward pass: 0.86 in SimuMax's operators of an
A100; FlashAttention-2 reaches 63 and 73 % of the peak (arXiv:2307.08691)."""
STATE_PEAK_SHARE: Final = 0.08
STATE_FLOPS_PER_S: Final = 8.5e13
"""Speed of the recurrence of Mamba-2 and delta nets forward, a share of the peak that products
reach, and at most so many operations (`MixerParts.flops_of_token`): on a B200 84 to 97 TFLOP/s of
mamba_chunk_scan_combined with 8,192 tokens or more (TensorRT-LLM 1.3.0rc15) and 79 to 90 of
chunk_gated_delta_rule on B200, GB200 and GB300, on an H100 38 to 74 (TensorRT-LLM 1.3.0rc20, SGLang
0.5.14; all in aiconfigurator 095f58a5)."""
CHANNEL_DECAY_RATE: Final = 0.55
"""Speed of KDA over that of a gated delta net: 1.20 and 2.24 ms on a B200
(flash-linear-attention, measured by pytorch/helion 3e928d1e), 2.03 and 3.27 ms on an H800."""
STATE_BACKWARD: Final = 3.5
"""Seconds of their backward pass over those of the forward pass: 3.4 to 3.6 of a gated delta net,
3.8 to 4.1 of KDA in that measurement."""
OFFLOADED_PARAMETER_S: Final = 1.7e-9
"""Seconds of a parameter's step on the host, with its transfers, before the optimizer's factor of
1.5: 16 H100 took 3.19 s longer for 15.3 GB of states at 12 bytes (Megatron-Bridge's skill
nemo-mbridge-perf-cpu-offloading, Qwen3 30B), and a quarter and a half of them proportionally."""
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
HOST_COLLECTIVE: Final = 10.0
"""Host time of a collective, with its waiting and copies, in operations."""


def layer_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """The blocks on a device: matrices, attention, memory traffic.

    The rates of measured products include the traffic of the matrices. Attention that stores its
    scores has the speed of products and the traffic of `SCORE_PASSES`; of fused attention, measured
    rates include all.
    """
    model, slots = step.model, step.layer_slots
    passes = 2.0 + step.forward_passes
    bandwidth = step.cluster.memory_bandwidth_bytes_per_s
    seconds, is_measured = matrix_seconds(step)
    yield "matrices", slots * seconds
    attention_s = _attention_seconds(step)
    if has_kinds(model):
        attention_s = attention_s + mean_of_layers(model, partial(_state_seconds, step))
    yield "attention", slots * attention_s
    if (traffic := step.kernels.traffic_of(model)) > 0:
        scores = model.num_heads * (model.attention_positions / model.num_layers) * step.tokens
        score_passes = (passes + step.recomputes_attention) * SCORE_PASSES
        score_bytes = traffic * score_passes * step.element_bytes * scores / step.tp
        yield "attention_bytes", slots * score_bytes / bandwidth
    moved = mean_of_layers(model, partial(matrix_bytes, step))
    yield "matrix_bytes", np.where(is_measured, 0.0, slots * passes * moved / bandwidth)
    elementwise_bytes = mean_of_layers(model, partial(_elementwise_bytes, step))
    yield "elementwise", slots * elementwise_bytes / bandwidth
    yield "kernels", slots * _operations(step) * KERNEL_S


def _attention_seconds(step: StepShape) -> Floats:
    """Seconds of a layer's two attention products for a micro-batch, with their backward pass.

    A head's width is the mean of those of keys and values: the kernels measured for latent
    attention (192 and 128; TensorRT-LLM 1.3.0rc20 in aiconfigurator 095f58a5, 4,096 tokens) reach
    0.52 of the peak on H100, 0.48 on B200 and 0.53 on GB300, where heads of 128 have 0.55, 0.45 and
    0.52. FlashAttention-2 pads values to the width of keys.
    """
    model, kernels = step.model, step.kernels
    widths = model.head_size, model.value_head_size
    flops = _attention_flops(model) * step.tokens / step.tp
    if kernels.uses_flash_2:
        flops = flops * (2.0 * max(widths) / sum(widths))
    forward_passes = step.forward_passes + step.recomputes_attention
    rate = None
    if kernels.uses_measured_rates and not kernels.traffic_of(model):
        length = min(model.seq_length, model.mean_document_length or model.seq_length)
        rate = attention_flops_per_s(step.cluster, sum(widths) // 2, length)
    if rate is None:
        return np.asarray((2.0 + forward_passes) * flops / step.wide_flops_per_s)
    if kernels.uses_flash_2:
        rate *= flash_2_share(step.cluster)
    passes = forward_passes + BACKWARD_PRODUCTS / BACKWARD_RATE
    at_rate = passes * (flops / 2.0) / rate
    in_fp32 = step.precision == _FP32
    return np.where(in_fp32, (2.0 + forward_passes) * flops / step.wide_flops_per_s, at_rate)


def _attention_flops(model: ModelShape) -> float:
    """Forward operations of a token in a layer's attention, as a mean over the layers."""
    each = {own.mixer_parts.flops_of_position for _, own, _ in model.kinds} - {0}
    if len(each) == 1:
        return model.attention_positions / model.num_layers * each.pop()
    return model.attention_forward_flops_per_token / model.num_layers


def _state_seconds(step: StepShape, model: ModelShape) -> Floats:
    """Seconds of a layer's recurrence (`STATE_PEAK_SHARE`) for a micro-batch."""
    flops = model.mixer_parts.flops_of_token
    rate = np.minimum(STATE_PEAK_SHARE * step.wide_flops_per_s, STATE_FLOPS_PER_S)
    rate = rate * (CHANNEL_DECAY_RATE if model.mixer == "kda" else 1.0)
    passes = step.forward_passes + STATE_BACKWARD
    return np.asarray(passes * flops * step.tokens / step.tp / rate, dtype=np.float64)


def _operations(step: StepShape) -> Floats:
    """Operations of a block for a micro-batch; each is about one kernel on the device."""
    passes = 2.0 + step.forward_passes + step.repeats_operators
    halves = mean_of_kinds(step.model, lambda of: of.num_sublayers / 2.0)
    return HOST_OPERATIONS[step.model.family] * halves / 3.0 * passes


def _elementwise_bytes(step: StepShape, model: ModelShape) -> Floats:
    """Bytes that norms, residual sums, activations and rotations of a block move.

    A pass reads and writes the residual stream for two norms and two residual sums (10 elements,
    shared only with sequence parallelism); the activation reads and writes the feed-forward's
    inside, and position and layout changes read and write query, key and value. Tokens are sorted
    by expert and put in order again, each row read and written.

    Without fused kernels a backward pass takes two such passes. With them it takes one: the
    activation reads its inputs and a gradient and writes their gradients, and query and key are
    rotated in place of values that are copied.

    The inputs of products in blocks, and the gradients of their outputs, are quantised in passes of
    their own; weights once a step, with the optimizer.
    """
    ups, width = model.num_ups, rows_and_width(step, model)[1]
    activations = step.recomputes["moe_act" if model.num_experts else "mlp"]
    q, kv = model.query_size, model.kv_hidden_size
    forward = step.forward_passes + step.repeats_operators
    if step.kernels.fuses_elementwise:
        residual_passes = forward + 1.0
        inside = forward * ((ups + 1.0) * width + 2.0 * (q + kv))
        inside = inside + (2.0 * ups + 1.0) * width + 2.0 * (q + kv)
    else:
        residual_passes = forward + 2.0
        inside = residual_passes * 2.0 * ((ups + 1.0) * width + q + 2.0 * kv)
    inside = inside + activations * (ups + 1.0) * width
    mixed, gated = _state_widths(model)
    if mixed or gated:
        # A convolution's backward pass runs it again; a gate's reads three and writes three.
        inside = inside + forward * (2.0 * mixed + 3.0 * gated) + 5.0 * mixed + 6.0 * gated
    residual_passes = residual_passes + 0.4 * step.recomputes["layernorm"]
    streams = 5.0 * model.num_sublayers - 3.0 * model.parallel_block
    residual = residual_passes * streams * model.hidden_size * step.residual_share
    residual = residual + (forward + 2.0) * 4.0 * sorted_rows(step, model) * model.routed_width
    moved: Floats = step.element_bytes * step.tokens * (residual + inside / step.tp)
    if (casts := of_narrow(step.precision, lambda of: of.cast_bytes)).any():
        moved = moved + casts * sum(
            each.number * each.rows * (each.forward * each.inner + each.columns)
            for each in products_of(step, model)
        )
    return moved


def _state_widths(model: ModelShape) -> tuple[float, float]:
    """Features of a token that a mixer's convolution takes, and those that its gate scales."""
    if model.mixer == "mamba2":
        groups = 2 * model.mamba_num_groups * model.mamba_state_dim
        return float(model.mamba_size + groups), float(model.mamba_size)
    if model.mixer in ("gated_delta_net", "kda"):
        keys = model.linear_num_key_heads * model.linear_key_head_dim
        return float(2 * keys + model.linear_value_size), float(model.linear_value_size)
    return 0.0, float(model.query_size if model.attention_output_gate else 0)


def head_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """The output on a device, as if it were split over the stages like the layers.

    Each depth of multi-token prediction has it once more, and its projection of 2 H to H.
    """
    model, bandwidth = step.model, step.cluster.memory_bandwidth_bytes_per_s
    h, vocabulary, depths = model.hidden_size, model.vocab_size, model.num_mtp_layers
    logit_bytes = LOGIT_BYTES * (1 + depths) * vocabulary * step.tokens / step.tp_ranks
    width = vocabulary + depths * (vocabulary + 2 * h)
    flops = 3.0 * (2 * h * width) * step.tokens / step.tp_ranks
    seconds, columns = np.asarray(flops / step.wide_flops_per_s), width / step.tp_ranks
    for here, rates in rates_of(step, wide_codes(step.precision)):
        at_rates = product_seconds(rates, 1.0, step.tokens, float(h), columns)
        seconds = np.where(here, at_rates, seconds)
    yield "head", step.slots * seconds / step.pp
    yield "logits", step.slots * logit_bytes / bandwidth / step.pp


def exchange_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """Expert parallelism: each pass sends rows to the ranks of their experts, and back.

    Of the rows of a rank, under balanced routing, g - 1 of n shares go to the other ranks of its
    node, and n - g over its network card, g being the ranks of the group on a node; of a domain of
    nodes likewise. Before the rows of a forward pass the ranks tell each other how many there are.
    """
    if not step.model.num_experts:
        return
    links, n, g = step.links.expert, step.ep, step.links.expert.here
    rows = step.expert_tokens * step.model.experts_per_token
    count = np.where(n > 1, step.expert_slots, 0.0)
    passes = 1.0 + step.forward_passes
    sent = 2.0 * passes * count * step.element_bytes * rows * step.model.routed_width / n
    yield "exchange_inside", sent * (g - 1.0) / links.near_bytes_per_s
    yield "exchange_across", links.across_s(sent, n)
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
    model, n, is_ring = step.model, step.cp, step.cp_comm_type == _P2P
    if (n == 1.0).all():
        return
    of_layer = partial(_exchanged_s, step)
    seconds = mean_of_layers(model, of_layer) if has_kinds(model) else of_layer(model)
    seconds = step.layer_slots * seconds
    # All steps of a ring but its share of latency run beside a block of attention.
    exposed = np.where(is_ring, np.maximum(seconds - attention_s, 0.1 * seconds), seconds)
    yield "context", np.where(n > 1.0, exposed, 0.0)


def _exchanged_s(step: StepShape, model: ModelShape) -> Floats:
    """Seconds of what a layer exchanges over cp; a recurrence always exchanges tokens for heads."""
    n, matrices = step.cp, model.mixer_parts.matrices
    if not matrices:
        return np.zeros(n.shape)
    is_state = not model.has_softmax_attention
    again = np.where(step.recomputes_attention + step.forward_passes > 1.0, 1.0, 0.0)
    values = model.num_key_heads * model.value_head_size
    keys = (n - 1.0) * step.tokens * (model.kv_hidden_size + values) / step.tp
    gathered = keys * step.element_bytes * (3.0 + again)
    passed = keys * (step.element_bytes * (2.0 + again) + GRADIENT_BYTES)
    wide = model.query_size + model.kv_hidden_size + values
    wide = wide + model.num_query_heads * model.value_head_size
    wide = matrices[0].columns + matrices[-1].rows if is_state else wide
    heads = wide * step.tokens / step.tp
    exchanged = heads * (n - 1.0) / n * step.element_bytes * (1.0 + step.forward_passes)
    is_ring, is_exchange = (step.cp_comm_type == code for code in (_P2P, _A2A))
    sent = np.where(is_exchange | is_state, exchanged, np.where(is_ring, passed, gathered))
    count = np.where(is_exchange | is_state, 2.0 * (1.0 + step.forward_passes), 3.0 + again)
    latency_s = count * (COLLECTIVE_S + (n - 1.0) * step.links.context.latency_s)
    return np.asarray(sent / step.links.context.bytes_per_s + latency_s, dtype=np.float64)


def host_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """The host, which launches every operation of the blocks on the device."""
    collectives = tp_collectives(step) + column_collectives(step)
    operations = step.layer_slots * _operations(step)
    if step.model.num_experts:
        exchanges = np.where(step.ep > 1, _exchanges(step), 0.0)
        gathers = np.where(step.etp > 1, 1.0 + step.forward_passes, 0.0)
        collectives = collectives + step.expert_slots * (exchanges + gathers)
        passes = (2.0 + step.forward_passes) / 3.0
        operations = operations + step.expert_slots * step.kernels.expert_operations * passes
    yield "host", operations * step.cluster.host_operation_s
    yield "host_tensor", HOST_COLLECTIVE * collectives * step.cluster.host_operation_s


def data_terms(
    step: StepShape, held: Sequence[SummedParameters], backward_s: Floats
) -> Iterator[tuple[str, Floats]]:
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
    for group in held:
        for name, term in _sum_terms(step, group):
            terms[name] = terms[name] + term if name in terms else term
    bytes_s = terms["data_inside"] + terms["data_across"]
    hidden = np.minimum(bytes_s + terms["data_latency"], backward_s)
    hidden = np.where(step.zero_stage >= step.kernels.overlaps_from, 0.0, hidden)
    # Only of ZeRO-1 is the overlap an option.
    terms["data_overlap"] = np.where(step.zero_stage == 1, 0.0, hidden)
    terms["shards_overlap"] = np.where(step.zero_stage == 1, hidden, 0.0)
    yield from terms.items()


def _sum_terms(step: StepShape, group: SummedParameters) -> Iterator[tuple[str, Floats]]:
    """What summing and gathering some of the parameters takes."""
    z, d, links = group.shards, group.ranks, group.links
    copies, is_zero, is_gathering = d / z, step.zero_stage > 0, step.zero_stage == 3
    scatters, gathers = np.ones(d.shape), np.zeros(d.shape)
    if (step.zero_stage >= 2).any():  # else they do not depend on the number of micro-batches
        scatters = np.where(step.zero_stage >= 2, step.num_microbatches, 1.0)
        gathers = np.where(is_gathering, 2.0 * step.num_microbatches, 0.0)
    volume = scatters * (z - 1.0) / z + 2.0 * (copies - 1.0) / d
    volume = np.where(is_zero, volume, 2.0 * (d - 1.0) / d)
    hops = (scatters + gathers) * (z - 1.0) + 2.0 * (copies - 1.0)
    hops = np.where(is_zero, hops, 2.0 * (d - 1.0))
    buckets = step.model.num_layers / step.pp + 1.0
    weight_bytes = step.element_bytes
    if step.kernels.gathers_narrow:
        less = of_narrow(step.precision, lambda of: 2.0 - of.gathered_bytes)
        weight_bytes = weight_bytes - group.of_layers * less
    gather = weight_bytes * group.count * (z - 1.0) / z / links.bytes_per_s
    is_light = step.kernels.scatters_weight_type & (step.zero_stage >= 2)
    sent = np.where(is_light, step.element_bytes, GRADIENT_BYTES) * group.count * volume
    bytes_s = sent / links.bytes_per_s + gathers * gather
    is_last = is_zero & ~is_gathering
    last, last_hops = np.where(is_last, gather, 0.0), np.where(is_last, buckets * (z - 1.0), 0.0)
    beside = float(step.kernels.overlaps_from == 1)
    bytes_s = bytes_s + beside * last
    yield "data_inside", np.where(links.inside, bytes_s, 0.0)
    yield "data_across", np.where(links.inside, 0.0, bytes_s)
    doublings = np.maximum(links.doublings - np.log2(step.kernels.calm_nodes), 0.0)
    yield "data_congestion", bytes_s * doublings
    hop_s = links.mean_latency_s(step.cluster) if step.kernels.mean_hops else links.latency_s
    yield "data_latency", (buckets * hops + beside * last_hops) * hop_s
    yield "weights_gather", (1.0 - beside) * step.kernels.weights_gather * last
    yield "gather_latency", (1.0 - beside) * last_hops * hop_s


def stage_terms(
    step: StepShape, layer_s: Floats, head_s: Floats, slowest_s: Floats | None
) -> Iterator[tuple[str, Floats]]:
    """The cost of unequal stages: for the best split of the layers, and for an equal split.

    1F1B takes (m - 1) times the slowest stage and once the sum of all stages. An equal split gives
    every stage L / p layers and the last stage the output too; the best split gives the last stage
    fewer layers. Where embedding or output count as a layer, their stages have one layer fewer.
    Stages that are written out, and those of a V, have the cost of their split alone.

    `layer_s` and `head_s` are the expected seconds of a block and of the output for a micro-batch,
    by the prior. `slowest_s` are those of the slowest stage, where stages have unlike layers: they
    have the cost of their split alone.
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
    unequal = np.maximum(equal - even - best, 0.0)
    if step.rank_layers is not None:
        is_own, of_last, of_others = step.rank_layers
        written = np.maximum(of_others * layer_s, of_last * layer_s + head_s) - even
        best, unequal = np.where(is_own, written, best), np.where(is_own, 0.0, unequal)
    if slowest_s is not None:
        best = np.where(step.pp > 1, np.maximum(slowest_s - even, 0.0), 0.0)
        unequal = np.zeros(())
    yield "imbalance", later * best
    yield "equal_layers", later * unequal


def _slowest_stage(step: StepShape, last: Floats, layer_s: Floats, head_s: Floats) -> Floats:
    """Seconds of the slowest stage if the last has `last` layers and the others share the rest."""
    others = np.ceil((step.model.num_layers - last) / np.maximum(step.pp - 1.0, 1.0))
    return np.maximum(last * layer_s + head_s, others * layer_s)


def pipeline_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """Point-to-point transfers over the boundary of each chunk, both ways, and their latency.

    Where they run beside other chunks, those of the first stage's warm-up and flush remain: 2 (p -
    1) + (v - 1) p of the m v passes each way (Megatron Core, pipeline_parallel/schedules.py).
    """
    passes = np.where(step.pp > 1, 2.0 * step.vpp * step.slots, 0.0)
    if step.kernels.overlaps_transfers:
        waited = 2.0 * (step.pp - 1.0) + (step.vpp - 1.0) * step.pp
        share = np.minimum(waited / (step.num_microbatches * step.vpp), 1.0)
        passes = np.where(step.vpp > 1, share, 1.0) * passes
    one = step.element_bytes * step.tokens * step.model.hidden_size * step.residual_share
    seconds = passes * one / step.links.pipeline_bytes_per_s
    yield "pipeline_inside", np.where(step.links.pipeline_inside, seconds, 0.0)
    yield "pipeline_across", np.where(step.links.pipeline_inside, 0.0, seconds)
    yield "pipeline_latency", passes * step.links.pipeline_latency_s


def optimizer_terms(
    step: StepShape, held: Sequence[SummedParameters]
) -> Iterator[tuple[str, Floats]]:
    """The optimizer on its shard, and a constant, once per step."""
    bandwidth = step.cluster.memory_bandwidth_bytes_per_s
    moved = sum(OPTIMIZER_BYTES * each.count / each.shards for each in held)
    # Of the 38 bytes 16 are read and written of the two moments.
    moved = moved * np.where(step.keeps_bf16_states, 1.0 - 8.0 / OPTIMIZER_BYTES, 1.0)
    on_host = OFFLOADED_PARAMETER_S * sum(each.count / each.shards for each in held)
    yield "optimizer", np.where(step.offloads_optimizer, on_host, moved / bandwidth)
    yield "each_step", np.full(step.tp.shape, EACH_STEP_S)


def block_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """The terms of blocks on the device: those of `layer_terms`, and what their ranks exchange."""
    layers = [*layer_terms(step), *tensor_terms(step)]
    yield from layers
    yield from context_terms(step, dict(layers)["attention"])
    yield from exchange_terms(step)


def other_terms(
    step: StepShape, layer_s: Floats, head_s: Floats, slowest_s: Floats | None = None
) -> Iterator[tuple[str, Floats]]:
    """The terms of a step that are not those of blocks, output, and the host's work on them.

    `layer_s` and `head_s` are the expected seconds of a block and of the output for a micro-batch,
    by the prior. They decide how long stages wait for each other, and how much of a reduction can
    be hidden.
    """
    held = tuple(step.summed_parameters)
    is_fused = step.kernels.fuses_accumulation
    a_gradient = FUSED_ACCUMULATION_BYTES if is_fused else ACCUMULATION_BYTES
    accumulation = a_gradient * sum(each.count for each in held) * step.num_microbatches
    yield "accumulation", accumulation / step.cluster.memory_bandwidth_bytes_per_s
    yield from stage_terms(step, layer_s, head_s, slowest_s)
    # Transfers of offloaded activations run beside the device, as the host does.
    yield "each_microbatch", step.slots * (EACH_MICROBATCH_S + step.offloaded_s)
    stage_s = layer_s * step.model.num_layers / step.pp
    yield from data_terms(step, held, stage_s * step.backward_share * step.slots)
    yield from pipeline_terms(step)
    yield from optimizer_terms(step, held)
