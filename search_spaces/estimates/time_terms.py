"""The step time taken apart: what every part of a step costs under the cluster's own constants.

Each term is a number of seconds at the peak that the cluster's description promises: operations over the
matrix units' peak, bytes over a bandwidth, counts times a latency. Nothing here is an efficiency; those
are the factors of `search_spaces.estimates.time_factors`, which calibration refines. The step is the
sum of the terms, each times its factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from search_spaces.cluster import Cluster
from search_spaces.columns import LayoutColumns, code_of
from search_spaces.estimates.links import Links
from search_spaces.layout import PRECISIONS
from search_spaces.model_shape import ModelShape

Floats = NDArray[np.float64]

_FP32: Final = code_of("precision", "fp32")
_FULL: Final = code_of("recompute", "full")
_SELECTIVE: Final = code_of("recompute", "selective")

GRADIENT_BYTES: Final = 4.0
"""Gradients are accumulated and reduced in fp32, as Megatron-LM, nanotron and the embedded trainer do."""
OPTIMIZER_BYTES: Final = 38.0
"""Adam reads gradient, master, two moments and writes the last three and the weight: 30 bytes; the
gradients' norm reads them once more, and clearing them writes them."""
ACCUMULATION_BYTES: Final = 10.0
"""Adding a 16-bit gradient to the fp32 sum: read both, write the sum."""
KERNELS_A_LAYER: Final = 60.0
"""Kernels of a block's forward and backward pass in eager PyTorch (about 20 and 40)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepShape:
    """What the terms are computed from: the columns as floats, and what several terms share."""

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
    """Peak of the matrix units in the layout's precision."""
    residual_share: Floats
    """Share of the residual stream that a rank holds: 1 / tp with sequence parallelism, else 1."""
    forward_passes: Floats
    """Forward passes of a block a micro-batch: 2 with full recomputation, else 1."""
    recomputes_attention: Floats
    """1 where the two attention products are run again in the backward pass, else 0."""
    zero_shards: Floats
    """Ranks that share one copy of the optimizer states."""
    is_zero: NDArray[np.bool_]
    """Whether the optimizer states are sharded at all."""
    slots: Floats
    """Stage-times a step on the slowest path: m + (p - 1) / v."""

    @classmethod
    def of(cls, columns: LayoutColumns, model: ModelShape, cluster: Cluster) -> StepShape:
        """The shape of a step of each layout."""
        tp, pp, dp = (np.asarray(c, dtype=np.float64) for c in (columns.tp, columns.pp, columns.dp))
        vpp = np.asarray(columns.vpp, dtype=np.float64)
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
            peak_flops_per_s=np.take(_peaks(cluster), columns.precision),
            residual_share=np.where(columns.sequence_parallel == 1, 1.0 / tp, 1.0),
            forward_passes=np.where(columns.recompute == _FULL, 2.0, 1.0),
            recomputes_attention=np.where(columns.recompute == _SELECTIVE, 1.0, 0.0),
            zero_shards=np.asarray(columns.zero_group_size, dtype=np.float64),
            is_zero=columns.zero_stage == 1,
            slots=microbatches + (pp - 1.0) / vpp,
        )

    @property
    def layer_slots(self) -> Floats:
        """Layer-times a step on the slowest path, were the layers shared out evenly."""
        return self.model.num_layers / self.pp * self.slots

    @property
    def rank_parameters(self) -> Floats:
        """Parameters of the fullest rank: its layers, and the larger of embedding and output."""
        model = self.model
        ends = float(model.num_embedding_parameters + model.num_head_parameters)
        one = float(max(model.num_embedding_parameters, model.num_head_parameters))
        outside = np.where(self.pp > 1, one, ends)
        layers = model.num_layers * float(model.num_layer_parameters) / self.pp
        return np.asarray((layers + outside) / self.tp, dtype=np.float64)


