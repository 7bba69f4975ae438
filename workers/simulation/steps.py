"""Step times of many layouts: their passes, pipeline, gradient reduction and optimizer.

The time of a pass follows from its kernels and messages. The slowest device sets the pace.
"""

# ruff: noqa: N803, N806 (arrays carry their shape in the name: S stages, R ranks, N layouts)

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from search_spaces.arrays import Floats
from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape
from workers.simulation.machine import GroupPlace, Machine, element_bytes
from workers.simulation.pipeline import Schedule, Timeline, walk

NUM_BUCKETS: Final = 4
"""Parts of a stage's gradients that are summed one after the other."""

_STEP_OVERHEAD_S: Final = 4e-3
"""What the host does once a step: the data, the loss, the learning rate."""


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one transformer block on one rank, for one micro-batch.

    What a rank computes depends on the layout's tp, micro-batch, sequence parallelism,
    recomputation and precision alone, so that layouts which agree in these may share it.
    """

    layout: Layout
    model: ModelShape
    machine: Machine

    @property
    def _tokens(self) -> int:
        return self.model.seq_length * self.layout.micro_batch_size

    @property
    def _is_cut(self) -> bool:
        return self.layout.sequence_parallel and self.layout.tp > 1

    @cached_property
    def _products(self) -> list[tuple[int, int]]:
        """Output and input features of each product of the block, on one rank."""
        m, t = self.model, self.layout.tp
        gates = 2 if m.family == "llama" else 1
        return [
            ((m.hidden_size + 2 * m.kv_hidden_size) // t, m.hidden_size),
            (m.hidden_size, m.hidden_size // t),
            (gates * m.ffn_hidden_size // t, m.hidden_size),
            (m.hidden_size, m.ffn_hidden_size // t),
        ]

    @cached_property
    def forward_s(self) -> float:
        own = sum(self._matmul_s(self._tokens, out, inner) for out, inner in self._products)
        return own + self._attention_s + self._elementwise_s + 2 * self._exchange_s

    @cached_property
    def backward_s(self) -> float:
        """The backward pass with recomputation.

        Gradients of weights run beside the sum of the input's gradients, which hides where it is
        the shorter one.
        """
        to_inputs = sum(self._matmul_s(self._tokens, inner, out) for out, inner in self._products)
        to_weights = sum(self._matmul_s(out, inner, self._tokens) for out, inner in self._products)
        interfered = self.machine.interference * min(to_weights, 2 * self._exchange_s)
        exposed = max(to_weights, 2 * self._exchange_s) + interfered
        gathered_again = self._gather_s if self._is_cut else 0.0
        own = to_inputs + exposed + 2.4 * self._attention_s + 2 * self._elementwise_s
        return own + 2 * gathered_again + self._recomputed_s

    @property
    def _recomputed_s(self) -> float:
        if self.layout.recompute == "full":
            return self.forward_s
        return self._attention_s if self.layout.recompute == "selective" else 0.0

    def _matmul_s(self, rows: int, columns: int, inner: int) -> float:
        return self.machine.device.matmul_s(rows, columns, inner, precision=self.layout.precision)

    @cached_property
    def _attention_s(self) -> float:
        m, layout = self.model, self.layout
        return self.machine.device.attention_s(
            layout.micro_batch_size,
            m.seq_length,
            max(m.num_heads // layout.tp, 1),
            m.head_size,
            precision=layout.precision,
        )

    @cached_property
    def _elementwise_s(self) -> float:
        """Two norms and two sums over the residual stream, and the feed-forward's activation."""
        stream_s = self.machine.device.stream_s
        size = element_bytes(self.layout.precision)
        here = self._tokens // self.layout.tp if self._is_cut else self._tokens
        residual = stream_s(size * 2.5 * here * self.model.hidden_size)
        gates = 3 if self.model.family == "llama" else 2
        activation = stream_s(
            size * gates * self._tokens * self.model.ffn_hidden_size / self.layout.tp
        )
        return 4 * residual + activation

    @cached_property
    def _exchange_s(self) -> float:
        """Communication after half a block: all-reduce, or reduce-scatter and all-gather."""
        if self._is_cut:
            return 2 * self._gather_s
        return self.machine.network.all_reduce_s(self._tp_place, self.activation_bytes)

    @cached_property
    def _gather_s(self) -> float:
        return self.machine.network.share_s(self._tp_place, self.activation_bytes)

    @property
    def _tp_place(self) -> GroupPlace:
        return GroupPlace(size=self.layout.tp, stride=1)

    @property
    def activation_bytes(self) -> float:
        """The residual stream of a whole micro-batch."""
        size = element_bytes(self.layout.precision)
        return float(size * self._tokens * self.model.hidden_size)

    @cached_property
    def head_s(self) -> tuple[float, float]:
        """The output projection and the loss, forward and backward."""
        columns, inner = self.model.vocab_size // self.layout.tp, self.model.hidden_size
        logits_bytes = 4.0 * self._tokens * columns
        loss_s = self.machine.device.stream_s(3 * logits_bytes)
        forward = self._matmul_s(self._tokens, columns, inner)
        backward = self._matmul_s(self._tokens, inner, columns)
        backward += self._matmul_s(columns, inner, self._tokens)
        return forward + loss_s, backward + loss_s

    @cached_property
    def embedding_s(self) -> tuple[float, float]:
        """The look-up of the tokens, forward and backward."""
        moved = self.machine.device.stream_s(2 * self.activation_bytes)
        return moved + self._exchange_s, 2 * moved


