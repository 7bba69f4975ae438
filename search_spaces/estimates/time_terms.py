"""The terms of a step: the seconds of each part with the cluster's own constants.

A term is operations over the peak of the matrix units, bytes over a bandwidth, or a count times a
latency. Terms have no efficiencies: those are the factors in `search_spaces.estimates.time`, which
calibration refines. The step time is made of the terms, each times its factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from search_spaces.estimates.links import Links
from search_spaces.spec.cluster import Cluster
from search_spaces.spec.layout import PRECISIONS
from search_spaces.spec.layout_columns import LayoutColumns, code_of
from search_spaces.spec.model_shape import ModelShape

Floats = NDArray[np.float64]

_FP32: Final = code_of("precision", "fp32")
_BF16: Final = code_of("precision", "bf16")
_FP8: Final = code_of("precision", "fp8")
_FULL: Final = code_of("recompute", "full")
_SELECTIVE: Final = code_of("recompute", "selective")

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
COLLECTIVE_S: Final = 4e-5
"""Latency of any collective before its first step: about 10 us in NCCL's own model (`baseLat`); the
rest is for ranks that do not arrive at the same time."""
EACH_MICROBATCH_S: Final = 1e-3
"""Host time of a micro-batch outside the blocks (data, loss, schedule), by order of magnitude."""
EACH_STEP_S: Final = 1e-2
"""Time of a step that is equal for all layouts (logging, learning rate), by order of magnitude."""
HOST_OPERATIONS: Final[dict[str, float]] = {"gpt": 100.0, "llama": 140.0}
"""Operations of a block's forward and backward pass in eager PyTorch; a llama block adds rotations
and gates."""
ACHIEVED_SHARES: Final[Mapping[str, float]] = MappingProxyType(
    {"A100": 0.9, "H100": 0.82, "H200": 0.82, "GH200": 0.82, "MI250X": 0.58}
)
"""Share of the peak on the data sheet that large products reach, by a part of the device's name:
A100 280 of 312 and H100 813 of 989 TFLOP/s (arXiv:2502.08145). There MI250X reaches 0.65 with the
best of all transpose modes; 0.58 is for trainers that do not choose them."""
_USUAL_SHARE: Final = 0.8
_HALF_SPEED: Final = 100.0
"""Inner dimension at which a matrix product takes twice the time of its operations: each tile of
the result starts and drains a loop over it."""
HOST_COLLECTIVE: Final = 10.0
"""Host time of a collective, with its waiting and copies, in operations."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepShape:
    """The inputs of the terms: the columns as floats, and quantities that several terms use."""

    model: ModelShape
    cluster: Cluster
    links: Links
    tp: Floats
    pp: Floats
    dp: Floats
    vpp: Floats
    num_microbatches: Floats
    tokens: Floats
    """Tokens of a micro-batch."""
    element_bytes: Floats
    """Bytes of an activation or a weight in a matrix multiplication."""
    peak_flops_per_s: Floats
    """Speed of the fastest matrix products in the layout's precision."""
    wide_flops_per_s: Floats
    """The same of attention and the output projection, which stay in bf16 beside fp8."""
    residual_share: Floats
    """Share of the residual stream that a rank holds: 1 / tp with sequence parallelism, else 1."""
    forward_passes: Floats
    """Forward passes of a block per micro-batch: 2 with full recomputation, else 1."""
    recomputes_attention: Floats
    """1 where the backward pass recomputes the two attention products, else 0."""
    zero_shards: Floats
    """Ranks that share one copy of the optimizer states."""
    is_zero: NDArray[np.bool_]
    """Whether the optimizer states are sharded at all."""
    score_traffic: float
    """Traffic of attention scores, over that of a trainer that may fuse attention or not."""
    slots: Floats
    """Stage times in a step on the slowest path: m + (p - 1) / v."""

    @classmethod
    def of(
        cls,
        columns: LayoutColumns,
        model: ModelShape,
        cluster: Cluster,
        score_traffic: float = 1.0,
    ) -> StepShape:
        """The shape of a step of each layout."""
        tp, pp, dp = (np.asarray(c, dtype=np.float64) for c in (columns.tp, columns.pp, columns.dp))
        vpp = np.asarray(columns.vpp, dtype=np.float64)
        peaks = _peaks(cluster)
        microbatches = np.asarray(columns.num_microbatches, dtype=np.float64)
        return cls(
            model=model,
            cluster=cluster,
            links=Links.of(columns, cluster),
            tp=tp,
            pp=pp,
            dp=dp,
            vpp=vpp,
            num_microbatches=microbatches,
            tokens=np.asarray(columns.micro_batch_size * float(model.seq_length), dtype=np.float64),
            element_bytes=np.where(columns.precision == _FP32, 4.0, 2.0),
            peak_flops_per_s=np.take(peaks, columns.precision),
            wide_flops_per_s=np.take(
                peaks, np.where(columns.precision == _FP8, _BF16, columns.precision)
            ),
            residual_share=np.where(columns.sequence_parallel == 1, 1.0 / tp, 1.0),
            forward_passes=np.where(columns.recompute == _FULL, 2.0, 1.0),
            recomputes_attention=np.where(columns.recompute == _SELECTIVE, 1.0, 0.0),
            zero_shards=np.asarray(columns.zero_group_size, dtype=np.float64),
            is_zero=columns.zero_stage == 1,
            score_traffic=score_traffic,
            slots=microbatches + (pp - 1.0) / vpp,
        )

    @property
    def backward_share(self) -> Floats:
        """Share of the blocks' work in a step that is the last micro-batch's backward pass."""
        passes = 1.0 + self.forward_passes
        return np.asarray(passes / (1.0 + passes) / self.slots, dtype=np.float64)

    @property
    def layer_slots(self) -> Floats:
        """Layer times in a step on the slowest path, for layers that are split evenly."""
        return self.model.num_layers / self.pp * self.slots

    @property
    def rank_parameters(self) -> Floats:
        """Parameters of the fullest rank: its layers, and the larger of embedding and output."""
        model = self.model
        ends = float(model.num_embedding_parameters + model.num_head_parameters)
        one = float(max(model.num_embedding_parameters, model.num_head_parameters))
        outside = np.where(self.pp > 1, one, ends)
        layers = model.num_layers * _of_layers(model, _layer_parameters) / self.pp
        return np.asarray((layers + outside) / self.tp, dtype=np.float64)


