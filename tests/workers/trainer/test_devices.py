"""What must hold on every device: on the CPU here, on GPUs where there are any (`make test-gpu`).

Bounds follow from the arithmetic, so that they are the same on every device: fp32 products are full
fp32 (no TF32).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from layout_tuner.predictions.estimates.peak_memory import peak_memory_bytes
from layout_tuner.protocol.outcome import ProbeRequest
from layout_tuner.search_spaces.layouts.layout import Layout, Precision
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.model.attention import HeadSizes, causal_attention
from layout_tuner.workers.trainer.open_training import TrainingSettings, open_training
from layout_tuner.workers.trainer.probe.exception_reasons import classify
from layout_tuner.workers.trainer.probe.measured_memory import peak_memory, rehearse
from layout_tuner.workers.trainer.probe.probe import run_probe
from layout_tuner.workers.trainer.training import Training
from tests.workers.trainer.cases import (
    ADAMW,
    CUT,
    DP,
    PP,
    STEPS,
    TP,
    ZERO,
    ZERO_2,
    ZERO_3,
    excess_of_steps,
    make_layout,
    make_shape,
)
from tests.workers.trainer.ranks import make_context, run_ranks
from tests.workers.trainer.test_parity import reference
from tests.workers.trainer.tolerances import TrainingTolerance, operation_error, training_tolerance

pytestmark = pytest.mark.ranks

WIDE = make_shape(
    num_layers=4, hidden_size=256, ffn_hidden_size=512, seq_length=256, vocab_size=2048
)


def on_gpus(num_devices: int, *values: object) -> Any:
    """A parameter of a test for a machine that has so many GPUs, marked and skipped elsewhere."""
    found = torch.cuda.device_count()
    missing = pytest.mark.skipif(
        found < num_devices,
        reason=f"needs a GPU for each of {num_devices} ranks; torch {torch.__version__} sees {found}",
    )
    return pytest.param(*values, marks=[pytest.mark.gpu, missing])


DEVICES = pytest.mark.parametrize("device", ["cpu", on_gpus(1, "cuda")])
"""Runs a test on the CPU, and on a GPU where there is one."""
PEAK = {"peak_tflops_per_device": 1e4}
"""More than any device has."""


def on_ranks(
    shape: ModelShape, layout: Layout, device: str, work: Callable[[Training], Any], **changes: Any
) -> list[Any]:
    """What `work` returns on each rank, whose training is opened as a probe opens it."""

    def run(rank: int, store: Any) -> Any:
        settings = TrainingSettings(model=shape, layout=layout, seed=0, optimizer=ADAMW, **changes)
        context = make_context(rank, layout.num_devices, store, device=device, **PEAK)
        return work(open_training(settings, context))

    return run_ranks(layout.num_devices, run, own_group=True)


def train_on(device: str, shape: ModelShape, layout: Layout) -> tuple[Any, ...]:
    """Losses and gradient norms, which every rank must agree on."""

    def work(training: Training) -> list[tuple[float, float]]:
        stats = [training.step(training.batch(index)) for index in range(STEPS)]
        return [(step.loss, step.grad_norm) for step in stats]

    results = on_ranks(shape, layout, device, work)
    assert all(result == results[0] for result in results), "ranks disagree on the global batch"
    return tuple(zip(*results[0], strict=True))


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
    found = train_on(device, shape, make_layout(precision=precision))
    expected = reference(shape, ADAMW, weights_from=device)
    told = expected.losses, expected.grad_norms
    assert excess_of_steps(found, told, tolerance(shape, precision)) <= 1
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
    found = train_on(device, shape, make_layout(**axes))
    alone = train_on(device, shape, make_layout())
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
@pytest.mark.parametrize(("num_kv_heads", "value_size"), [(8, 64), (2, 64), (8, 32)])
def test_attention_is_fused(device: str, num_kv_heads: int, value_size: int) -> None:
    """With every other kernel forbidden, the flash kernel takes what the model hands in."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def work(rank: int) -> float:
        torch.manual_seed(0)
        heads = HeadSizes(8, num_kv_heads, 64, value_size)
        qkv_BSW = torch.randn(2, 128, sum(heads.widths), device=device, dtype=dtype)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            fused = causal_attention(qkv_BSW, heads)
        with sdpa_kernel(SDPBackend.MATH):
            plain = causal_attention(qkv_BSW, heads)
        return float((fused - plain).abs().max() / plain.abs().max())

    # Sums over 128 positions; of 16 bits are the probabilities and the output, of both kernels.
    assert run_ranks(1, work)[0] < 2 * operation_error(dtype, length=128, roundings=2)


@DEVICES
def test_a_probe_says_where_its_time_went(device: str) -> None:
    layout = Layout(micro_batch_size=2, num_microbatches=1)
    request = ProbeRequest(model=WIDE, layout=layout, iterations=3)

    def work(rank: int, store: Any) -> Any:
        context = make_context(rank, 1, store, device=device, **PEAK)
        return run_probe(request, context, lambda event: None)

    result = run_ranks(1, work, own_group=True)[0]
    m = result.measurement
    assert result.environment.backend in ({"gloo"} if device == "cpu" else {"nccl", "rccl"})
    assert m.memory_kind == ("logical" if device == "cpu" else "allocated")
    assert len(m.peak_reserved_bytes_by_stage) == (0 if device == "cpu" else 1)
    parts = m.breakdown
    assert parts.total_s == pytest.approx(m.step_time_s, rel=1e-9)
    assert min(parts.compute_s, parts.optimizer_s) > 0
    assert (parts.tp_s, parts.pp_s, parts.dp_s) == (0, 0, 0)
    # The device's clock and the host's are not the same one.
    assert parts.unexplained_s > -0.01 * m.step_time_s
