"""A whole step: the passes of every stage, their walk, the gradients' reduction, the optimizer.

Replicas and tensor-parallel ranks do the same: of them the slowest are walked. Layouts that share a
schedule are walked together.
"""

# ruff: noqa: N803, N806 (arrays carry their shape in the name: S stages, A axes)

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple, Self

import numpy as np

from layout_tuner.array_types import Floats
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.narrow_formats import NARROW
from layout_tuner.search_spaces.layouts.recomputation import layers_by_rank
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.simulation.blocks import AXES, DP, BlockTimes
from layout_tuner.workers.simulation.knob_effects import NO_EFFECTS, HiddenEffect, HiddenEffects
from layout_tuner.workers.simulation.machine import Machine, element_bytes
from layout_tuner.workers.simulation.placement import Place, Placement
from layout_tuner.workers.simulation.walk import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Schedule,
    Seconds,
    TracedSpan,
    walk,
)

NUM_BUCKETS: Final = 4
"""Parts of a stage's gradients that are summed one after the other."""
_GRADIENT_BYTES: Final = 4.0
_OPTIMIZER_BYTES: Final = 38.0
"""Adam reads and writes master, two moments and weight, reads the gradient twice and clears it."""
_NARROW_MOMENTS_BYTES: Final = 8.0
"""Of these, what moments of 16 bits save."""

PARTS: Final = ("compute_s", "tp_s", "cp_s", "ep_s", "pp_s", "dp_s", "optimizer_s", "unexplained_s")
"""The parts of a step: the fields of `protocol.measurement.Breakdown`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStep:
    """One step, without noise."""

    step_s: float
    parts_s: Mapping[str, float]
    """`PARTS`, each the mean over the ranks; their sum is the step."""


class Held(NamedTuple):
    """Parameters of a rank's stage."""

    others: float
    """Of all but experts."""
    experts: float
    outside: float
    """Of the others, those of embedding and head."""

    def weight_bytes(self, wide: float, inside: float) -> tuple[float, float]:
        """Bytes of the others and of experts, with weights in layers of `inside` bytes each."""
        return inside * self.others + (wide - inside) * self.outside, inside * self.experts


def stage_layers(layout: Layout, model: ModelShape, *, by_work: bool) -> list[range]:
    """The layers of each stage, as they are written out or follow from the split.

    Counted embedding and head are layers of the split. Where the layers do not divide, the first
    stages have one more. By work, a stage is closed by the layer that reaches its share of all
    work, in which the output projection counts (nanotron's `build_model`).
    """
    stages, first = layout.pp * layout.vpp, 0
    if layout.is_written_out:
        return [layout.layers_of_stage(stage, model.num_layers) for stage in range(stages)]
    found: list[range] = []
    if by_work:
        block = model.cost_kinds[0].shape.num_layer_matrix_parameters
        share = (model.num_layers + model.vocab_size * model.hidden_size / block) / stages
        ends = [min(int(share * (s + 1)) + 1, model.num_layers) for s in range(stages - 1)]
        begins = [0, *ends]
        return [range(*each) for each in zip(begins, [*ends, model.num_layers], strict=True)]
    each, more = divmod(layout.counted_layers(model.num_layers), stages)
    ahead, last = layout.counted_ends
    for stage in range(stages):
        count = each + (stage < more) - ahead * (stage == 0) - last * (stage == stages - 1)
        found.append(range(first, first + count))
        first += count
    return found


def layers_by_kind(
    layout: Layout, model: ModelShape, stage: int, layers: range
) -> Counter[tuple[ModelShape, bool]]:
    """How many of a stage's layers there are, by their kind and whether they recompute.

    The last stage has those of multi-token prediction, which recompute as its first layers do.
    """
    numbers = layers_by_rank(layout.recompute_layers) or (len(layers),)
    first = layers.start + numbers[min(stage % layout.pp, len(numbers) - 1)]
    kinds = _kind_of_layers(model)
    found = Counter((kinds[layer], layer < first) for layer in layers)
    if model.num_mtp_layers and stage == layout.pp * layout.vpp - 1:
        for kind in model.mtp_shapes:
            found[kind, first > layers.start] += model.num_mtp_layers
    return found


