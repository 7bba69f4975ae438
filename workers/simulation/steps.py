"""A whole step of many layouts: pipeline, gradient sums, optimizer, and the slowest of everybody."""

# ruff: noqa: N803, N806 (arrays carry their shape in the name: S stages, R ranks, N layouts)

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape
from tuner.simulation.machine import Machine
from tuner.simulation.network import GroupPlace
from tuner.simulation.passes import LayerTimes, hop_times, stage_times
from tuner.simulation.pipeline import Schedule, Timeline, walk

Floats = NDArray[np.float64]

NUM_BUCKETS: Final = 4
"""Parts of a stage's gradients that are summed one after the other."""

_STEP_OVERHEAD_S: Final = 4e-3
"""What the host does once a step: the data, the loss, the learning rate."""


def step_times_s(layouts: Sequence[Layout], model: ModelShape, machine: Machine) -> Floats:
    """Seconds of a step of each layout, without noise."""
    groups: dict[Schedule, list[int]] = defaultdict(list)
    for index, each in enumerate(layouts):
        schedule = Schedule(pp=each.pp, vpp=each.vpp, num_microbatches=each.num_microbatches)
        groups[schedule].append(index)
    layers = _SharedLayers(model, machine)
    result = np.empty(len(layouts))
    for schedule, members in groups.items():
        result[members] = _of_one_schedule(schedule, [layouts[i] for i in members], layers)
    return result


class _SharedLayers:
    """Times of layers, which many layouts have in common."""

    def __init__(self, model: ModelShape, machine: Machine) -> None:
        self.model, self.machine = model, machine
        self._known: dict[tuple[object, ...], LayerTimes] = {}

    def of(self, layout: Layout) -> LayerTimes:
        key = (
            layout.tp,
            layout.micro_batch_size,
            layout.sequence_parallel,
            layout.recompute,
            layout.precision,
        )
        if key not in self._known:
            self._known[key] = LayerTimes(layout, self.model, self.machine)
        return self._known[key]


def _of_one_schedule(
    schedule: Schedule, layouts: Sequence[Layout], layers: _SharedLayers
) -> Floats:
    machine, pp = layers.machine, schedule.pp
    forward_SN = np.empty((schedule.num_stages, len(layouts)))
    backward_SN, hop_RN = np.empty_like(forward_SN), np.empty((pp, len(layouts)))
    for n, layout in enumerate(layouts):
        times = layers.of(layout)
        slow = np.tile(stage_slowness(layout, machine), schedule.vpp)
        forward, backward = stage_times(times, layout)
        forward_SN[:, n], backward_SN[:, n] = forward * slow, backward * slow
        hop_RN[:, n] = hop_times(times, layout)
    timeline = walk(schedule, forward_SN=forward_SN, backward_SN=backward_SN, hop_RN=hop_RN)
    sums_SN = np.stack([_reduction_times(each, layers) for each in layouts], axis=1)
    reduced_RN = after_reduction(
        timeline,
        sums_SN,
        pp=pp,
        overlaps=machine.overlaps_reduction,
        interference=machine.interference,
    )
    updates_RN = np.stack([_update_times(each, layers) for each in layouts], axis=1)
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


def _reduction_times(layout: Layout, layers: _SharedLayers) -> Floats:
    """Seconds to sum the gradients of each stage, in fp32."""
    gradients = 4.0 * stage_parameters(layout, layers.model)
    network = layers.machine.network
    place = GroupPlace(size=layout.dp, stride=layout.tp)
    sum_s = network.all_reduce_s if layout.zero_stage == 0 else network.share_s
    return np.array(
        [NUM_BUCKETS * sum_s(place, size_bytes / NUM_BUCKETS) for size_bytes in gradients]
    )


def _update_times(layout: Layout, layers: _SharedLayers) -> Floats:
    """Seconds of each rank's optimizer, and with ZeRO of bringing the new weights to all."""
    held = stage_parameters(layout, layers.model).reshape(layout.vpp, layout.pp).sum(axis=0)
    machine = layers.machine
    place = GroupPlace(size=layout.dp, stride=layout.tp)
    times = []
    for parameters in held:
        # Weights, masters, moments and the gradient are read, and all but the gradient written.
        update = machine.device.stream_s(30.0 * parameters / layout.zero_group_size)
        gather = machine.network.share_s(place, 2.0 * parameters) if layout.zero_stage else 0.0
        times.append(update + gather)
    return np.array(times)
