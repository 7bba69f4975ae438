"""Flat buffers: one tensor holds every weight of a rank, another every gradient.

Parameters lie in reverse order, so that the gradients that a backward pass finishes first come
first. They start at multiples of 64 elements. The buffers are divided into buckets, and dp divides
every bucket evenly; experts, of which fewer ranks hold the same, have buckets of their own.

ZeRO-2 keeps only this rank's shares of the buckets of gradients, one after the other, and ZeRO-3 of
the weights too. A bucket is then a layer; the whole weights and gradients of two layers at a time
are in a `Window`.

`rectangles` maps a span of the buffers back to the logical parameters: of a matrix, a span covers
up to three rectangles.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from layout_tuner.workers.trainer.comm.mesh import Mesh
from layout_tuner.workers.trainer.model.model import RankModel
from layout_tuner.workers.trainer.model.parameters import (
    ModelParameter,
    ParameterPart,
    initialise,
    local_parts,
)

ALIGNMENT: Final = 64
"""Elements that parameters and shards are aligned to: kernels process whole vectors, so the
arithmetic of a shard has no remainder loop."""

BUCKET_ELEMENTS: Final = 4 << 20
"""A bucket is closed once it holds this many elements, unless the job's option says another number:
16 MiB of gradients."""

MAX_BUCKETS: Final = 64
"""About the largest number of buckets, of a large model: more kernels and messages would cost more
than their overlap saves."""


class Span(NamedTuple):
    """A range of elements of the flat buffers."""

    start: int
    end: int

    def share(self, parts: int, index: int) -> Span:
        """One of `parts` equal parts."""
        size = (self.end - self.start) // parts
        return Span(self.start + index * size, self.start + (index + 1) * size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Where a parameter lies in the flat buffers."""

    parameter: ModelParameter
    shape: torch.Size
    uses: int
    """Gradients that a micro-batch adds to it: the number of layers that hold it."""
    bucket: int
    """The bucket that contains it."""
    start: int
    end: int

    def expect_gradients(self, num_microbatches: int) -> None:
        """The first gradient overwrites what is there, and the last of these is final."""
        self.parameter.main_grad_is_stale = True
        self.parameter.gradients_left = self.uses * num_microbatches

    def overlaps(self, spans: Iterable[Span]) -> Iterator[tuple[int, int]]:
        """Start and end of each part of the parameter that lies in these spans."""
        for span in spans:
            first, last = max(span.start, self.start), min(span.end, self.end)
            if first < last:
                yield first, last


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatPlan:
    """Positions of parameters and buckets; made before any memory is allocated."""

    offsets: tuple[int, ...]
    """Start of each parameter, in reverse order."""
    buckets: tuple[Span, ...]
    """Spans whose gradients are reduced together."""
    of_experts: tuple[bool, ...]
    """Whether the bucket's parameters are those of experts that other ranks hold than the rest."""
    shared_bucket: int | None = None
    """The bucket of the parameter that another stage holds, too. It holds no other parameter."""
    layers: tuple[tuple[int, ...], ...] = ()
    """Sharded buckets of each layer, in forward order, if a bucket holds no more than a layer."""

    @property
    def num_elements(self) -> int:
        """Length of each buffer, padding included."""
        return self.buckets[-1].end

    @property
    def window_elements(self) -> int:
        """Elements of the two largest layers in succession."""
        return self._largest_pair(without=None)

    @property
    def open_elements(self) -> int:
        """Elements of whole gradients that a rank holds of sharded ones.

        Those of a bucket that is used twice are there from its first use to its last.
        """
        return self._largest_pair(without=self.used_twice) + self.reserved_elements

    @property
    def reserved_elements(self) -> int:
        """Of these, the bucket's that is used twice."""
        return 0 if self.used_twice is None else self.size(self.used_twice)

    @property
    def used_twice(self) -> int | None:
        """The bucket of a tied embedding on a rank that has both of its layers."""
        is_twice = sum(self.shared_bucket in layer for layer in self.layers) > 1
        return self.shared_bucket if is_twice else None

    def size(self, *buckets: int) -> int:
        """Elements of these buckets."""
        return sum(self.buckets[index].end - self.buckets[index].start for index in buckets)

    def _largest_pair(self, *, without: int | None) -> int:
        sizes = [self.size(*(i for i in layer if i != without)) for layer in self.layers]
        return max((a + b for a, b in pairwise(sizes)), default=sum(sizes))

    def bucket_of(self, position: int) -> int:
        return bisect_right([bucket.end for bucket in self.buckets], position)