@lru_cache(maxsize=64)
def _kind_of_layers(model: ModelShape) -> tuple[ModelShape, ...]:
    by_layer = {layer: each.shape for each in model.cost_kinds for layer in each.layers}
    return tuple(by_layer[layer] for layer in range(model.num_layers))


def held_parameters(layout: Layout, model: ModelShape, layers: Sequence[range]) -> list[Held]:
    """Parameters of each stage on one rank."""
    others, mixed = [], []
    for stage, each in enumerate(layers):
        held = routed = 0.0
        counts = Counter[ModelShape]()
        for (kind, _), number in layers_by_kind(layout, model, stage, each).items():
            counts[kind] += number
        for kind, number in counts.items():
            routed += number * (kind.num_expert_parameters / (layout.etp * layout.ep))
            held += number * (
                (kind.num_layer_parameters - kind.num_expert_parameters) / layout.tp_ranks
            )
        others.append(held)
        mixed.append(routed)
    outside = [0.0] * len(layers)
    ends = [(0, model.num_embedding_parameters), (-1, model.num_head_parameters)]
    copies = (model.tied_embeddings or model.num_mtp_layers > 0) and len(layers) > 1
    if copies:
        ends.append((-1, model.vocab_size * model.hidden_size))
    if model.num_mtp_layers:
        ends.append((-1, 2 * model.num_mtp_layers * model.hidden_size**2))
    for stage, parameters in ends:
        others[stage] += parameters / layout.tp_ranks
        outside[stage] += parameters / layout.tp_ranks
    return [Held(*each) for each in zip(others, mixed, outside, strict=True)]