def stage_times(times: LayerTimes, layout: Layout) -> tuple[Floats, Floats]:
    """Seconds of a forward and of a backward pass of each stage, before any device is slow."""
    stages = layout.pp * layout.vpp
    layers = times.model.num_layers / stages
    forward = np.full(stages, layers * times.forward_s)
    backward = np.full(stages, layers * times.backward_s)
    for stage, (ahead, back) in ((0, times.embedding_s), (-1, times.head_s)):
        forward[stage] += ahead
        backward[stage] += back
    return forward, backward


def hop_times(times: LayerTimes, layout: Layout) -> Floats:
    """Seconds from each pipeline rank to the next; after the last rank comes the first."""
    shares = layout.tp if layout.sequence_parallel else 1
    together = layout.tp * layout.dp
    hops = [
        times.machine.network.hop_s(
            rank * together,
            (rank + 1) % layout.pp * together,
            together,
            times.activation_bytes / shares,
        )
        for rank in range(layout.pp)
    ]
    return np.array(hops) if layout.pp > 1 else np.zeros(1)


def step_times_s(layouts: Sequence[Layout], model: ModelShape, machine: Machine) -> Floats:
    """Seconds of a step of each layout, without noise."""
    groups: dict[Schedule, list[int]] = defaultdict(list)
    for index, each in enumerate(layouts):
        schedule = Schedule(pp=each.pp, vpp=each.vpp, num_microbatches=each.num_microbatches)
        groups[schedule].append(index)
    shared: dict[tuple[object, ...], LayerTimes] = {}
    layers = []
    for each in layouts:
        same = (each.tp, each.micro_batch_size, each.sequence_parallel, each.recompute)
        times = LayerTimes(each, model, machine)
        layers.append(shared.setdefault((*same, each.precision), times))
    result = np.empty(len(layouts))
    for schedule, members in groups.items():
        result[members] = _of_one_schedule(
            schedule, [layouts[i] for i in members], [layers[i] for i in members]
        )
    return result


def _of_one_schedule(
    schedule: Schedule, layouts: Sequence[Layout], layers: Sequence[LayerTimes]
) -> Floats:
    model, machine, pp = layers[0].model, layers[0].machine, schedule.pp
    forward_SN = np.empty((schedule.num_stages, len(layouts)))
    backward_SN, hop_RN = np.empty_like(forward_SN), np.empty((pp, len(layouts)))
    for n, (layout, times) in enumerate(zip(layouts, layers, strict=True)):
        slow = np.tile(stage_slowness(layout, machine), schedule.vpp)
        forward, backward = stage_times(times, layout)
        forward_SN[:, n], backward_SN[:, n] = forward * slow, backward * slow
        hop_RN[:, n] = hop_times(times, layout)
    timeline = walk(schedule, forward_SN=forward_SN, backward_SN=backward_SN, hop_RN=hop_RN)
    sums_SN = np.stack([_reduction_times(each, model, machine) for each in layouts], axis=1)
    reduced_RN = after_reduction(
        timeline,
        sums_SN,
        pp=pp,
        overlaps=machine.overlaps_reduction,
        interference=machine.interference,
    )
    updates_RN = np.stack([_update_times(each, model, machine) for each in layouts], axis=1)
    return np.asarray((reduced_RN + updates_RN).max(axis=0) + _STEP_OVERHEAD_S)


