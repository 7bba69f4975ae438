"""The mesh's groups: who makes which, in which order."""

from __future__ import annotations

from typing import Any

import pytest
from torch import distributed as dist

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.workers.trainer.comm.mesh import build_mesh
from layout_tuner.workers.trainer.open_training import TrainingSettings, open_training
from tests.workers.trainer.cases import ADAMW, CPU, make_layout, make_shape
from tests.workers.trainer.ranks import make_context, run_ranks

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("tp_columns", [1, 2])
@pytest.mark.parametrize(
    ("tp", "cp", "dp"), [(1, 1, 1), (2, 1, 2), (1, 1, 4), (2, 2, 2), (1, 4, 1)]
)
def test_every_rank_makes_as_many_groups_as_its_peers(
    monkeypatch: pytest.MonkeyPatch, tp: int, cp: int, pp: int, dp: int, tp_columns: int
) -> None:
    """NCCL splits the world's communicator for each: whoever stays away lets all others wait."""
    copies = 2 if cp * dp == 4 else 1
    sharded = {"zero_stage": 1, "zero_replicas": copies}
    layout = make_layout(tp=tp, tp_columns=tp_columns, cp=cp, pp=pp, dp=dp, **sharded)
    world = range(layout.num_devices)
    made = [_groups_that_are_made(monkeypatch, rank, layout) for rank in world]
    assert len({len(groups) for groups in made}) == 1
    for at_once in zip(*made, strict=True):
        assert all(rank in group for rank, group in zip(world, at_once, strict=True))
        assert sorted(rank for group in set(at_once) for rank in group) == list(world)


def test_the_groups_wait_as_long_for_a_peer_as_the_session_says() -> None:
    settings = TrainingSettings(
        model=make_shape(), layout=make_layout(tp=2, pp=2), seed=0, optimizer=ADAMW, timeout_s=77.0
    )

    def work(rank: int, store: Any) -> list[float]:
        mesh = open_training(settings, make_context(rank, 4, store)).mesh
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


GROUPS = make_layout(dp=4, zero_stage=1, zero_replicas=2)


def ranks_of(group: Any) -> list[int] | None:
    return None if group is None else list(group.ranks)


def groups_of(layout: Layout) -> list[tuple[Any, Any, int, int]]:
    def work(rank: int) -> Any:
        mesh = build_mesh(rank, layout, tied_embeddings=False)
        shards, replicas = ranks_of(mesh.copies.shard_group), ranks_of(mesh.copies.replica_group)
        return shards, replicas, mesh.copies.shard_rank, mesh.copies.replica_rank

    return run_ranks(layout.num_devices, work)


def test_neighbours_share_one_copy_and_owners_of_the_same_share_are_replicas() -> None:
    assert groups_of(GROUPS) == [
        ([0, 1], [0, 2], 0, 0),
        ([0, 1], [1, 3], 1, 0),
        ([2, 3], [0, 2], 0, 1),
        ([2, 3], [1, 3], 1, 1),
    ]
    assert groups_of(Layout(dp=2, zero_stage=1)) == [([0, 1], None, 0, 0), ([0, 1], None, 1, 0)]
    assert groups_of(Layout(dp=2)) == [(None, [0, 1], 0, 0), (None, [0, 1], 0, 1)]
    context = groups_of(Layout(cp=2, dp=2, zero_stage=1, zero_replicas=2))
    assert context == groups_of(GROUPS), "the ranks of cp come first"
    strided = groups_of(Layout(tp=2, dp=2, zero_stage=1))
    assert [groups[0] for groups in strided] == [[0, 2], [1, 3], [0, 2], [1, 3]]
