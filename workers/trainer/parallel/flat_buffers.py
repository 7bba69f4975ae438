"""Flat buffers: one tensor holds every weight of a rank, another every gradient.

Parameters lie in reverse order, so that the gradients that a backward pass finishes first come
first; they start at multiples of 64 elements, and are cut into buckets that dp divides evenly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import nn

from workers.trainer.mesh import Mesh
from workers.trainer.parameters import (
    ModelParameter,
    attach,
    initialise,
    local_parts,
)

ALIGNMENT: Final = 64
"""Elements; whole vectors for every kernel, so that a shard's arithmetic has no odd tail."""

BUCKET_ELEMENTS: Final = 4 << 20
"""A bucket is closed once it holds this many elements: 16 MiB of gradients."""

MAX_BUCKETS: Final = 64
"""Roughly, of a large model: kernels and messages that are too many cost more than they hide."""


class Span(NamedTuple):
    """A stretch of the flat buffers."""

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
    """Gradients that a micro-batch adds to it: the places of the model that hold it."""
    start: int
    end: int

    def overlaps(self, spans: Iterable[Span]) -> Iterator[tuple[int, int]]:
        """What of the parameter lies in these spans."""
        for span in spans:
            first, last = max(span.start, self.start), min(span.end, self.end)
            if first < last:
                yield first, last


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatPlan:
    """Where everything lies, before any memory is taken."""

    offsets: tuple[int, ...]
    """Start of each parameter, in reverse order."""
    buckets: tuple[Span, ...]
    """What is reduced at once."""
    shared_bucket: int | None = None
    """The bucket of the parameter that another stage holds, too; it has it for itself."""

    @property
    def num_elements(self) -> int:
        """Length of each buffer, padding included."""
        return self.buckets[-1].end

    def bucket_of(self, position: int) -> int:
        """The bucket that an element lies in."""
        return bisect_right([bucket.end for bucket in self.buckets], position)


def plan_flat(
    sizes: list[int],
    *,
    dp: int,
    shared: int | None = None,
    bucket_elements: int | None = None,
) -> FlatPlan:
    """Lays out parameters of these sizes (already in reverse order).

    A parameter that two stages hold (`shared`, its index) gets a bucket for itself: cut alike on
    both, it can be summed between them share by share.
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
        """Gives the model's declared parameters memory, and their initial values.

        `shared` is the parameter that another stage holds, too.
        """
        self.plan = plan_model(model, dp=mesh.layout.dp, shared=shared)
        self.weights = torch.zeros(self.plan.num_elements, dtype=dtype, device=device)
        self.gradients = torch.zeros(self.plan.num_elements, device=device)
        self.slots: list[Slot] = []
        uses = Counter(id(old) for _, _, old in _owned_parameters(model))
        made: dict[ModelParameter, ModelParameter] = {}
        for old, start in zip(_declared_parameters(model)[::-1], self.plan.offsets, strict=True):
            slot = self._place(old, start, uses[id(old)])
            _fill(slot.parameter, mesh, seed)
            made[old] = slot.parameter
            self.slots.append(slot)
        _replace_parameters(model, made)

    def expect_gradients(self, num_microbatches: int) -> None:
        """Begins a step: the first gradient of each parameter takes the place of the last step's."""
        for slot in self.slots:
            slot.parameter.main_grad_is_stale = True
            slot.parameter.gradients_left = slot.uses * num_microbatches

    @property
    def has_all_gradients(self) -> bool:
        """Whether every parameter got the gradients of this step, no less and no more."""
        return all(slot.parameter.gradients_left == 0 for slot in self.slots)

    def _place(self, declared: ModelParameter, start: int, uses: int) -> Slot:
        end = start + declared.numel()
        parameter = ModelParameter(self.weights[start:end].view(declared.shape))
        attach(parameter, declared.parts, counted=declared.counted)
        parameter.main_grad = self.gradients[start:end].view(declared.shape)
        return Slot(parameter=parameter, uses=uses, start=start, end=end)


def plan_model(model: nn.Module, *, dp: int, shared: ModelParameter | None) -> FlatPlan:
    """Where the model's declared parameters will lie."""
    declared = _declared_parameters(model)[::-1]
    index = next((i for i, parameter in enumerate(declared) if parameter is shared), None)
    return plan_flat([parameter.numel() for parameter in declared], dp=dp, shared=index)


def _fill(parameter: ModelParameter, mesh: Mesh, seed: int) -> None:
    tp = mesh.layout.tp
    with torch.no_grad():
        for part, value in local_parts(parameter.parts, parameter, tp=tp):
            initialise(value, part, seed=seed, tp_rank=mesh.place.tp_rank)


def _declared_parameters(model: nn.Module) -> list[ModelParameter]:
    """Each parameter once, in forward order."""
    declared = list(model.parameters())
    assert all(isinstance(parameter, ModelParameter) for parameter in declared)
    return declared  # type: ignore[return-value]


def _replace_parameters(model: nn.Module, made: dict[ModelParameter, ModelParameter]) -> None:
    for module, name, old in list(_owned_parameters(model)):
        setattr(module, name, made[old])


def _owned_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, ModelParameter]]:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            assert isinstance(parameter, ModelParameter)
            yield module, name, parameter


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
