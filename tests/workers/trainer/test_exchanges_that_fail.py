"""Out of memory, a dead rank, a silent one: where layers communicate over cp, ep or columns."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from torch import distributed as dist

from search_spaces.spec.layout import CP_COMM_TYPES
from search_spaces.spec.model_shape import ModelShape
from tests.workers.trainer.cases import make_layout, make_shape, make_training, on_layout
from tests.workers.trainer.ranks import run_ranks
from workers.trainer.comm.mesh import Mesh, build_mesh
from workers.trainer.errors import MemoryLimitExceededError, PeerLostError
from workers.trainer.probe.exception_reasons import classify, is_transport_error
from workers.trainer.probe.measurement import rehearse
from workers.trainer.training import Training

pytestmark = pytest.mark.ranks

CASES = pytest.mark.parametrize(
    ("shape", "axes"),
    [
        *(
            pytest.param(make_shape(), {"cp": 2, "cp_comm_type": kind}, id=kind)
            for kind in CP_COMM_TYPES
        ),
        pytest.param(make_shape("moe"), {"dp": 2, "ep": 2}, id="ep"),
        pytest.param(make_shape("gpt"), {"tp_columns": 2}, id="columns"),
    ],
)


def mesh_of(rank: int, shape: ModelShape, axes: dict[str, Any], **options: Any) -> Mesh:
    has_experts = shape.num_experts > 0
    layout = make_layout(**axes)
    return build_mesh(rank, layout, tied_embeddings=False, has_experts=has_experts, **options)


@CASES
def test_a_step_over_the_memory_limit_is_out_of_memory(
    shape: ModelShape, axes: dict[str, Any]
) -> None:
    def work(training: Training) -> str:
        # Over it before anything is sent: else the peer would wait for the rank that gives up.
        held = sum(tensor.nbytes for tensor in training.persistent_tensors())
        with pytest.raises(MemoryLimitExceededError, match="needs at least") as refused:
            rehearse(training, limit_bytes=held)
        return classify(refused.value)

    assert on_layout(make_layout(**axes), work, shape) == ["out_of_memory"] * 2


@CASES
def test_a_rank_whose_peer_dies_says_that_the_peer_was_lost(
    shape: ModelShape, axes: dict[str, Any]
) -> None:
    def work(rank: int) -> Any:
        training = make_training(shape, mesh=mesh_of(rank, shape, axes))
        training.step(training.batch(0))
        if rank == 1:
            return None
        with pytest.raises(PeerLostError) as caught:
            training.pipeline.run(training.batch(1))
        return classify(caught.value), is_transport_error(caught.value), str(caught.value)

    reason, is_transport, message = run_ranks(2, work, dying=(1,))[0]
    assert (reason, is_transport) == ("crashed", True)
    assert "connection closed by peer" in message


@CASES
def test_a_peer_that_does_not_come_is_waited_for_as_long_as_the_session_says(
    shape: ModelShape, axes: dict[str, Any]
) -> None:
    def work(rank: int) -> str:
        mesh = mesh_of(rank, shape, axes, timeout=timedelta(seconds=0.3))
        training, said = make_training(shape, mesh=mesh), ""
        if rank == 0:
            started = time.monotonic()
            with pytest.raises(PeerLostError) as caught:
                training.pipeline.run(training.batch(0))
            assert time.monotonic() - started >= 0.3
            assert (classify(caught.value), is_transport_error(caught.value)) == ("crashed", True)
            said = str(caught.value)
        dist.barrier()  # its peer comes here once it has given up
        return said

    message = run_ranks(2, work)[0]
    assert "timed out waiting" in message
    assert "ranks [1], longer than the timeout of 0.3 s" in message