def plan_flat(
    sizes: list[int],
    *,
    dp: int,
    edp: int = 1,
    shared: int | None = None,
    bucket_elements: int | None = None,
    layers: Sequence[int] | None = None,
    experts: Collection[int] = (),
) -> FlatPlan:
    """Plans the flat buffers for parameters of these sizes, which are already in reverse order.

    `shared` is the index of the parameter that two stages hold. It gets a bucket of its own: the
    bucket has the same shares on both stages, so that they can sum it share by share. With the
    number of each parameter's layer, `layers`, every layer is a bucket. The parameters with the
    indices `experts` have buckets of their own, which edp divides evenly.
    """
    if bucket_elements is None:
        bucket_elements = max(BUCKET_ELEMENTS, sum(sizes) // MAX_BUCKETS)
    offsets, buckets, of_experts = [0] * len(sizes), list[Span](), list[bool]()
    shared_bucket = None
    for members in _members(sizes, shared, bucket_elements, layers, experts):
        start = end = buckets[-1].end if buckets else 0
        for index in members:
            offsets[index] = end
            end = _round_up(end + sizes[index], ALIGNMENT)
        if members == [shared]:
            shared_bucket = len(buckets)
        of_experts.append(members[0] in experts)
        divisor = ALIGNMENT * (edp if of_experts[-1] else dp)
        buckets.append(Span(start, start + _round_up(end - start, divisor)))
    return FlatPlan(
        offsets=tuple(offsets),
        buckets=tuple(buckets),
        of_experts=tuple(of_experts),
        shared_bucket=shared_bucket,
    )


def _members(
    sizes: list[int],
    shared: int | None,
    bucket_elements: int,
    layers: Sequence[int] | None,
    experts: Collection[int],
) -> Iterator[list[int]]:
    """The parameters of each bucket, in the order in which the buckets are full.

    One bucket of experts and one of other parameters are filled at the same time.
    """
    filling: dict[bool, list[int]] = {False: [], True: []}
    for index in range(len(sizes)):
        members = filling[index in experts]
        starts_layer = layers is not None and members and layers[members[-1]] != layers[index]
        if members and (starts_layer or shared in (index, members[-1])):
            yield members.copy()
            members.clear()
        members.append(index)
        size = sum(_round_up(sizes[member], ALIGNMENT) for member in members)
        if layers is None and size >= bucket_elements:
            yield members.copy()
            members.clear()
    yield from (members for members in filling.values() if members)


class Window:
    """Memory of the whole tensors of two layers at a time: one at its start, one at its end.

    Behind them, `reserved` elements are for a bucket that is there longer.
    """

    def __init__(self, memory: Tensor, *, reserved: int = 0) -> None:
        self.memory = memory
        self.end = len(memory) - reserved
        self._taken: list[tuple[int, int]] = []

    def fits(self, size: int) -> bool:
        """Whether so many elements are free in one piece."""
        used = sum(end - start for start, end in self._taken)
        return len(self._taken) < 2 and used + size <= self.end

    def take(self, size: int) -> Span:
        """Lends so many elements, which must be free."""
        assert self.fits(size), "two layers are in the window"
        at_start = all(start > 0 for start, _ in self._taken)
        start = 0 if at_start else self.end - size
        self._taken.append((start, start + size))
        return Span(start, start + size)

    def give_back(self, span: Span) -> None:
        """Ends a loan."""
        self._taken.remove((span.start, span.end))


class _Kept:
    """What a rank keeps of all buckets: of each the whole, or its own share."""

    def __init__(self, plan: FlatPlan, spans: Sequence[Span]) -> None:
        """For the span of each bucket that is kept."""
        sizes = [span.end - span.start for span in spans]
        self.num_elements = sum(sizes)
        starts = accumulate(sizes, initial=0)
        self._plan = plan
        self._shifts = [start - span.start for start, span in zip(starts, spans, strict=False)]

    def part(self, memory: Tensor, span: Span) -> Tensor:
        """The part of the kept elements that a span within a bucket consists of."""
        shift = self._shifts[self._plan.bucket_of(span.start)]
        return memory[span.start + shift : span.end + shift]


class FlatBuffers:
    """The weights and gradients of one rank; every parameter of the model is a view of them.

    Where they are sharded, parameters are views of the windows, while a layer is in use.
    """

    def __init__(
        self, model: RankModel, mesh: Mesh, *, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        """Allocates memory for the model's declared parameters, and initialises them."""
        self.plan = plan = plan_model(model, mesh)
        self.copies = [mesh.copies_of(experts=of_experts) for of_experts in plan.of_experts]
        """The ranks that hold each bucket."""
        self.owned = [
            bucket.share(copies.num_shards, copies.shard_rank)
            for bucket, copies in zip(plan.buckets, self.copies, strict=True)
        ]
        """The part of each bucket that this rank updates; without ZeRO, all of it."""
        self._kept_weights, self._kept_gradients = kept_of(plan, mesh)
        self.weights = torch.zeros(self._kept_weights.num_elements, dtype=dtype, device=device)
        self.gradients = torch.zeros(self._kept_gradients.num_elements, device=device)
        self.weight_window = self.gradient_window = None
        if mesh.shards_weights:
            memory = torch.zeros(plan.window_elements, dtype=dtype, device=device)
            self.weight_window = Window(memory)
        if mesh.shards_gradients:
            lane = mesh.copies.shard_group.lane if mesh.copies.shard_group else None
            if lane is None:
                memory = torch.zeros(plan.open_elements, device=device)
            else:
                memory = lane.window(plan.open_elements, torch.float32)
            self.gradient_window = Window(memory, reserved=plan.reserved_elements)
        uses = Counter(id(old) for _, _, old in _owned_parameters(model))
        made: dict[ModelParameter, ModelParameter] = {}
        self.slots: list[Slot] = []
        for old, start in zip(_declared_parameters(model)[::-1], plan.offsets, strict=True):
            slot = self._filled_slot(old, start, uses=uses[id(old)], seed=seed)
            self.slots.append(slot)
            made[old] = slot.parameter
        for module, name, old in list(_owned_parameters(model)):
            setattr(module, name, made[old])

    def _filled_slot(self, old: ModelParameter, start: int, *, uses: int, seed: int) -> Slot:
        """Gives a declared parameter its memory, and its initial values."""
        end, bucket = start + old.numel(), self.plan.bucket_of(start)
        copies, span = self.copies[bucket], Span(start, end)
        if copies.shards_weights:
            assert self.weight_window is not None
            whole = self.weight_window.memory[: end - start]
        else:
            whole = self.own_weights(span)
        parameter = ModelParameter(whole.view(old.shape))
        parameter.parts, parameter.cut = old.parts, old.cut
        parameter.counted, parameter.of_experts = old.counted, old.of_experts
        if not copies.shards_gradients:
            parameter.main_grad = self.own_gradients(span).view(old.shape)
        with torch.no_grad():
            for part, value in local_parts(old, parameter):
                initialise(value, part, seed=seed, cut=old.cut)
        slot = Slot(
            parameter=parameter, shape=old.shape, uses=uses, bucket=bucket, start=start, end=end
        )
        if copies.shards_weights:
            for first, last in slot.overlaps(self.owned):
                self.own_weights(Span(first, last)).copy_(whole[first - start : last - start])
        return slot

    def own_weights(self, span: Span) -> Tensor:
        """The weights of a part of a bucket that this rank keeps."""
        return self._kept_weights.part(self.weights, span)

    def own_gradients(self, span: Span) -> Tensor:
        """The gradients of a part of a bucket that this rank keeps."""
        return self._kept_gradients.part(self.gradients, span)

    def expect_gradients(self, num_microbatches: int) -> None:
        """Begins a step: each parameter's first gradient overwrites that of the previous step."""
        for slot in self.slots:
            slot.expect_gradients(num_microbatches)

    @property
    def has_all_gradients(self) -> bool:
        """Whether every parameter got exactly the expected number of gradients in this step."""
        return all(slot.parameter.gradients_left == 0 for slot in self.slots)


def plan_model(model: RankModel, mesh: Mesh) -> FlatPlan:
    """Plans the flat buffers of the model's declared parameters."""
    declared, shared = _declared_parameters(model)[::-1], model.tied_weight
    index = next((i for i, parameter in enumerate(declared) if parameter is shared), None)
    sizes = [parameter.numel() for parameter in declared]
    experts = [] if mesh.expert_copies is mesh.copies else declared
    apart = {i for i, parameter in enumerate(experts) if parameter.of_experts}
    plan_with = partial(
        plan_flat,
        sizes,
        dp=mesh.copies.size,
        edp=mesh.expert_copies.size,
        shared=index,
        experts=apart,
        bucket_elements=mesh.options.bucket_elements,
    )
    if not mesh.shards_gradients:
        return plan_with()
    layers = [
        [id(parameter) for module in layer for parameter in module.parameters()]
        for layer in model.layers
    ]
    of = {key: number for number, keys in reversed(list(enumerate(layers))) for key in keys}
    plan = plan_with(layers=[of[id(parameter)] for parameter in declared])
    places = zip(declared, plan.offsets, strict=True)
    bucket_of = {id(parameter): plan.bucket_of(start) for parameter, start in places}
    is_sharded = [mesh.copies_of(experts=each).shards_gradients for each in plan.of_experts]
    held = ({bucket_of[key] for key in keys} for keys in layers)
    return replace(
        plan, layers=tuple(tuple(sorted(each for each in of if is_sharded[each])) for of in held)
    )


def kept_of(plan: FlatPlan, mesh: Mesh) -> tuple[_Kept, _Kept]:
    """What this rank keeps of weights and of gradients."""
    weights, gradients = list[Span](), list[Span]()
    for bucket, of_experts in zip(plan.buckets, plan.of_experts, strict=True):
        copies = mesh.copies_of(experts=of_experts)
        own = bucket.share(copies.num_shards, copies.shard_rank)
        weights.append(own if copies.shards_weights else bucket)
        gradients.append(own if copies.shards_gradients else bucket)
    return _Kept(plan, weights), _Kept(plan, gradients)


def _declared_parameters(model: nn.Module) -> list[ModelParameter]:
    """Each parameter once, in forward order."""
    declared = list(model.parameters())
    assert all(isinstance(parameter, ModelParameter) for parameter in declared)
    return declared  # type: ignore[return-value]


def _owned_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, ModelParameter]]:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            assert isinstance(parameter, ModelParameter)
            yield module, name, parameter


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class Rectangle:
    """A box of a logical parameter whose elements are contiguous in the flat buffers."""

    part: ParameterPart
    """The logical parameter."""
    parameter: ModelParameter
    """The rank's parameter that contains the box."""
    offsets: tuple[int, ...]
    """First index of the box in each dim of the logical parameter."""
    sizes: tuple[int, ...]
    """Length of the box in each dim."""
    start: int
    """First element in the flat buffers."""

    @property
    def end(self) -> int:
        """End in the flat buffers."""
        return self.start + prod(self.sizes)