def _of_layers(model: ModelShape, of: Callable[[ModelShape], Floats]) -> Floats:
    """The mean of a quantity over the layers: some of a model with experts may be dense."""
    if not model.num_dense_layers:
        return of(model)
    share = model.num_dense_layers / model.num_layers
    return np.asarray((1.0 - share) * of(model) + share * of(model.dense))


def _layer_parameters(model: ModelShape) -> Floats:
    return np.asarray(model.num_layer_parameters, dtype=np.float64)


def _peaks(cluster: Cluster) -> Floats:
    """FLOP/s of the fastest products by the precision's code.

    Where no peak is stated, it is a guess from the memory bandwidth.

    A processor core does about 10 operations per byte of memory bandwidth, an accelerator about 150
    (NVIDIA's data sheets: A100 153, at 16 bits).
    """
    stated = cluster.peak_flops_per_s
    a_byte = 150.0 if cluster.memory_bandwidth_bytes_per_s > 3e11 else 10.0
    guess = max(stated.values(), default=a_byte * cluster.memory_bandwidth_bytes_per_s)
    if cluster.is_measured:
        share = 1.0  # the peak is that of a product already
    else:
        known = (share for part, share in ACHIEVED_SHARES.items() if part in cluster.device)
        share = next(known, _USUAL_SHARE)
    return np.array([share * stated.get(precision, guess) for precision in PRECISIONS])


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
        slots * _of_layers(model, partial(_matrix_operations, step)) / step.peak_flops_per_s,
    )
    yield "attention", slots * attention_passes * attention_flops / step.wide_flops_per_s
    scores = model.num_heads * model.seq_length * step.tokens / step.tp
    score_bytes = step.score_traffic * attention_passes * SCORE_PASSES * step.element_bytes * scores
    yield "attention_bytes", slots * score_bytes / bandwidth
    yield (
        "matrix_bytes",
        slots * passes * _of_layers(model, partial(_matrix_bytes, step)) / bandwidth,
    )
    yield (
        "elementwise",
        slots * passes * _of_layers(model, partial(_elementwise_bytes, step)) / bandwidth,
    )
    yield "kernels", slots * _operations(step) * KERNEL_S


