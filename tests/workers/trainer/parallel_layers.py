"""Weights of layers on their own, and a count of what ranks send."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.comm.mesh import Mesh
from layout_tuner.workers.trainer.model.parameters import ModelParameter
from layout_tuner.workers.trainer.training import Training
from tests.workers.trainer.cases import on_layout


def weight(value: Tensor) -> ModelParameter:
    parameter = ModelParameter(value.clone())
    parameter.main_grad = torch.full(value.shape, 0.25)  # gradients add to what is there
    return parameter


def gradient(parameter: ModelParameter) -> Tensor:
    return parameter.main_grad - 0.25


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class CountingCollectives(TorchDispatchMode):
    """Counts what goes to other ranks, in passes forward and backward alike.

    What torch.distributed is asked for is seen here; what goes through shared memory is counted by
    the memory of each group, under the name `shared::` and the operation's.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        """Counts what the groups of this mesh do, beside what torch.distributed does."""
        super().__init__()
        self._wire: Counter[str] = Counter()
        groups = [
            getattr(holder, each.name)
            for holder in ([mesh, *mesh.every_copies] if mesh else [])
            for each in fields(holder)
            if each.name.endswith("_group")
        ]
        lanes = {id(group.lane): group.lane for group in groups if group and group.lane}
        self._lanes = list(lanes.values())
        self._before = self._shared()

    @property
    def counts(self) -> Counter[str]:
        """Operations since this was made, by name."""
        return self._wire + (self._shared() - self._before)

    def _shared(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for lane in self._lanes:
            total.update({f"shared::{kind}": count for kind, count in lane.counts.items()})
        return total

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler in every rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._wire[func.name()] += 1
        return func(*args, **(kwargs or {}))


def sent_in(
    layout: Layout, shape: ModelShape, *, whole_step: bool = False, **mesh_options: Any
) -> Counter[str]:
    """What each rank sends in the passes of one step, or in all of it."""

    def work(training: Training) -> Counter[str]:
        with CountingCollectives(training.mesh) as counting:
            if whole_step:
                training.step(training.batch(0))
            else:
                training.pipeline.run(training.batch(0))
        return counting.counts

    first, *others = on_layout(layout, work, shape, **mesh_options)
    assert others == [first] * len(others)
    return first
