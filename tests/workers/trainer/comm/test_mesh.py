"""The mesh's groups: who makes which, in which order."""

from __future__ import annotations

from typing import Any

import pytest
from torch import distributed as dist

from search_spaces.spec.layout import Layout
from tests.workers.trainer.cases import ADAMW, CPU, make_layout, make_shape
from tests.workers.trainer.ranks import run_ranks
from workers.trainer.comm.mesh import build_mesh
from workers.trainer.open_training import RankContext, TrainingSettings, open_training

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 2), (1, 4)])
def test_every_rank_makes_as_many_groups_as_its_peers(
    monkeypatch: pytest.MonkeyPatch, tp: int, pp: int, dp: int
) -> None:
    """NCCL splits the world's communicator for each: whoever stays away lets all others wait."""
    layout = make_layout(tp=tp, pp=pp, dp=dp, zero_stage=1, zero_replicas=2 if dp == 4 else 1)
    world = range(layout.num_devices)
    made = [_groups_that_are_made(monkeypatch, rank, layout) for rank in world]
    assert len({len(groups) for groups in made}) == 1
    for at_once in zip(*made, strict=True):
        assert all(rank in group for rank, group in zip(world, at_once, strict=True))
        assert sorted(rank for group in set(at_once) for rank in group) == list(world)


def test_the_groups_wait_as_long_for_a_peer_as_the_session_says() -> None:
    layout = make_layout(tp=2, pp=2)

    def work(rank: int, store: Any) -> list[float]:
        context = RankContext(
            rank=rank,
            world_size=4,
            local_rank=rank,
            store=store,
            device="cpu",
            oversubscribed=True,
            peak_tflops_per_device=0.1,
            peak_source="a test's",
        )
        settings = TrainingSettings(
            model=make_shape(), layout=layout, seed=0, optimizer=ADAMW, timeout_s=77.0
        )
        mesh = open_training(settings, context).mesh
        groups = [mesh.world_group, mesh.tp_group, mesh.pp_group]
        backends = [group.process_group._get_backend(CPU) for group in groups if group is not None]
        return [backend.options._timeout.total_seconds() for backend in backends]

    assert run_ranks(4, work, own_group=True) == [[77.0] * 3] * 4


def _groups_that_are_made(
    monkeypatch: pytest.MonkeyPatch, rank: int, layout: Layout
) -> list[tuple[int, ...]]:
    groups: list[tuple[int, ...]] = []

    def new_group(ranks: list[int], *_: object, **__: object) -> None:
        groups.append(tuple(ranks))

    monkeypatch.setattr(dist, "get_world_size", lambda: layout.num_devices)
    monkeypatch.setattr(dist, "new_group", new_group)
    build_mesh(rank, layout, tied_embeddings=True)
    return groups
