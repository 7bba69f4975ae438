"""Layers with weights of their own on two tensor-parallel ranks, and a count of what they send."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.workers.trainer.cases import make_layout
from tests.workers.trainer.ranks import run_ranks
from workers.trainer.comm.mesh import Mesh, build_mesh
from workers.trainer.model.parameters import ModelParameter

TP = 2
GROUPS = (
    "cp_group",
    "tp_group",
    "column_group",
    "vocabulary_group",
    "ep_group",
    "etp_group",
    "pp_group",
    "embedding_group",
    "world_group",
)


def weight(value: Tensor) -> ModelParameter:
    parameter = ModelParameter(value.clone())
    parameter.main_grad = torch.full(value.shape, 0.25)  # gradients add to what is there
    return parameter


def gradient(parameter: ModelParameter) -> Tensor:
    return parameter.main_grad - 0.25


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_tp_ranks(work: Any) -> list[Any]:
    """Runs `work(tp_rank, group)` on two tensor-parallel ranks."""

    def run(rank: int) -> Any:
        mesh = build_mesh(rank, make_layout(tp=TP), tied_embeddings=False)
        return [value.detach().numpy() for value in work(rank, mesh.tp_group)]

    return [[torch.from_numpy(a) for a in result] for result in run_ranks(TP, run)]


class CountingCollectives(TorchDispatchMode):
    """Counts what goes to other ranks, in passes forward and backward alike.

    What torch.distributed is asked for is seen here; what goes through shared memory is counted by
    the memory of each group, under the name `shared::` and the operation's.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        """Counts what the groups of this mesh do, beside what torch.distributed does."""
        super().__init__()
        self._wire: Counter[str] = Counter()
        groups = [getattr(mesh, name) for name in GROUPS] if mesh else []
        for copies in mesh.every_copies if mesh else ():
            groups += [copies.shard_group, copies.replica_group]
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