def stage_slowness(layout: Layout, machine: Machine) -> Floats:
    """How slow each rank of the slowest pipeline is: tensor-parallel ranks wait for each other.

    All pipelines meet in the sum of the gradients. The one that holds the slowest device of all is
    taken for the slowest one.
    """
    devices = machine.slowness[: layout.num_devices].reshape(layout.pp, layout.dp, layout.tp)
    of_stages: Floats = devices.max(axis=2)
    slowest: Floats = of_stages[:, of_stages.max(axis=0).argmax()]
    return slowest


def after_reduction(
    timeline: Timeline, sums_SN: Floats, *, pp: int, overlaps: bool, interference: float
) -> Floats:
    """When each rank has all sums of its gradients, of shape (R, N).

    A stage's gradients become final evenly over its last backward pass, and are summed in buckets,
    one after the other, the later stages' first. Meanwhile that pass is held up a little.
    """
    if not overlaps:
        own_RN = sums_SN.reshape(-1, pp, sums_SN.shape[1]).sum(axis=0)
        return np.asarray(timeline.rank_end_s + own_RN)
    channel_RN = np.zeros_like(timeline.rank_end_s)
    beside_RN = np.zeros_like(channel_RN)
    for stage in reversed(range(len(sums_SN))):
        rank = stage % pp
        began, ended = timeline.last_backward_start_s[stage], timeline.last_backward_end_s[stage]
        bucket = sums_SN[stage] / NUM_BUCKETS
        for part in range(1, NUM_BUCKETS + 1):
            ready = began + (ended - began) * part / NUM_BUCKETS
            start = np.maximum(channel_RN[rank], ready)
            channel_RN[rank] = start + bucket
            computing = np.minimum(channel_RN[rank], timeline.rank_end_s[rank]) - start
            beside_RN[rank] += np.maximum(computing, 0)
    held_up = timeline.rank_end_s + interference * beside_RN
    return np.asarray(np.maximum(held_up, channel_RN + interference * beside_RN))


def stage_parameters(layout: Layout, model: ModelShape) -> Floats:
    """Parameters of each stage on one rank."""
    stages = layout.pp * layout.vpp
    held = np.full(stages, model.num_layers / stages * model.num_layer_parameters / layout.tp)
    embedding = model.vocab_size * model.hidden_size / layout.tp
    held[0] += embedding
    if stages > 1 or not model.tied_embeddings:
        held[-1] += embedding
    return held


def _reduction_times(layout: Layout, model: ModelShape, machine: Machine) -> Floats:
    """Seconds to sum the gradients of each stage, in fp32."""
    gradients = 4.0 * stage_parameters(layout, model)
    network = machine.network
    place = GroupPlace(size=layout.dp, stride=layout.tp)
    sum_s = network.all_reduce_s if layout.zero_stage == 0 else network.share_s
    return np.array(
        [NUM_BUCKETS * sum_s(place, size_bytes / NUM_BUCKETS) for size_bytes in gradients]
    )


def _update_times(layout: Layout, model: ModelShape, machine: Machine) -> Floats:
    """Seconds of each rank's optimizer, and with ZeRO of bringing the new weights to all."""
    held = stage_parameters(layout, model).reshape(layout.vpp, layout.pp).sum(axis=0)
    place = GroupPlace(size=layout.dp, stride=layout.tp)
    times = []
    for parameters in held:
        # Weights, masters, moments and the gradient are read, and all but the gradient written.
        update = machine.device.stream_s(30.0 * parameters / layout.zero_group_size)
        gather = machine.network.share_s(place, 2.0 * parameters) if layout.zero_stage else 0.0
        times.append(update + gather)
    return np.array(times)