def _matrix_operations(step: StepShape, model: ModelShape) -> Floats:
    """Operations of a block's matrix products for a micro-batch, small inner dimensions weighed up.

    The forward product of [rows, inner] and [inner, columns] is followed by two of the same size:
    the gradient of the input, whose inner dimension is the columns, and that of the weight, whose
    inner dimension is the rows. Each expert has a product of its own, with its share of the rows.
    """
    t, tokens = step.tp, step.tokens
    h, q, kv = float(model.hidden_size), float(model.query_size), model.kv_hidden_size
    ups = 2.0 if model.family == "llama" else 1.0
    products: list[tuple[float, Floats, Any, Any]] = [
        (1.0, tokens, h, (q + 2.0 * kv) / t),
        (1.0, tokens, q / t, h),
    ]
    for count, rows, f in _feed_forwards(step, model):
        products += [(count, rows, h, ups * f / t), (count, rows, f / t, h)]
    total = np.zeros(np.broadcast_shapes(t.shape, tokens.shape))
    for count, rows, inner, columns in products:
        passes = 2.0 + step.forward_passes
        passes = passes + _HALF_SPEED * (step.forward_passes / inner + 1.0 / columns + 1.0 / rows)
        total += count * (2.0 * rows * inner * columns * passes)
    return total


def _feed_forwards(step: StepShape, model: ModelShape) -> Iterator[tuple[float, Floats, float]]:
    """The feed-forwards of a layer: how many are alike, tokens of each, and their width."""
    if not model.num_experts:
        yield 1.0, step.tokens, float(model.ffn_hidden_size)
        return
    experts, taken = float(model.num_experts), model.experts_per_token
    yield experts, step.tokens * taken / experts, float(model.moe_ffn_hidden_size)
    if model.shared_expert_ffn_hidden_size:
        yield 1.0, step.tokens, float(model.shared_expert_ffn_hidden_size)


def _rows_and_width(model: ModelShape) -> tuple[float, float]:
    """Rows of a token in the feed-forwards of a layer, and the sum of these rows' widths."""
    shared = model.shared_expert_ffn_hidden_size
    if not model.num_experts:
        return 1.0, float(model.ffn_hidden_size)
    rows = model.experts_per_token
    return rows + float(shared > 0), float(rows * model.moe_ffn_hidden_size + shared)


def _operations(step: StepShape) -> Floats:
    """Operations of a block for a micro-batch; each is about one kernel on the device."""
    return HOST_OPERATIONS[step.model.family] / 3.0 * (2.0 + step.forward_passes)


def _matrix_bytes(step: StepShape, model: ModelShape) -> Floats:
    """Bytes that the matrices of a block move in one pass: weights, inputs and outputs.

    This bounds the speed where a rank's matrices are small (roofline, Williams et al. 2009).
    """
    rows, f = _rows_and_width(model)
    h, q, kv = model.hidden_size, model.query_size, model.kv_hidden_size
    ups = 2.0 if model.family == "llama" else 1.0
    whole = 2.0 * h + rows * 2.0 * h
    shared = (q + 2.0 * kv) + q + ups * f + f
    weights = float(model.num_layer_matrix_parameters) / step.tp
    return step.element_bytes * (weights + step.tokens * (whole + shared / step.tp))


