"""Failures: the reason behind an exception, and who noticed it only."""

from __future__ import annotations

import itertools

import pytest
import torch

from search_spaces.cluster import detect_local_cpu
from search_spaces.layout import PRECISIONS, RECOMPUTE_MODES, Layout
from search_spaces.rules import violations
from tests.workers.trainer.cases import make_layout, make_shape
from tests.workers.trainer.ranks import run_ranks
from workers.trainer.capabilities import unsupported
from workers.trainer.errors import (
    LayoutUnsupportedError,
    LossDivergedError,
    MemoryLimitExceededError,
)
from workers.trainer.failure import classify, is_transport_error
from workers.trainer.mesh import coordinates, global_rank
from workers.trainer.peak import matmul_peak


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryLimitExceededError("needs more"), "out_of_memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (RuntimeError("HIP out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (RuntimeError("std::bad_alloc"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (OSError(12, "Cannot allocate memory"), "out_of_memory"),
        (LossDivergedError("loss is nan at iteration 3"), "diverged"),
        (LayoutUnsupportedError("vpp=2"), "unsupported"),
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


def test_a_real_refused_allocation_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 62, dtype=torch.uint8)
    assert classify(caught.value) == "out_of_memory"


def test_the_survivor_of_a_dead_peer_only_noticed() -> None:
    """The survivor's own error, from a peer that really died."""

    def work(rank: int) -> object:
        import os

        from torch import distributed as dist

        if rank == 1:
            dist.all_reduce(torch.ones(4))
            os._exit(0)
        dist.all_reduce(torch.ones(4))
        try:
            for _ in range(10):
                dist.all_reduce(torch.ones(4))
        except RuntimeError as error:
            text = (classify(error), is_transport_error(error), str(error))
            raise LossDivergedError(str(text)) from None
        return None

    with pytest.raises(AssertionError, match=r"rank 1 died|'crashed', True"):
        run_ranks(2, work)


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
    layout = Layout(tp=3, pp=3, vpp=2, sequence_parallel=True, recompute="selective")
    reasons = " | ".join(unsupported(layout, make_shape()))
    for text in ("vpp=2", "sequence_parallel", "selective", "num_layers=2", "num_heads=4", "tp=3"):
        assert text in reasons
    assert unsupported(make_layout(tp=2, pp=2, dp=2, zero_stage=1), make_shape()) == []


def test_the_rules_of_the_search_space_admit_what_the_trainer_runs_and_nothing_else() -> None:
    cluster = detect_local_cpu()
    shape = make_shape("llama", num_heads=8, num_kv_heads=2)
    for tp, pp, vpp, sequence, recompute, precision in itertools.product(
        (1, 2, 3, 4), (1, 2, 3), (1, 2), (False, True), RECOMPUTE_MODES, PRECISIONS
    ):
        layout = Layout(
            tp=tp,
            pp=pp,
            vpp=vpp,
            sequence_parallel=sequence,
            recompute=recompute,
            precision=precision,
        )
        illegal = violations(layout, shape, cluster, scopes={"model", "trainer"})
        reasons = unsupported(layout, shape)
        assert bool(illegal) == bool(reasons), (layout.key, illegal, reasons)


def test_ranks_and_coordinates_are_one_to_one_and_tp_varies_fastest() -> None:
    layout = Layout(tp=2, pp=3, dp=4)
    places = [coordinates(rank, layout) for rank in range(layout.num_devices)]
    assert [global_rank(place, layout) for place in places] == list(range(24))
    assert [p.tp_rank for p in places[:4]] == [0, 1, 0, 1]
    assert [p.dp_rank for p in places[:8:2]] == [0, 1, 2, 3]
    assert [p.pp_rank for p in places[::8]] == [0, 1, 2]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_peak_of_a_cpu_is_measured(precision: str) -> None:
    def work(rank: int) -> object:
        return matmul_peak("cpu", precision)  # type: ignore[arg-type]

    tflops, source = run_ranks(1, work)[0]
    assert source == f"measured matmul ({precision})"
    assert 1e-3 < tflops < 10