def _peaks(cluster: Cluster) -> Floats:
    """Peak FLOP/s by precision's code; a guess from the memory's bandwidth where nobody states it.

    A processor core does about ten operations a byte of its memory, an accelerator 150 (NVIDIA's data
    sheets: A100 153, at 16 bits).
    """
    stated = cluster.peak_flops_per_s
    a_byte = 150.0 if cluster.memory_bandwidth_bytes_per_s > 3e11 else 10.0
    guess = max(stated.values(), default=a_byte * cluster.memory_bandwidth_bytes_per_s)
    return np.array([stated.get(precision, guess) for precision in PRECISIONS])


def layer_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """What the blocks cost: matrices, attention, small matrices, element-wise work, launches."""
    model, slots = step.model, step.layer_slots
    passes = 2.0 + step.forward_passes
    matrix_flops = 2.0 * model.num_layer_matrix_parameters * step.tokens / step.tp
    attention_flops = 4.0 * model.seq_length * model.hidden_size * step.tokens / step.tp
    seconds_a_flop = 1.0 / step.peak_flops_per_s
    yield "matrices", slots * passes * matrix_flops * seconds_a_flop
    yield (
        "attention",
        slots * (passes + step.recomputes_attention) * attention_flops * seconds_a_flop,
    )
    yield (
        "matrix_bytes",
        slots * passes * _matrix_bytes(step) / step.cluster.memory_bandwidth_bytes_per_s,
    )
    yield (
        "elementwise",
        slots * passes * _elementwise_bytes(step) / step.cluster.memory_bandwidth_bytes_per_s,
    )
    yield "launches", slots * passes * (KERNELS_A_LAYER / 3.0 * step.cluster.kernel_launch_s)


def _matrix_bytes(step: StepShape) -> Floats:
    """Bytes that the matrices of a block move in one pass: weights, inputs and outputs.

    The part of the roofline (Williams et al. 2009) that matters where a rank's matrices are small.
    """
    model = step.model
    h, f, kv = model.hidden_size, model.ffn_hidden_size, model.kv_hidden_size
    ups = 2.0 if model.family == "llama" else 1.0
    whole = 2.0 * h + 2.0 * h
    shared = (h + 2.0 * kv) + h + ups * f + f
    weights = float(model.num_layer_matrix_parameters) / step.tp
    return step.element_bytes * (weights + step.tokens * (whole + shared / step.tp))


def _elementwise_bytes(step: StepShape) -> Floats:
    """Bytes that norms, residual sums, activations and rotations of a block move in one pass.

    Two norms and two residual sums read and write the residual stream (10 elements, shared only with
    sequence parallelism); the activation reads and writes the feed-forward's inside, and position
    and layout changes read and write query, key and value.
    """
    model = step.model
    ups = 2.0 if model.family == "llama" else 1.0
    inside = 2.0 * (ups + 1.0) * model.ffn_hidden_size
    inside += 2.0 * (model.hidden_size + 2.0 * model.kv_hidden_size)
    return (
        step.element_bytes
        * step.tokens
        * (10.0 * model.hidden_size * step.residual_share + inside / step.tp)
    )


def end_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """What the embedding and the output cost, and the stages' being unequal."""
    model = step.model
    head_flops = 3.0 * model.logit_forward_flops_per_token * step.tokens / step.tp
    head = head_flops / step.peak_flops_per_s
    logit_bytes = 24.0 * model.vocab_size * step.tokens / step.tp
    logits = logit_bytes / step.cluster.memory_bandwidth_bytes_per_s
    yield "head", step.slots * head / step.pp
    yield "logits", step.slots * logits / step.pp
    yield "imbalance", _imbalance(step, head)


def _imbalance(step: StepShape, head: Floats) -> Floats:
    """Seconds that the slowest stage takes beyond an even share of the whole, over a step.

    Every stage but the last has ceil(L / p) layers at most; the last has what the others leave and
    the output. 1F1B takes (m - 1) times the slowest stage and once through all of them.
    """
    model = step.model
    layer_flops = (2.0 + step.forward_passes) * model.layer_forward_flops_per_token
    layer = layer_flops * step.tokens / step.tp / step.peak_flops_per_s
    per_stage = model.num_layers / step.pp
    even = per_stage * layer + head / step.pp
    slowest = np.maximum(np.ceil(per_stage) * layer, np.floor(per_stage) * layer + head)
    return np.asarray((step.num_microbatches - 1.0) * (slowest - even), dtype=np.float64)