@dataclass(frozen=True, eq=False)
class StagePasses:
    """The passes of every stage of a layout, and what its ranks hold."""

    layout: Layout
    model: ModelShape
    machine: Machine
    blocks: Mapping[ModelShape, BlockTimes]
    """One of each kind of layers; the first is that of most models' layers."""

    @property
    def layers(self) -> list[range]:
        by_work = self.machine.software.splits_by_work
        return stage_layers(self.layout, self.model, by_work=by_work)

    def passes(self, sums: Sequence[_Sum]) -> list[Floats]:
        """Seconds of each kind of pass by stage and axis, before any device is slow."""
        later = self.layout.schedule == "zero_bubble"
        stages = len(self.layers)
        kinds = [np.zeros((stages, len(AXES))) for _ in range(3)]
        counts = [layers_by_kind(self.layout, self.model, *each) for each in enumerate(self.layers)]
        of_kinds = {}
        for shape, again in set().union(*counts):
            block = self.blocks[shape]
            backward = block.backward(weights_later=later, recomputes=again)
            of_kinds[shape, again] = block.forward, backward, block.weights
        for stage, layers in enumerate(self.layers):
            for kind in (FORWARD, BACKWARD, WEIGHTS)[: 2 + later]:
                for which, count in counts[stage].items():
                    kinds[kind][stage] += count * of_kinds[which][kind]
                kinds[kind][stage, DP] += self._sharded_s(
                    kind, max(len(layers), 1), kinds[kind][stage].sum(), sums[stage]
                )
        ends = next(iter(self.blocks.values()))
        depths = self.model.num_mtp_layers
        outputs = (
            (
                part + depths * (part + more)
                for part, more in zip(ends.head, ends.joined, strict=True)
            )
            if depths
            else ends.head
        )
        forward, backward, weights = outputs
        ahead, back = ends.embedding
        kinds[FORWARD][0] += ahead
        kinds[BACKWARD][0] += back
        kinds[FORWARD][-1] += forward
        kinds[BACKWARD][-1] += backward
        kinds[WEIGHTS if later else BACKWARD][-1] += weights
        return kinds

    def _sharded_s(self, kind: int, layers: int, pass_s: float, sums: _Sum) -> float:
        """Seconds by which ZeRO's messages for each layer exceed the compute beside them.

        With ZeRO-3 the weights of a layer are gathered while the one before it computes, forward
        and backward; with ZeRO-2 and 3 its gradients are scattered beside the next one's backward.
        """
        zero = self.layout.zero_stage
        gather_s = sums.gather_s / layers if zero == 3 and kind != WEIGHTS else 0.0
        # Late products complete the gradients.
        last = WEIGHTS if self.layout.schedule == "zero_bubble" else BACKWARD
        scatter_s = sums.scatter_s / layers if zero >= 2 and kind == last else 0.0
        return gather_s + layers * self.machine.beside_s(gather_s + scatter_s, pass_s / layers)

    def hops(self, placement: Placement, sums: Sequence[_Sum]) -> list[float]:
        """Seconds from each pipeline rank to the next; after the last comes the first.

        Where ZeRO's messages leave the node beside every pass, they take half of the cards.
        """
        layout = self.layout
        if layout.pp == 1:
            return [0.0]
        size = next(iter(self.blocks.values())).residual_bytes / (
            layout.tp if layout.sequence_parallel else 1
        )
        shares = layout.zero_stage >= 2 and not sums[0].is_inside
        found = []
        for rank in range(layout.pp):
            senders, levels = placement.senders(rank)
            hop_s = self.machine.collectives.hop_s(senders, levels=levels, size_bytes=size)
            found.append(hop_s * (2 if shares and levels else 1))
        return found

    def sums(self, placement: Placement) -> list[_Sum]:
        """The reductions of each stage."""
        layout = self.layout
        data, edp = placement.place("data"), placement.place("edp")
        others = placement.shards("data", layout.zero_group_size)
        experts = placement.shards("edp", layout.expert_zero_group_size)
        size: float = element_bytes(layout.precision)
        inside = NARROW[layout.precision].gathered_bytes if layout.precision in NARROW else size
        found = []
        for held in held_parameters(layout, self.model, self.layers):
            around, routed = held.weight_bytes(size, inside)
            groups = [(held.others, around, data, *others), (held.experts, routed, edp, *experts)]
            found.append(_Sum.of(self.machine, layout, groups))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sum:
    """What the ranks that hold one stage do with its gradients and weights, in seconds."""

    reduce_s: float
    """After the last backward pass began: with ZeRO-2 and 3 over copies alone."""
    scatter_s: float
    """For each micro-batch with ZeRO-2 and 3."""
    gather_s: float
    """Of all weights: once a step with ZeRO-1 and 2."""
    update_s: float
    """The optimizer on its shard."""
    is_inside: bool

    @classmethod
    def of(
        cls,
        machine: Machine,
        layout: Layout,
        held: Sequence[tuple[float, float, Place, Place, Place]],
    ) -> _Sum:
        """Of parameters, their bytes in a gather, their groups, ZeRO's shards, and copies."""
        collectives, zero = machine.collectives, layout.zero_stage
        reduce_s = scatter_s = gather_s = own = 0.0
        for parameters, gathered_bytes, every, shards, copies in held:
            if not parameters:
                continue
            bucket = _GRADIENT_BYTES * parameters / NUM_BUCKETS
            own += parameters / shards.size
            scattered = NUM_BUCKETS * collectives.scatter_s(shards, bucket)
            copied = NUM_BUCKETS * collectives.reduce_s(copies, bucket / shards.size)
            gather_s += collectives.gather_s(shards, gathered_bytes)
            if zero == 0:
                reduce_s += NUM_BUCKETS * collectives.reduce_s(every, bucket)
            elif zero == 1:
                reduce_s += scattered + copied
            else:
                reduce_s += copied
                scatter_s += scattered
        saved = _NARROW_MOMENTS_BYTES if layout.optimizer_states == "bf16" else 0.0
        return cls(
            reduce_s=reduce_s,
            scatter_s=scatter_s,
            gather_s=gather_s,
            update_s=machine.device.stream_s((_OPTIMIZER_BYTES - saved) * own, 10),
            is_inside=all(place.is_inside for _, _, place, *_ in held),
        )

    def scaled(self, effect: HiddenEffect) -> Self:
        """The same with job knobs."""
        dp = effect.of("dp")
        return replace(
            self,
            reduce_s=dp * self.reduce_s,
            scatter_s=dp * self.scatter_s,
            gather_s=dp * self.gather_s,
            update_s=effect.of("optimizer") * self.update_s,
        )