def rectangles(slots: Iterable[Slot], span: Span) -> Iterator[Rectangle]:
    """The boxes that a span of the flat buffers consists of, without its padding."""
    for slot in slots:
        part_start = slot.start
        for part in slot.parameter.parts:
            shape = part.local_shape(slot.parameter.cut)
            part_end = part_start + prod(shape)
            first, last = max(span.start, part_start), min(span.end, part_end)
            if first < last:
                corner = part.offsets(slot.parameter.cut)
                for offsets, sizes in _boxes(shape, first - part_start, last - part_start):
                    yield Rectangle(
                        part=part,
                        parameter=slot.parameter,
                        offsets=tuple(map(sum, zip(corner, offsets, strict=True))),
                        sizes=sizes,
                        start=part_start + int(np.ravel_multi_index(offsets, shape)),
                    )
            part_start = part_end


def _boxes(
    shape: tuple[int, ...], first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the boxes that make up elements first to last - 1 in row-major order."""
    if len(shape) == 1:
        yield (first,), (last - first,)
        return
    row_size = prod(shape[1:])
    row, column = divmod(first, row_size)
    if column:
        stop = min(last, (row + 1) * row_size)
        yield from _within_row(shape, row, column, column + stop - first)
        first, row = stop, row + 1
    whole_rows = (last - first) // row_size
    if whole_rows:
        yield (row, *(0 for _ in shape[1:])), (whole_rows, *shape[1:])
        first += whole_rows * row_size
    if first < last:
        yield from _within_row(shape, row + whole_rows, 0, last - first)


def _within_row(
    shape: tuple[int, ...], row: int, first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in _boxes(shape[1:], first, last):
        yield (row, *offsets), (1, *sizes)