def _elementwise_bytes(step: StepShape, model: ModelShape) -> Floats:
    """Bytes that norms, residual sums, activations and rotations of a block move in one pass.

    Two norms and two residual sums read and write the residual stream (10 elements, shared only
    with sequence parallelism); the activation reads and writes the feed-forward's inside, and
    position and layout changes read and write query, key and value. Tokens are sorted by expert and
    put in order again, each row read and written.
    """
    ups = 2.0 if model.family == "llama" else 1.0
    inside = 2.0 * (ups + 1.0) * _rows_and_width(model)[1]
    inside += 2.0 * (model.query_size + 2.0 * model.kv_hidden_size)
    residual = 10.0 * model.hidden_size * step.residual_share
    residual = residual + 4.0 * model.experts_per_token * model.hidden_size
    return step.element_bytes * step.tokens * (residual + inside / step.tp)


def head_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """The output on a device, as if it were split over the stages like the layers."""
    bandwidth = step.cluster.memory_bandwidth_bytes_per_s
    logit_bytes = LOGIT_BYTES * step.model.vocab_size * step.tokens / step.tp
    yield "head", step.slots * _head_s(step) / step.pp
    yield "logits", step.slots * logit_bytes / bandwidth / step.pp


def _head_s(step: StepShape) -> Floats:
    flops = 3.0 * step.model.logit_forward_flops_per_token * step.tokens / step.tp
    return flops / step.wide_flops_per_s


def tensor_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """Tensor parallelism: two all-reduces per block and pass; sequence parallelism moves as much.

    Megatron-LM (arXiv:1909.08053, section 3; arXiv:2205.05198, section 4.2.2): forward two,
    backward two, and two more with full recomputation. A ring of t ranks takes 2 (t - 1) steps of
    1/t of the bytes each (Patarasuk and Yuan 2009).
    """
    t = step.tp
    count = _collectives(step)
    one = 2.0 * (t - 1.0) / t * step.element_bytes * step.tokens * step.model.hidden_size
    seconds = count * one / step.links.tensor_bytes_per_s
    inside = step.links.tensor_inside
    yield "tensor_inside", np.where(inside, seconds, 0.0)
    yield "tensor_across", np.where(inside, 0.0, seconds)
    latency = count * (COLLECTIVE_S + 2.0 * (t - 1.0) * step.links.tensor_latency_s)
    yield "latency_inside", np.where(inside, latency, 0.0)
    yield "latency_across", np.where(inside, 0.0, latency)


def _collectives(step: StepShape) -> Floats:
    """All-reduces of a step on the slowest path: of the blocks, the embedding and the output."""
    count = 2.0 * (1.0 + step.forward_passes) * step.layer_slots + 2.0 * step.slots / step.pp
    return np.where(step.tp > 1, count, 0.0)


def host_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """The host, which launches every operation on the device."""
    collectives = HOST_COLLECTIVE * _collectives(step)
    yield "host", step.layer_slots * _operations(step) * step.cluster.host_operation_s
    yield "host_tensor", collectives * step.cluster.host_operation_s
    yield "each_microbatch", step.slots * EACH_MICROBATCH_S