def steps(
    layouts: Sequence[Layout],
    model: ModelShape,
    machine: Machine,
    *,
    node_slowness: Sequence[float] = (),
    spans: list[TracedSpan] | None = None,
    effects: HiddenEffects = NO_EFFECTS,
) -> list[SimulatedStep]:
    """A step of each layout.

    Args:
        layouts: the layouts.
        model: the model.
        machine: the machine.
        node_slowness: time of each node's slowest device, relative to a usual one; empty: all are
            usual.
        spans: where to note the passes and messages, of one layout.
        effects: what the job knobs of the layouts do.
    """
    groups: dict[Schedule, list[int]] = defaultdict(list)
    for index, layout in enumerate(layouts):
        groups[Schedule.of(layout)].append(index)
    shared: dict[tuple[object, ...], dict[ModelShape, BlockTimes]] = {}
    result: list[SimulatedStep | None] = [None] * len(layouts)
    for schedule, members in groups.items():
        built = [
            _built(layouts[i], model, machine, node_slowness, shared, effects.of(layouts[i]))
            for i in members
        ]
        for index, step in zip(members, _walked(schedule, built, machine, spans), strict=True):
            result[index] = step
    return [step for step in result if step is not None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Built:
    """One layout, ready to be walked."""

    passes: list[Floats]
    hops: list[float]
    sums: list[_Sum]
    zero_stage: int


def _built(
    layout: Layout,
    model: ModelShape,
    machine: Machine,
    node_slowness: Sequence[float],
    shared: dict[tuple[object, ...], dict[ModelShape, BlockTimes]],
    effect: HiddenEffect,
) -> _Built:
    if (host := effect.of("host")) != 1.0:
        machine = replace(
            machine,
            host_s=host * machine.host_s,
            host_collective_s=host * machine.host_collective_s,
        )
    placement = Placement.on(layout, machine.cluster)
    crosses = layout.pp > 1 and any(placement.senders(rank)[1] for rank in range(layout.pp))
    key: tuple[object, ...] = (
        crosses, host, layout.tp, layout.tp_columns, layout.cp, layout.cp_comm_type, layout.ep, layout.etp,
        layout.micro_batch_size, layout.sequence_parallel, layout.recompute, layout.precision,
        layout.schedule, (layout.pp, layout.dp, layout.rank_order) if layout.ep > 1 or placement.units else (),
    )  # fmt: skip
    if key not in shared:
        shapes = [*(each.shape for each in model.cost_kinds), *model.mtp_shapes]
        shared[key] = {shape: BlockTimes(layout, shape, machine, crosses) for shape in shapes}
    stages = StagePasses(layout, model, machine, shared[key])
    sums = stages.sums(placement)
    passes = stages.passes(sums)
    # After the passes, which have what is exposed of ZeRO's messages.
    passes = [kind * np.array([effect.of(axis) for axis in AXES]) for kind in passes]
    sums = [each.scaled(effect) for each in sums]
    if node_slowness:
        slow_S = np.tile(_stage_slowness(placement, node_slowness), layout.vpp)
        passes = [kind * slow_S[:, None] for kind in passes]
    return _Built(
        passes=passes,
        hops=[effect.of("pp") * hop_s for hop_s in stages.hops(placement, sums)],
        sums=sums,
        zero_stage=layout.zero_stage,
    )


def _stage_slowness(placement: Placement, node_slowness: Sequence[float]) -> Floats:
    """How slow each rank of the slowest pipeline is: all pipelines meet in the sum of gradients."""
    slow = np.asarray(node_slowness)[placement.ranks // placement.devices_per_node]
    of_stages: Floats = slow.max(axis=(2, 3, 4))
    slowest: Floats = of_stages[of_stages.max(axis=1).argmax()]
    return slowest


def _walked(
    schedule: Schedule, built: Sequence[_Built], machine: Machine, spans: list[TracedSpan] | None
) -> Iterator[SimulatedStep]:
    pass_s = [
        _columns([each.passes[kind].sum(axis=1) for each in built])
        for kind in (FORWARD, BACKWARD, WEIGHTS)
    ]
    line = walk(schedule, pass_s, _columns([each.hops for each in built]), spans=spans)
    ends, starts, finals = (
        np.atleast_2d(np.array(each, dtype=np.float64).reshape(len(each), -1))
        for each in (line.rank_end_s, line.last_start_s, line.last_end_s)
    )
    for n, each in enumerate(built):
        yield _finished(schedule, each, machine, ends[:, n], (starts[:, n], finals[:, n]))


def _columns(rows: Sequence[Any]) -> list[Seconds]:
    """Numbers of each stage: floats of one layout, arrays of several."""
    if len(rows) == 1:
        return [float(value) for value in rows[0]]
    return list(np.array(rows).T.copy())


def _finished(
    schedule: Schedule,
    built: _Built,
    machine: Machine,
    ends_R: Floats,
    last_S: tuple[Floats, Floats],
) -> SimulatedStep:
    pp, m, software = schedule.pp, schedule.num_microbatches, machine.software
    overlaps = software.overlaps_shards if built.zero_stage == 1 else software.overlaps_reduction
    own_S = np.array([each.reduce_s for each in built.sums])
    if overlaps or built.zero_stage >= 2:
        reduced_R = _after_reduction(own_S, ends_R, last_S, pp, machine.interference)
    else:
        reduced_R = ends_R + own_S.reshape(-1, pp).sum(axis=0)
    update_R, gather_R = (
        np.array(each).reshape(-1, pp).sum(axis=0)
        for each in zip(*((s.update_s, s.gather_s) for s in built.sums), strict=True)
    )
    if built.zero_stage in (0, 3):
        gather_R = np.zeros(pp)
    done_R = reduced_R + update_R + gather_R
    step_s = float(done_R.max()) + software.step_s
    by_axis = m * sum(kind.sum(axis=0) for kind in built.passes) / pp
    parts = dict(zip((f"{axis}_s" for axis in AXES), by_axis.tolist(), strict=True))
    parts["pp_s"] = max(float(ends_R.max() - by_axis.sum()), 0.0) if pp > 1 else 0.0
    parts["dp_s"] += float(max(reduced_R.max() - ends_R.max(), 0.0) + gather_R.mean())
    parts["optimizer_s"] = float(update_R.mean())
    parts["unexplained_s"] = step_s - sum(parts.values())
    return SimulatedStep(step_s=step_s, parts_s={name: parts[name] for name in PARTS})


def _after_reduction(
    own_S: Floats, ends_R: Floats, last_S: tuple[Floats, Floats], pp: int, interference: float
) -> Floats:
    """When each rank has all sums of its gradients.

    A stage's gradients become final evenly over its last pass, and are summed in buckets, one after
    the other, the later stages' first. Meanwhile that pass is held up a little.
    """
    channel_R, beside_R = np.zeros(pp), np.zeros(pp)
    for stage in reversed(range(len(own_S))):
        rank, bucket = stage % pp, own_S[stage] / NUM_BUCKETS
        began, ended = last_S[0][stage], last_S[1][stage]
        for part in range(1, NUM_BUCKETS + 1):
            start = max(channel_R[rank], began + (ended - began) * part / NUM_BUCKETS)
            channel_R[rank] = start + bucket
            beside_R[rank] += max(min(channel_R[rank], ends_R[rank]) - start, 0.0)
    return np.asarray(np.maximum(ends_R, channel_R) + interference * beside_R)
