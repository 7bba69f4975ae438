"""Failures: the reason behind an exception, and who noticed it only; in any exchange of ranks."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from layout_tuner.search_spaces.layouts.layout import CP_COMM_TYPES, Layout, Precision
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.comm.mesh import Mesh, build_mesh
from layout_tuner.workers.trainer.device_peak_flops import matmul_peak
from layout_tuner.workers.trainer.errors import (
    CompilerMissingError,
    LayoutUnsupportedError,
    LossDivergedError,
    MemoryLimitExceededError,
    PeerLostError,
)
from layout_tuner.workers.trainer.open_training import refuse_unsupported, unsupported
from layout_tuner.workers.trainer.probe.exception_reasons import (
    classify,
    host_advice,
    is_transport_error,
)
from tests.workers.trainer.cases import make_layout, make_shape, make_training
from tests.workers.trainer.ranks import run_ranks

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryLimitExceededError("needs more"), "out_of_memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (RuntimeError("HIP out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (OSError(12, "Cannot allocate memory"), "out_of_memory"),
        (RuntimeError("can't start new thread"), "host_resource"),
        (OSError(24, "Too many open files"), "host_resource"),
        (RuntimeError("unable to mmap 7 bytes from file <x>: No space left (28)"), "host_resource"),
        (LossDivergedError("loss is nan at iteration 3"), "diverged"),
        (LayoutUnsupportedError("vpp=2"), "unsupported"),
        (CompilerMissingError("no g++"), "unsupported"),
        (ValueError("out of memory is what this text is about"), "crashed"),
        (RuntimeError("shapes do not match"), "crashed"),
        (KeyError("x"), "crashed"),
    ],
)
def test_errors_are_classified_by_type_and_then_by_text(error: Exception, reason: str) -> None:
    assert classify(error) == reason
    wrapped = RuntimeError("the step failed")
    wrapped.__cause__ = error
    assert classify(wrapped) == reason


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "host_resource"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "host_resource"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (RuntimeError("CUDA driver error: out of memory"), "out_of_memory"),
        (MemoryLimitExceededError("needs more"), "out_of_memory"),
    ],
)
def test_beside_a_gpu_the_hosts_memory_is_another_resource(error: Exception, reason: str) -> None:
    assert classify(error, device="cuda") == reason
    assert host_advice(error).startswith(
        "the host ran out of memory" if reason == "host_resource" else ""
    )


def reduce_for_ever() -> None:
    while True:
        dist.all_reduce(torch.ones(4))


def test_over_gloo_a_rank_whose_peer_dies_says_that_the_peer_was_lost() -> None:
    """The survivor's own error, from a peer that really dies, once it has given its result."""

    def work(rank: int, store: dist.Store) -> tuple[str, bool, str] | None:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        dist.all_reduce(torch.ones(4))
        if rank == 1:
            return None
        with pytest.raises(RuntimeError) as caught:
            reduce_for_ever()
        return classify(caught.value), is_transport_error(caught.value), str(caught.value)

    survivor = run_ranks(2, work, own_group=True, dying=(1,))[0]
    assert survivor[:2] == ("crashed", True), survivor


@pytest.mark.parametrize(
    ("error", "transport"),
    [
        (RuntimeError("[gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"), True),
        (RuntimeError("Read error [127.0.0.1]:4711: Connection reset by peer"), True),
        (ConnectionResetError(), True),
        (RuntimeError("NCCL communicator was aborted on rank 1"), True),
        (RuntimeError("shapes do not match"), False),
        (MemoryLimitExceededError("Connection closed by peer"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_transport_errors_are_told_from_causes(error: Exception, transport: bool) -> None:
    assert is_transport_error(error) is transport


def test_unsupported_names_every_reason_with_its_numbers() -> None:
    layout = Layout(tp=3, pp=3, vpp=2, sequence_parallel=True)
    reasons = " | ".join(unsupported(layout, make_shape()))
    for text in ("vpp=2", "sequence_parallel", "num_layers=2", "num_heads=4", "tp=3"):
        assert text in reasons
    with pytest.raises(LayoutUnsupportedError, match="tp=3"):
        refuse_unsupported(layout, make_shape())
    assert unsupported(make_layout(tp=2, pp=2, dp=2, zero_stage=1), make_shape()) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cpus_peak_is_measured(precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that advances 0.01 s for each product, however fast products are here."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 0.01 * next(ticks))
    monkeypatch.setattr("layout_tuner.workers.trainer.device_peak_flops.time", clock)

    def work(rank: int) -> tuple[float, str]:
        return matmul_peak("cpu", precision)

    tflops, source = run_ranks(1, work)[0]
    assert source == f"measured matmul ({precision})"
    assert tflops == pytest.approx(2 * 1024**3 / 0.01 / 1e12), "the larger product's rate"


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