def tensor_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """Tensor parallelism: two all-reduces a block and pass, or as much with sequence parallelism.

    Megatron-LM (arXiv:1909.08053, section 3; arXiv:2205.05198, section 4.2.2): forward two, backward
    two, and two more where the forward pass is run again. A ring moves 2 (t - 1) / t of the bytes.
    """
    t, tokens = step.tp, step.tokens
    count = 2.0 * (1.0 + step.forward_passes) * step.layer_slots + 2.0 * step.slots / step.pp
    count = np.where(t > 1, count, 0.0)
    one = 2.0 * (t - 1.0) / t * step.element_bytes * tokens * step.model.hidden_size
    seconds = count * one / step.links.tensor_bytes_per_s
    inside = step.links.tensor_inside
    yield "tensor_inside", np.where(inside, seconds, 0.0)
    yield "tensor_across", np.where(inside, 0.0, seconds)
    yield "tensor_latency", count * step.links.tensor_latency_s


def pipeline_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """Point-to-point transfers: a boundary of a chunk each way, and their latency."""
    passes = np.where(step.pp > 1, 2.0 * step.vpp * step.slots, 0.0)
    one = step.element_bytes * step.tokens * step.model.hidden_size * step.residual_share
    yield "pipeline_bytes", passes * one / step.links.pipeline_bytes_per_s
    yield "pipeline_latency", passes * step.links.pipeline_latency_s


def data_terms(step: StepShape, backward_s: Floats) -> Iterator[tuple[str, Floats]]:
    """Data parallelism: the gradients' reduction, hidden and not; ZeRO's gathering of the weights.

    A reduction of M bytes over d ranks moves 2 (d - 1) / d M around a ring; with ZeRO-1 it is a
    reduce-scatter over the shards, half of that, and an all-reduce of the shards over their copies.
    The weights are gathered after the step (arXiv:1910.02054), where nothing is left to hide behind.

    Args:
        step: the step.
        backward_s: the last micro-batch's backward pass, behind which a reduction can hide.
    """
    parameters, z = step.rank_parameters, step.zero_shards
    copies = step.dp / z
    scatter = (z - 1.0) / z + 2.0 * (copies - 1.0) / copies / z
    volume = np.where(step.is_zero, scatter, 2.0 * (step.dp - 1.0) / step.dp)
    reduction = GRADIENT_BYTES * parameters * volume / step.links.data_bytes_per_s
    hidden = np.minimum(reduction, backward_s)
    yield "data_hidden", hidden
    yield "data_exposed", reduction - hidden
    gather = step.element_bytes * parameters * (z - 1.0) / z / step.links.data_bytes_per_s
    yield "weights_gather", np.where(step.is_zero, gather, 0.0)
    yield "data_latency", 2.0 * (step.dp - 1.0) * step.links.data_latency_s


def step_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """What comes once a step or a micro-batch: optimizer, accumulation, constants."""
    bandwidth = step.cluster.memory_bandwidth_bytes_per_s
    parameters = step.rank_parameters
    yield "optimizer", OPTIMIZER_BYTES * parameters / step.zero_shards / bandwidth
    yield "accumulation", ACCUMULATION_BYTES * parameters * step.num_microbatches / bandwidth
    yield "each_microbatch", step.slots * 1e-3
    yield "each_step", np.full(step.tp.shape, 1e-2)


def all_terms(step: StepShape, backward_s: Floats) -> Iterator[tuple[str, Floats]]:
    """Every term of a step."""
    yield from layer_terms(step)
    yield from end_terms(step)
    yield from tensor_terms(step)
    yield from pipeline_terms(step)
    yield from data_terms(step, backward_s)
    yield from step_terms(step)
