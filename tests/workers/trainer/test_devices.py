"""What must hold on every device: on the CPU here, on GPUs where there are any (`make test-gpu`).

Bounds follow from the arithmetic, so that they are the same on every device: fp32 products are full
fp32 (no TF32).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from search_spaces.estimates.memory import peak_memory_bytes
from search_spaces.protocol.outcome import ProbeRequest
from search_spaces.spec.layout import Layout, Precision
from search_spaces.spec.model_shape import ModelShape
from tests.workers.trainer.cases import (
    ADAMW,
    CUT,
    DP,
    PP,
    TP,
    ZERO,
    ZERO_2,
    ZERO_3,
    Run,
    excess_of_steps,
    make_layout,
    make_shape,
)
from tests.workers.trainer.devices import DEVICES, on_gpus, on_ranks, train_on
from tests.workers.trainer.ranks import make_context, run_ranks
from tests.workers.trainer.test_parity import reference
from tests.workers.trainer.tolerances import TrainingTolerance, operation_error, training_tolerance
from workers.trainer.model.attention import causal_attention
from workers.trainer.probe.exception_reasons import classify
from workers.trainer.probe.measurement import peak_memory, rehearse
from workers.trainer.probe.probe import run_probe
from workers.trainer.training import Training

pytestmark = pytest.mark.ranks

STEPS = 5
WIDE = make_shape(
    num_layers=4, hidden_size=256, ffn_hidden_size=512, seq_length=256, vocab_size=2048
)


def first_steps(run: Run) -> tuple[list[float], list[float]]:
    return run.losses[:STEPS], run.grad_norms[:STEPS]


def tolerance(shape: ModelShape, precision: Precision = "fp32") -> TrainingTolerance:
    return training_tolerance(shape, ADAMW, steps=STEPS, precision=precision)


@pytest.mark.parametrize(
    ("device", "family", "precision"),
    [
        *(("cpu", "llama", "fp32"), ("cpu", "gpt", "fp16")),
        *(
            on_gpus(1, "cuda", family, precision)
            for family in ("gpt", "llama")
            for precision in ("fp32", "bf16", "fp16")
        ),
    ],
)
def test_one_device_follows_the_reference(device: str, family: str, precision: Precision) -> None:
    shape = make_shape(family)
    found = train_on(device, shape, make_layout(precision=precision), steps=STEPS)
    expected = first_steps(reference(shape, ADAMW))
    assert excess_of_steps(found, expected, tolerance(shape, precision)) <= 1
    assert torch.get_float32_matmul_precision() == "highest", "TF32 is not fp32"


RECOMPUTED = ZERO_3 | {"recompute": "full"}
OF_TWO = [TP, CUT, PP, DP, ZERO, ZERO_2, ZERO_3, RECOMPUTED]
OF_FOUR = [TP | PP, PP | ZERO, PP | ZERO_3, ZERO_3 | {"dp": 4, "zero_replicas": 2}]


@pytest.mark.parametrize(
    ("device", "axes"),
    [
        ("cpu", RECOMPUTED),
        *(on_gpus(2, "cuda", axes) for axes in OF_TWO),
        *(on_gpus(4, "cuda", axes) for axes in OF_FOUR),
    ],
    ids=str,
)
def test_several_devices_train_as_one_does(device: str, axes: dict[str, Any]) -> None:
    """Over gloo, NCCL or RCCL: whichever the device has. On CPU ranks test_parity does the rest."""
    shape = make_shape("llama")
    found = train_on(device, shape, make_layout(**axes), steps=STEPS)
    alone = train_on(device, shape, make_layout(), steps=STEPS)
    assert excess_of_steps(found, alone, tolerance(shape)) <= 1


@pytest.mark.parametrize(
    ("device", "precision"),
    [("cpu", "bf16"), *(on_gpus(1, "cuda", precision) for precision in ("fp32", "bf16"))],
)
def test_the_peak_is_what_the_estimate_says(device: str, precision: str) -> None:
    """A GPU's allocator gives out temporaries of operators and a matmul workspace, too."""
    layout = Layout(micro_batch_size=4, num_microbatches=2, precision=precision)

    def work(training: Training) -> tuple[int, int | None]:
        if device == "cpu":
            return rehearse(training, limit_bytes=None), None
        training.step(training.batch(0))
        torch.cuda.reset_peak_memory_stats(training.device)
        training.step(training.batch(1))
        memory = peak_memory(training, None)
        return memory.by_stage[0], memory.reserved_by_stage[0]

    peak_bytes, reserved_bytes = on_ranks(WIDE, layout, device, work)[0]
    estimate = float(peak_memory_bytes(layout, WIDE).item())
    workspace = 0 if device == "cpu" else 64 << 20
    assert 0.95 * estimate < peak_bytes < 1.25 * estimate + workspace
    assert reserved_bytes is None or reserved_bytes >= peak_bytes


@DEVICES
def test_a_step_that_does_not_fit_reads_as_out_of_memory(device: str) -> None:
    """Weights and states fit below the limit, the activations of 64 sequences do not."""
    layout = Layout(micro_batch_size=64, num_microbatches=1)
    limit_bytes = int(float(peak_memory_bytes(layout, WIDE).item()) / 2)

    def work(training: Training) -> str:
        try:
            if device == "cpu":
                rehearse(training, limit_bytes=limit_bytes)
            training.step(training.batch(0))
        except RuntimeError as error:
            return classify(error)
        return "it fitted"

    found = on_ranks(WIDE, layout, device, work, memory_limit_bytes=limit_bytes)
    assert found == ["out_of_memory"]


@DEVICES
@pytest.mark.parametrize("num_kv_heads", [8, 2])
def test_attention_is_fused(device: str, num_kv_heads: int) -> None:
    """With every other kernel forbidden, the flash kernel takes what the model hands in."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def work(rank: int) -> float:
        torch.manual_seed(0)
        qkv_BSMD = torch.randn(2, 128, 8 + 2 * num_kv_heads, 64, device=device, dtype=dtype)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            fused = causal_attention(qkv_BSMD, 8)
        with sdpa_kernel(SDPBackend.MATH):
            plain = causal_attention(qkv_BSMD, 8)
        return float((fused - plain).abs().max() / plain.abs().max())

    # Sums over 128 positions; of 16 bits are the probabilities and the output, of both kernels.
    assert run_ranks(1, work)[0] < 2 * operation_error(dtype, length=128, roundings=2)


@DEVICES
def test_a_probe_says_where_its_time_went(device: str) -> None:
    layout = Layout(micro_batch_size=2, num_microbatches=1)
    request = ProbeRequest(model=WIDE, layout=layout, iterations=3)

    def work(rank: int, store: Any) -> Any:
        context = make_context(rank, 1, store, device=device, peak_tflops_per_device=1e4)
        result = run_probe(request, context, lambda event: None)
        assert result is not None
        return result

    result = run_ranks(1, work, own_group=True)[0]
    m = result.measurement
    assert result.environment.backend in ({"gloo"} if device == "cpu" else {"nccl", "rccl"})
    assert m.memory_kind == ("logical" if device == "cpu" else "allocated")
    assert len(m.peak_reserved_bytes_by_stage) == (0 if device == "cpu" else 1)
    parts = m.breakdown
    assert parts is not None
    assert parts.total_s == pytest.approx(m.step_time_s, rel=1e-9)
    assert min(parts.compute_s, parts.optimizer_s) > 0
    assert (parts.tp_s, parts.pp_s, parts.dp_s) == (0, 0, 0)
    # The device's clock and the host's are not the same one.
    assert parts.unexplained_s > -0.01 * m.step_time_s