def data_terms(step: StepShape, backward_s: Floats) -> Iterator[tuple[str, Floats]]:
    """Data parallelism: the reduction of the gradients, and ZeRO's gathering of the weights.

    A ring over d ranks moves 2 (d - 1) / d of the gradients in 2 (d - 1) steps, once per training
    step and bucket. With ZeRO-1 (arXiv:1910.02054) it is a reduce-scatter over the shards, half of
    that, and an all-reduce of a shard over its copies; the weights are gathered after the step,
    where no computation hides it.

    Args:
        step: the step.
        backward_s: the last micro-batch's backward pass, behind which a reduction can hide.
    """
    parameters, z, d, links = step.rank_parameters, step.zero_shards, step.dp, step.links
    copies = d / z
    volume = np.where(step.is_zero, (z - 1.0) / z + 2.0 * (copies - 1.0) / d, 2.0 * (d - 1.0) / d)
    hops = np.where(step.is_zero, (z - 1.0) + 2.0 * (copies - 1.0), 2.0 * (d - 1.0))
    buckets = step.model.num_layers / step.pp + 1.0
    bytes_s = GRADIENT_BYTES * parameters * volume / links.data_bytes_per_s
    latency_s = buckets * hops * links.data_latency_s
    hidden = np.minimum(bytes_s + latency_s, backward_s)
    yield "data_inside", np.where(links.data_inside, bytes_s, 0.0)
    yield "data_across", np.where(links.data_inside, 0.0, bytes_s)
    yield "data_congestion", bytes_s * links.data_doublings
    yield "data_latency", latency_s
    yield "data_overlap", np.where(step.is_zero, 0.0, hidden)
    yield "shards_overlap", np.where(step.is_zero, hidden, 0.0)
    gather = step.element_bytes * parameters * (z - 1.0) / z / links.data_bytes_per_s
    yield "weights_gather", np.where(step.is_zero, gather, 0.0)
    yield "gather_latency", np.where(step.is_zero, buckets * (z - 1.0) * links.data_latency_s, 0.0)


def stage_terms(step: StepShape, layer_s: Floats, head_s: Floats) -> Iterator[tuple[str, Floats]]:
    """The cost of unequal stages: for the best split of the layers, and for an equal split.

    1F1B takes (m - 1) times the slowest stage and once the sum of all stages. An equal split gives
    every stage L / p layers and the last stage the output too; the best split gives the last stage
    fewer layers.

    Args:
        step: the step.
        layer_s: expected seconds of a block for a micro-batch, by the prior.
        head_s: expected seconds of the output, by the prior.
    """
    layers, later = float(step.model.num_layers), step.num_microbatches - 1.0
    even = (layers * layer_s + head_s) / step.pp
    fewer = np.floor(np.maximum((even - head_s) / layer_s, 0.0))
    slowest = np.minimum(
        _slowest_stage(step, fewer, layer_s, head_s),
        _slowest_stage(step, np.minimum(fewer + 1.0, layers), layer_s, head_s),
    )
    best = np.where(step.pp > 1, np.maximum(slowest - even, 0.0), 0.0)
    each = np.ceil(layers / step.pp)
    last = np.maximum(layers - each * (step.pp - 1.0), 0.0)
    equal = np.maximum(each * layer_s, last * layer_s + head_s)
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
    yield "optimizer", OPTIMIZER_BYTES * step.rank_parameters / step.zero_shards / bandwidth
    yield "each_step", np.full(step.tp.shape, EACH_STEP_S)


def all_terms(step: StepShape, expected: Mapping[str, float]) -> Iterator[tuple[str, Floats]]:
    """Every term of a step, in the order of `TERM_NAMES`.

    Args:
        step: the step.
        expected: the prior medians of the factors by the terms' names. They decide how long stages
            wait for each other, and how much of a reduction can be hidden.
    """
    blocks = [*layer_terms(step), *tensor_terms(step)]
    ends = list(head_terms(step))
    layer_s = sum(expected[name] * term for name, term in blocks) / step.layer_slots
    head_s = sum(expected[name] * term for name, term in ends) / step.slots * step.pp
    yield from blocks
    yield from ends
    accumulation = ACCUMULATION_BYTES * step.rank_parameters * step.num_microbatches
    yield "accumulation", accumulation / step.cluster.memory_bandwidth_bytes_per_s
    yield from stage_terms(step, layer_s, head_s)
    yield from host_terms(step)
    stage_s = layer_s * step.model.num_layers / step.pp
    yield from data_terms(step, stage_s * step.backward_share * step.slots)
    yield from pipeline_terms(step)
    yield from optimizer_terms(step)
