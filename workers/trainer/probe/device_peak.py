"""The peak of a device: the denominator of mfu and hfu."""

# ruff: noqa: N806 (tensors carry their shape in the name: N is the side of a square matrix)

from __future__ import annotations

import time
from statistics import median
from typing import Final

import torch

from search_spaces.layout import Precision
from workers.trainer.precision import COMPUTE_DTYPES
from workers.trainer.products import linear

DENSE_PEAK_TFLOPS: Final[dict[str, dict[Precision, float]]] = {
    "V100": {"fp32": 15.7, "fp16": 125.0},
    "A100": {"fp32": 19.5, "bf16": 312.0, "fp16": 312.0},
    "H100 PCIe": {"fp32": 51.0, "bf16": 756.0, "fp16": 756.0},
    "H100 NVL": {"fp32": 60.0, "bf16": 835.5, "fp16": 835.5},
    "H100": {"fp32": 66.9, "bf16": 989.4, "fp16": 989.4},
    "H200 NVL": {"fp32": 60.0, "bf16": 835.5, "fp16": 835.5},
    "H200": {"fp32": 66.9, "bf16": 989.4, "fp16": 989.4},
    "MI250X": {"fp32": 47.9, "bf16": 191.5, "fp16": 191.5},
    "MI300X": {"fp32": 163.4, "bf16": 1307.4, "fp16": 1307.4},
}
"""Dense matrix peaks in TFLOP/s of one device, from the vendors' data sheets (a GCD for MI250X)."""

MEASURED: Final = "measured matmul"
"""How the source of a peak begins that is a measurement, which a busy machine makes too low."""

_SIZES: Final = {"cpu": (512, 1024), "cuda": (4096, 8192)}
"""Sides of the squares; the small one fits between two turns of a busy core's scheduler."""
_MEASURE_FOR_S: Final = 0.1


def matmul_peak(device: str, precision: Precision) -> tuple[float, str]:
    """The matrix peak of one device in TFLOP/s, and where the figure comes from.

    A GPU's is looked up by its name; a CPU's, and that of a GPU which no table knows, is the best
    of repeated square matrix products, on the threads that the calling process has.
    """
    known = known_device(torch.cuda.get_device_name()) if device == "cuda" else None
    if known is not None and precision in DENSE_PEAK_TFLOPS[known]:
        return DENSE_PEAK_TFLOPS[known][precision], f"table ({known}, {precision})"
    tflops, _ = measured_tflops(device, precision)
    return tflops, f"{MEASURED} ({precision})"


def measured_tflops(device: str, precision: Precision) -> tuple[float, float]:
    """The best and the usual rate of repeated square matrix products, in TFLOP/s.

    The best is what the device can do; the usual one, a median, is what it gets done with whatever
    else runs there.
    """
    rates = [_measured_tflops(device, precision, size) for size in _SIZES[device]]
    return max(best for best, _ in rates), max(usual for _, usual in rates)


def known_device(name: str) -> str | None:
    """The table's entry for a device of this name, as torch gives it; the most exact one."""
    return max((known for known in DENSE_PEAK_TFLOPS if known in name), key=len, default=None)


def _measured_tflops(device: str, precision: Precision, size: int) -> tuple[float, float]:
    a_NN = torch.randn(size, size, device=device).to(COMPUTE_DTYPES[precision])
    b_NN = torch.randn(size, size, device=device).to(COMPUTE_DTYPES[precision])
    linear(a_NN, b_NN)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds: list[float] = []
    started = time.perf_counter()
    while len(seconds) < 3 or time.perf_counter() - started < _MEASURE_FOR_S:
        before = time.perf_counter()
        linear(a_NN, b_NN)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - before)
    flops = 2.0 * float(size) ** 3
    return flops / min(seconds) / 1e12, flops / median(seconds) / 1e12
