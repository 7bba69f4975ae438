"""Flat buffers: one tensor holds every weight of a rank, another every gradient.

Parameters lie in reverse order, so that the gradients that a backward pass finishes first come
first. They start at multiples of 64 elements. The buffers are divided into buckets, and dp divides
every bucket evenly.

`rectangles` maps a span of the buffers back to the logical parameters: of a matrix, a span covers
up to three rectangles.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Final, NamedTuple

import torch
from torch import nn

from workers.trainer.comm.mesh import Mesh
from workers.trainer.model.parameters import (
    ModelParameter,
    ParameterPart,
    attach,
    initialise,
    local_parts,
)

ALIGNMENT: Final = 64
"""Elements that parameters and shards are aligned to: kernels process whole vectors, so the
arithmetic of a shard has no remainder loop."""

BUCKET_ELEMENTS: Final = 4 << 20
"""A bucket is closed once it holds this many elements: 16 MiB of gradients."""

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
    uses: int
    """Gradients that a micro-batch adds to it: the number of layers that hold it."""
    start: int
    end: int

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
    shared_bucket: int | None = None
    """The bucket of the parameter that another stage holds, too. It holds no other parameter."""

    @property
    def num_elements(self) -> int:
        """Length of each buffer, padding included."""
        return self.buckets[-1].end

    def bucket_of(self, position: int) -> int:
        """The bucket that contains an element."""
        return bisect_right([bucket.end for bucket in self.buckets], position)


def plan_flat(
    sizes: list[int],
    *,
    dp: int,
    shared: int | None = None,
    bucket_elements: int | None = None,
) -> FlatPlan:
    """Plans the flat buffers for parameters of these sizes, which are already in reverse order.

    `shared` is the index of the parameter that two stages hold. It gets a bucket of its own: the
    bucket has the same shares on both stages, so that they can sum it share by share.
    """
    if bucket_elements is None:
        bucket_elements = max(BUCKET_ELEMENTS, sum(sizes) // MAX_BUCKETS)
    offsets: list[int] = []
    buckets: list[Span] = []
    shared_bucket = None
    start = bucket_start = 0
    for index, size in enumerate(sizes):
        offsets.append(start)
        start = _round_up(start + size, ALIGNMENT)
        is_full = start - bucket_start >= bucket_elements
        if is_full or index == len(sizes) - 1 or shared in (index, index + 1):
            start = bucket_start + _round_up(start - bucket_start, ALIGNMENT * dp)
            if index == shared:
                shared_bucket = len(buckets)
            buckets.append(Span(bucket_start, start))
            bucket_start = start
    return FlatPlan(offsets=tuple(offsets), buckets=tuple(buckets), shared_bucket=shared_bucket)


class FlatBuffers:
    """The weights and gradients of one rank; every parameter of the model is a view of them."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        shared: ModelParameter | None = None,
    ) -> None:
        """Allocates memory for the model's declared parameters, and initialises them.

        `shared` is the parameter that another stage holds, too.
        """
        self.plan = plan_model(model, dp=mesh.layout.dp_cp, shared=shared)
        self.weights = torch.zeros(self.plan.num_elements, dtype=dtype, device=device)
        self.gradients = torch.zeros(self.plan.num_elements, device=device)
        self.owned = [
            bucket.share(mesh.num_shards, mesh.shard_rank) for bucket in self.plan.buckets
        ]
        """The part of each bucket that this rank updates; without ZeRO-1, all of it."""
        self.slots: list[Slot] = []
        uses = Counter(id(old) for _, _, old in _owned_parameters(model))
        made: dict[ModelParameter, ModelParameter] = {}
        for old, start in zip(_declared_parameters(model)[::-1], self.plan.offsets, strict=True):
            end = start + old.numel()
            parameter = ModelParameter(self.weights[start:end].view(old.shape))
            attach(parameter, old.parts, counted=old.counted)
            parameter.main_grad = self.gradients[start:end].view(old.shape)
            with torch.no_grad():
                for part, value in local_parts(old.parts, parameter, tp=mesh.layout.tp):
                    initialise(value, part, seed=seed, tp_rank=mesh.place.tp_rank)
            made[old] = parameter
            self.slots.append(Slot(parameter=parameter, uses=uses[id(old)], start=start, end=end))
        for module, name, old in list(_owned_parameters(model)):
            setattr(module, name, made[old])

    def expect_gradients(self, num_microbatches: int) -> None:
        """Begins a step: each parameter's first gradient overwrites that of the previous step."""
        for slot in self.slots:
            slot.parameter.main_grad_is_stale = True
            slot.parameter.gradients_left = slot.uses * num_microbatches

    @property
    def has_all_gradients(self) -> bool:
        """Whether every parameter got exactly the expected number of gradients in this step."""
        return all(slot.parameter.gradients_left == 0 for slot in self.slots)


def plan_model(model: nn.Module, *, dp: int, shared: ModelParameter | None) -> FlatPlan:
    """Plans the flat buffers of the model's declared parameters."""
    declared = _declared_parameters(model)[::-1]
    index = next((i for i, parameter in enumerate(declared) if parameter is shared), None)
    return plan_flat([parameter.numel() for parameter in declared], dp=dp, shared=index)


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


def rectangles(slots: Iterable[Slot], span: Span, *, tp: int, tp_rank: int) -> Iterator[Rectangle]:
    """The boxes that a span of the flat buffers consists of, without its padding."""
    for slot in slots:
        part_start = slot.start
        for part in slot.parameter.parts:
            shape = part.local_shape(tp)
            part_end = part_start + prod(shape)
            first, last = max(span.start, part_start), min(span.end, part_end)
            if first < last:
                corner = tuple(
                    tp_rank * size if dim == part.shard_dim else 0 for dim, size in enumerate(shape)
                )
                for offsets, sizes in _boxes(shape, first - part_start, last - part_start):
                    yield Rectangle(
                        part=part,
                        parameter=slot.parameter,
                        offsets=tuple(map(sum, zip(corner, offsets, strict=True))),
                        sizes=sizes,
                        start=part_start + _position(shape, offsets),
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


def _position(shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    position = 0
    for size, offset in zip(shape, offsets, strict=True):
        position = position * size + offset
    return position
