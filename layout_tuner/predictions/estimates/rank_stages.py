"""The layers of each pipeline stage by kind; pipelines that no formula covers.

Of stages that are written out, and of V-shaped schedules, what a rank has and holds is read from
the tables of `search_spaces.layouts`, once for each different pipeline among many layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from layout_tuner.array_types import Bools, Floats, Ints
from layout_tuner.predictions.estimates.distinct_rows import distinct
from layout_tuner.search_spaces.layouts.layout import PIPELINE_SPLITS, SCHEDULES, Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns, different_combinations
from layout_tuner.search_spaces.layouts.schedules import Schedule
from layout_tuner.search_spaces.layouts.timed_schedule import held_layers, timed_schedule
from layout_tuner.search_spaces.models.model_shape import ModelShape

HELD_ROUNDS: Final = 4
"""Micro-batches, in pipeline depths, beyond which a V-shaped schedule holds no more."""

_WEIGHTS_UNITS: Final = 0.8
"""Time of the products of weight gradients over that of a forward pass. An assumption: a forward
pass has as many products, and beside them attention and what is elementwise, which takes about 20 %
of a block of 4,096 features on as many tokens."""

_LAYERS, _IN_FLIGHT, _LATE, _KINDS = range(4)

_PIPELINE_KNOBS: Final = ("pp", "vpp", "schedule", "pipeline_split", "pipeline_layout")


class LayerShapes(NamedTuple):
    """The layers of a model that differ in parameters or in memory."""

    shapes: tuple[ModelShape, ...]
    """Models whose layers are of one kind."""
    codes: tuple[int, ...]
    """The place of each layer's shape."""
    until: tuple[Ints, ...]
    """Layers of each shape but the last among the first 0, 1, ... layers."""


@lru_cache(maxsize=512)
def layer_shapes(model: ModelShape) -> LayerShapes:
    """The shapes of a model's layers in the order in which they first occur.

    A window changes neither parameters nor memory, where it has the heads of other layers.
    """
    has_own_heads = model.window_num_heads or model.window_num_kv_heads
    kinds = [
        kind if has_own_heads else kind.replace("window", "full") for kind in model.kind_of_layers
    ]
    found = tuple(dict.fromkeys(kinds))
    codes = tuple(map(found.index, kinds))
    until = tuple(
        np.cumsum([0, *(code == place for code in codes)]) for place in range(len(found) - 1)
    )
    if model.layer_kinds or has_own_heads:
        shapes = tuple(map(model.of_kind, found))
    else:  # a model states its short forms of layers with experts
        shapes = tuple(model if "experts" in kind else model.dense for kind in found)
    return LayerShapes(shapes, codes, until)


@dataclass(frozen=True, slots=True, eq=False)
class StageLayers:
    """How many layers of each kind some stages have."""

    number: Floats
    shapes: tuple[ModelShape, ...]
    of_shape: tuple[Floats, ...]
    """Layers of each shape but the last one, which the others are of."""
    behind: tuple[Floats, ...] = ()
    """Layers behind the last one of each shape, of a model that has lone sublayers. They are taken
    to be 0 on ranks with several chunks, and where a split is not even."""

    @classmethod
    def of(
        cls,
        columns: LayoutColumns,
        stage: NDArray[Any],
        number: Floats,
        model: ModelShape,
        ranks: RankStages | None,
    ) -> StageLayers:
        """`number` are the layers of each stage, in an even split."""
        if ranks is not None:
            number = np.where(ranks.is_own, ranks.layers(stage), number)
        shapes, codes, until = layer_shapes(model)
        held = []
        for place, before in enumerate(until):
            each = _held(columns, stage, before)
            if ranks is not None:
                each = np.where(ranks.is_own, ranks.of_shape(place, stage), each)
            held.append(each)
        behind: list[Floats] = []
        if any(shape.num_sublayers < 2 for shape in shapes):
            is_even = (columns.vpp == 1) & (ranks is None or ~ranks.is_own)
            _, end = _bounds(columns, stage, model.num_layers)
            for place in range(len(shapes)):
                last = [-1, *(number if code == place else -1 for number, code in enumerate(codes))]
                beyond = end - 1.0 - np.maximum.accumulate(last)[end]
                behind.append(np.where(is_even, beyond, 0.0))
        return cls(number, shapes, tuple(held), tuple(behind))

    def mean(self, of: Callable[[ModelShape], Floats]) -> Floats:
        """The mean of a quantity over the layers."""
        last = mean = of(self.shapes[-1])
        for shape, held in zip(self.shapes, self.of_shape, strict=False):
            mean = mean + held / np.maximum(self.number, 1) * (of(shape) - last)
        return mean

    def largest(self, of: Callable[[ModelShape], Floats], freed: Floats | float = 0.0) -> Floats:
        """The largest of a quantity over the layers; of a stage without one that of the last.

        It is less what layers behind have `freed` each.
        """
        each = [of(shape) for shape in self.shapes]
        if self.behind:
            each = [found - freed * far for found, far in zip(each, self.behind, strict=True)]
        largest = each[-1]
        if not self.of_shape:
            return largest
        largest = np.where(self.has_last, largest, -np.inf)
        for found, held in zip(each, self.of_shape, strict=False):
            largest = np.where(held > 0, np.maximum(found, largest), largest)
        return largest

    @property
    def of_last(self) -> Floats:
        """Layers of the last shape."""
        return self.number - sum(self.of_shape, start=np.zeros(()))

    @property
    def has_last(self) -> Bools:
        return np.asarray(np.maximum(self.number, 1) - self.number + self.of_last > 0)


