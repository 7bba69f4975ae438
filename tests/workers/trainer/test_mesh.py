"""The mesh's groups: who makes which, in which order."""

from __future__ import annotations

import pytest
from torch import distributed as dist

from search_spaces.layout import Layout
from tests.workers.trainer.cases import make_layout
from workers.trainer.mesh import build_mesh


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


def _groups_that_are_made(
    monkeypatch: pytest.MonkeyPatch, rank: int, layout: Layout
) -> list[tuple[int, ...]]:
    groups: list[tuple[int, ...]] = []

    def new_group(ranks: list[int], **_: object) -> None:
        groups.append(tuple(ranks))

    monkeypatch.setattr(dist, "get_world_size", lambda: layout.num_devices)
    monkeypatch.setattr(dist, "new_group", new_group)
    build_mesh(rank, layout, tied_embeddings=True)
    return groups
