"""ZeRO over shard groups smaller than dp (`zero_replicas`)."""

from __future__ import annotations

from typing import Any

import pytest

from search_spaces.spec.layout import Layout
from tests.workers.trainer.cases import (
    make_layout,
    make_shape,
    make_training,
    train,
)
from tests.workers.trainer.ranks import run_ranks
from tests.workers.trainer.test_parity import (
    SGD,
    assert_same_training,
    reference,
)
from workers.trainer.comm.mesh import Mesh, build_mesh
from workers.trainer.parallel.optimizer import OptimizerSettings
from workers.trainer.training import persistent_bytes

pytestmark = pytest.mark.ranks

GROUPS = make_layout(dp=4, zero_stage=1, zero_replicas=2)


def ranks_of(group: Any) -> list[int] | None:
    return None if group is None else list(group.ranks)


def groups_of(layout: Layout) -> list[tuple[Any, Any, int, int]]:
    def work(rank: int) -> Any:
        mesh = build_mesh(rank, layout, tied_embeddings=False)
        shards, replicas = ranks_of(mesh.shard_group), ranks_of(mesh.replica_group)
        return shards, replicas, mesh.shard_rank, mesh.replica_rank

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
    strided = groups_of(Layout(tp=2, dp=2, zero_stage=1))
    assert [groups[0] for groups in strided] == [[0, 2], [1, 3], [0, 2], [1, 3]]


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_shard_groups_train_as_the_reference_does(family: str) -> None:
    shape = make_shape(family)
    expected = reference(shape, OptimizerSettings())
    assert_same_training(train(shape, GROUPS), expected)
    assert_same_training(train(shape, GROUPS, SGD), reference(shape, SGD))


def test_a_group_keeps_one_copy_of_the_states() -> None:
    shape = make_shape(hidden_size=64, ffn_hidden_size=128)
    whole = sum(t.nbytes for t in make_training(shape).optimizer.state_tensors)

    def state_bytes(layout: Layout) -> list[int]:
        def work(rank: int) -> int:
            mesh = build_mesh(rank, layout, tied_embeddings=False)
            training = make_training(shape, mesh=mesh)
            assert_foreseen(training.persistent_tensors(), mesh)
            return sum(t.nbytes for t in training.optimizer.state_tensors)

        def assert_foreseen(tensors: list[Any], mesh: Mesh) -> None:
            foreseen = persistent_bytes(shape, mesh, OptimizerSettings())
            # Rotary tables and step counts are no part of it.
            assert foreseen == pytest.approx(sum(t.nbytes for t in tensors), rel=0.01)

        return run_ranks(layout.num_devices, work)

    for replicas, group in ((1, 4), (2, 2)):
        layout = make_layout(dp=4, zero_stage=1, zero_replicas=replicas)
        assert state_bytes(layout) == pytest.approx([whole / group] * 4, rel=0.02)