@dataclass(frozen=True, slots=True, eq=False)
class StageCounts:
    """The layers of each kind on every pipeline rank of some layouts."""

    place: Ints
    """The pipeline of each layout."""
    number: Floats
    """Layers; shape [pipelines, ranks, shapes]."""
    has_output: Bools
    """Whether a rank has the output; shape [pipelines, ranks]."""

    @classmethod
    def of(cls, columns: LayoutColumns, model: ModelShape) -> StageCounts:
        """Those of columns of one axis."""
        place, examples = distinct(columns, _PIPELINE_KNOBS)
        few = columns.rows(examples)
        own, numbers, every = RankStages.of(few, model), [], np.arange(model.num_layers + 1)
        for rank in range(int(few.pp.max())):
            stage = np.full(few.pp.shape, rank)
            each = StageLayers.of(few, stage, _held(few, stage, every), model, own)
            here = np.stack([*each.of_shape, each.of_last], axis=-1)
            numbers.append(np.where((stage < few.pp)[:, None], here, 0.0))
        ranks = np.arange(len(numbers))
        return cls(place, np.stack(numbers, axis=1), ranks == few.last_rank[:, None])

    def slowest_s(self, rows: slice, kinds_s: Sequence[Floats], head_s: Floats) -> Floats:
        """Seconds of the slowest rank of some of the layouts, by those of layers and output."""
        place = self.place[rows].reshape(head_s.shape)
        seconds = head_s[..., None] * self.has_output[place]
        for at, layer_s in enumerate(kinds_s):
            seconds = seconds + self.number[place, :, at] * layer_s[..., None]
        return np.asarray(seconds.max(axis=-1), dtype=np.float64)


def _held(columns: LayoutColumns, stage: NDArray[Any], until: Ints) -> Floats:
    """Layers of a shape on stages of an even split, over all chunks of a rank."""
    held = np.zeros(())
    for chunk in range(int(columns.vpp.max())):
        begin, end = _bounds(columns, stage + chunk * columns.pp, len(until) - 1)
        held = held + np.where(chunk < columns.vpp, until[end] - until[begin], 0)
    return np.asarray(held, dtype=np.float64)


def _bounds(columns: LayoutColumns, part: NDArray[Any], num_layers: int) -> tuple[Ints, Ints]:
    """The first layer of a part of an even split, and the one behind its last."""
    embedding, head = columns.counted_ends
    each, more = np.divmod(num_layers + embedding + head, columns.pp * columns.vpp)
    begin = part * each + np.minimum(part, more) - embedding
    end = begin + each + (part < more)
    return np.clip(begin, 0, num_layers), np.clip(end, 0, num_layers)


