"""Flat buffers: one tensor holds every weight of a rank, another every gradient.

Parameters lie in reverse order, so that the gradients that a backward pass finishes first come
first; they start at multiples of 64 elements, and are cut into buckets that dp divides evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.distributed import ProcessGroup

from workers.trainer.collectives import all_reduce
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Where a parameter lies in the flat buffers."""

    parameter: ModelParameter
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A stretch of the flat buffers that is reduced at once."""

    start: int
    end: int

    def share(self, dp: int, dp_rank: int) -> tuple[int, int]:
        """Start and end of the part that one data-parallel rank owns."""
        size = (self.end - self.start) // dp
        return self.start + dp_rank * size, self.start + (dp_rank + 1) * size


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatPlan:
    """Where everything lies, before any memory is taken."""

    offsets: tuple[int, ...]
    """Start of each parameter, in reverse order."""
    buckets: tuple[Bucket, ...]

    @property
    def num_elements(self) -> int:
        """Length of each buffer, padding included."""
        return self.buckets[-1].end


def plan_flat(sizes: list[int], *, dp: int, bucket_elements: int = BUCKET_ELEMENTS) -> FlatPlan:
    """Lays out parameters of these sizes (already in reverse order)."""
    offsets, buckets = [], []
    start = bucket_start = 0
    for index, size in enumerate(sizes):
        offsets.append(start)
        start = _round_up(start + size, ALIGNMENT)
        if start - bucket_start >= bucket_elements or index == len(sizes) - 1:
            start = bucket_start + _round_up(start - bucket_start, ALIGNMENT * dp)
            buckets.append(Bucket(start=bucket_start, end=start))
            bucket_start = start
    return FlatPlan(offsets=tuple(offsets), buckets=tuple(buckets))


class FlatBuffers:
    """The weights and gradients of one rank; every parameter of the model is a view of them."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, *, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        """Gives the model's declared parameters memory, and their initial values."""
        declared = _declared_parameters(model)[::-1]
        self.plan = plan_flat([p.numel() for p in declared], dp=mesh.layout.dp)
        self.weights = torch.zeros(self.plan.num_elements, dtype=dtype, device=device)
        self.gradients = torch.zeros(self.plan.num_elements, device=device)
        self.slots: list[Slot] = []
        made: dict[ModelParameter, ModelParameter] = {}
        for old, start in zip(declared, self.plan.offsets, strict=True):
            slot = self._place(old, start)
            _fill(slot.parameter, mesh, seed)
            made[old] = slot.parameter
            self.slots.append(slot)
        _replace_parameters(model, made)

    def expect_gradients(self) -> None:
        """Begins a step: the first gradient of each parameter takes the place of the last step's."""
        for slot in self.slots:
            slot.parameter.main_grad_is_stale = True

    @property
    def has_all_gradients(self) -> bool:
        """Whether the passes of this step have reached every parameter."""
        return not any(slot.parameter.main_grad_is_stale for slot in self.slots)

    def sum_replicated(self, group: ProcessGroup | None) -> None:
        """Sums over tp the gradients of what every tp rank holds; one all-reduce for all of them."""
        slots = [slot for slot in self.slots if slot.parameter.replicated]
        if group is None or not slots:
            return
        views = [self.gradients[slot.start : slot.end] for slot in slots]
        sums = torch.cat(views)
        all_reduce(sums, group)
        torch._foreach_copy_(views, torch.split(sums, [len(view) for view in views]))

    def _place(self, declared: ModelParameter, start: int) -> Slot:
        end = start + declared.numel()
        parameter = ModelParameter(self.weights[start:end].view(declared.shape))
        attach(parameter, declared.parts, counted=declared.counted)
        parameter.main_grad = self.gradients[start:end].view(declared.shape)
        return Slot(parameter=parameter, start=start, end=end)


def num_flat_elements(model: nn.Module, *, dp: int) -> int:
    """Elements of each flat buffer that the model will need, padding included."""
    return plan_flat([p.numel() for p in _declared_parameters(model)[::-1]], dp=dp).num_elements


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