@dataclass(frozen=True, slots=True, eq=False)
class RankStages:
    """What the ranks of such pipelines have, and which of many layouts have one."""

    is_own: Bools
    """Where a layout has one; elsewhere the numbers of `at` mean nothing."""
    _place: Ints
    _numbers: Floats
    """By pipeline, kind of number and rank."""

    @classmethod
    def of(cls, columns: LayoutColumns, model: ModelShape) -> RankStages | None:
        """Those of some layouts; None where all are covered by formulas."""
        is_own = ((columns.pipeline_layout != 0) | columns.is_v_shaped) & (columns.pp > 1)
        if not is_own.any():
            return None
        words, text = columns.words("pipeline_layout")
        held = np.minimum(columns.num_microbatches, HELD_ROUNDS * columns.pp)
        knobs = (columns.pp, columns.vpp, columns.schedule, columns.pipeline_split, text, held)
        found, place = different_combinations([np.where(is_own, knob, 0) for knob in knobs])
        codes = layer_shapes(model).codes
        numbers = np.zeros((found.shape[1], _KINDS + max(codes), max(int(found[0].max()), 1)))
        for row, (pp, vpp, schedule, split, word, m) in enumerate(found.T.tolist()):
            if pp:
                layout = Layout(
                    pp=pp,
                    vpp=vpp,
                    schedule=SCHEDULES[schedule],
                    pipeline_split=PIPELINE_SPLITS[split],
                    pipeline_layout=words[word],
                    num_microbatches=m,
                )
                numbers[row, :, :pp] = _numbers_of_ranks(layout, codes)
        return cls(np.broadcast_to(is_own, place.shape), place, numbers)

    def layers(self, rank: NDArray[Any]) -> Floats:
        """Layers on a pipeline rank."""
        return self._at(_LAYERS, rank)

    def of_shape(self, place: int, rank: NDArray[Any]) -> Floats:
        """Layers of a shape of `layer_shapes`, not of the last one, on a pipeline rank."""
        return self._at(_KINDS + place, rank)

    def in_flight(self, rank: NDArray[Any]) -> Floats:
        """Layers times micro-batches whose activations a rank holds at its peak."""
        return self._at(_IN_FLIGHT, rank)

    def late(self, rank: NDArray[Any]) -> Floats:
        """The same of those that only wait for the products of weight gradients."""
        return self._at(_LATE, rank)

    def last_and_most(self, last_rank: NDArray[Any]) -> tuple[Floats, Floats]:
        """Layers on the rank with the output, and on the fullest of the others."""
        ranks = np.arange(self._numbers.shape[2])
        layers = self._numbers[self._place, _LAYERS]
        others = np.where(ranks == np.asarray(last_rank)[..., None], 0.0, layers)
        return self.layers(last_rank), others.max(axis=-1)

    def _at(self, kind: int, rank: NDArray[Any]) -> Floats:
        ranks = np.minimum(rank, self._numbers.shape[2] - 1)
        return np.asarray(self._numbers[self._place, kind, ranks], dtype=np.float64)


@lru_cache(maxsize=4096)
def _numbers_of_ranks(layout: Layout, codes: tuple[int, ...]) -> Floats:
    """Layers, layers in flight and waiting, and layers of each shape but the last, by rank."""
    pp, vpp, m = layout.pp, layout.vpp, layout.num_microbatches
    stages = [layout.layers_of_stage(stage, len(codes)) for stage in range(pp * vpp)]
    layers = tuple(map(len, stages))
    held_codes = [codes[each.start : each.stop] for each in stages]
    ranks = [layout.stages_of_rank(rank) for rank in range(pp)]
    if vpp > 1 and not layout.is_v_shaped:
        m += -m % pp  # the interleaved schedule has whole groups of them
    has_table = vpp == 1 or layout.schedule == "1f1b" or (layout.is_v_shaped and vpp == 2)
    held = held_layers(layers, pp, vpp, m, layout.schedule) if has_table else [(0, 0)] * pp
    return np.array(
        [
            [sum(layers[stage] for stage in rank) for rank in ranks],
            *zip(*held, strict=True),
            *(
                [sum(held_codes[stage].count(place) for stage in rank) for rank in ranks]
                for place in range(max(codes))
            ),
        ],
        dtype=np.float64,
    )


def v_idle_slots(columns: LayoutColumns, forward_passes: Floats) -> Floats:
    """Stage times in which a stage of a V-shaped schedule waits; 0 for other layouts."""
    passes = (
        np.round(4.0 * forward_passes) / 4.0
    )  # few different ones, where some layers repeat theirs
    knobs = (columns.schedule, columns.pp, columns.num_microbatches, 4.0 * passes)
    is_own = columns.is_v_shaped & (columns.pp > 1)
    found, place = different_combinations(
        [np.where(is_own, knob, 0).astype(np.int64) for knob in knobs]
    )
    idle = [
        _v_idle(SCHEDULES[schedule], pp, m, passes / 4.0) if pp else 0.0
        for schedule, pp, m, passes in found.T.tolist()
    ]
    return np.array(idle)[place]


@lru_cache(maxsize=4096)
def _v_idle(schedule: Schedule, pp: int, num_microbatches: int, forward_passes: float) -> float:
    """From the table; that of many micro-batches grows evenly with their number."""
    few, more = 3 * pp, 4 * pp
    if num_microbatches > more:
        at = [_v_idle(schedule, pp, m, forward_passes) for m in (few, more)]
        return at[1] + (at[1] - at[0]) / (more - few) * (num_microbatches - more)
    backward = 1.0 + forward_passes
    timed = timed_schedule(
        pp=pp,
        vpp=2,
        num_microbatches=num_microbatches,
        backward_units=backward,
        schedule=schedule,
        weights_units=_WEIGHTS_UNITS,
    )
    return timed.length / (2.0 * (1.0 + backward)) - num_microbatches
