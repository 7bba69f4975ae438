"""The peak of a device: the denominator of mfu and hfu, and the bound of a plausible result."""

# ruff: noqa: N806 (tensors carry their shape in the name: N is the side of a square matrix)

from __future__ import annotations

import time
from dataclasses import replace
from statistics import fmean, median
from typing import Final

import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

from layout_tuner.search_spaces.clusters.device_peaks import DEVICE_PEAKS, known_device
from layout_tuner.search_spaces.layouts.layout import Precision
from layout_tuner.search_spaces.throughput import MEASURED_PEAK, Throughput
from layout_tuner.workers.trainer.comm.collectives import barrier
from layout_tuner.workers.trainer.errors import ResultImplausibleError
from layout_tuner.workers.trainer.model.matrix_products import linear
from layout_tuner.workers.trainer.model.precision import COMPUTE_DTYPES

_SIZES: Final = {"cpu": (256, 512, 1024), "cuda": (4096, 8192)}
"""Sides of the square matrices. A small product fits into one time slice of a busy core: the
smallest takes half a millisecond of a slow one."""
_MEASURE_FOR_S: Final = 0.1
_COUNTS_AGAIN: Final = 3
"""How often a peak that was passed is measured again."""


def matmul_peak(device: str, precision: Precision, *, again: bool = False) -> tuple[float, str]:
    """The matrix peak of one device in TFLOP/s, and its source.

    The peak of a GPU is looked up by its name. That of a CPU or an unknown GPU is the best rate of
    repeated square matrix products, with the threads of the calling process. `again`: the first
    measurement was too low, so the best of several counts.
    """
    known = known_device(torch.cuda.get_device_name()) if device == "cuda" else None
    if known is not None and precision in DEVICE_PEAKS[known]:
        return DEVICE_PEAKS[known][precision] / 1e12, f"table ({known}, {precision})"
    counts = _COUNTS_AGAIN if again else 1
    tflops = max(measured_tflops(device, precision)[0] for _ in range(counts))
    threads = torch.get_num_threads() if device == "cpu" else 1
    counted = f", {threads} threads" if threads > 1 else ""
    return tflops, f"{MEASURED_PEAK} ({precision}{counted})"


def measured_tflops(device: str, precision: Precision) -> tuple[float, float]:
    """The best and the usual rate of repeated square matrix products, in TFLOP/s.

    The best rate shows what the device can do, the usual one what it does beside other load: the
    mean of a core, the median of a GPU.
    """
    rates = [_measured_tflops(device, precision, size) for size in _SIZES[device]]
    return max(best for best, _ in rates), max(usual for _, usual in rates)


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
    # On a core that is shared, many short products run whole in this process's turns, and a few
    # wait for the next turn: only the mean contains the waiting. A GPU may stall once without being
    # slow, which the median leaves out.
    usual_s = fmean(seconds) if device == "cpu" else median(seconds)
    flops = 2.0 * float(size) ** 3
    return flops / min(seconds) / 1e12, flops / usual_s / 1e12


def refuse_implausible(speed: Throughput, peak_source: str, *, device: torch.device) -> Throughput:
    """Refuses a speed above the device's peak; all ranks call it, rank 0's speed decides.

    If a measured peak is exceeded, all ranks measure it again at the same time, since other load
    may have lowered the first measurement. The best of all counts.

    FLOPs are counted by equation 3 of arXiv:2104.04473, which counts attention over the whole
    square, while causal kernels skip half of it. A correct run could therefore exceed the peak if
    attention is most of the work (sequences of many times six hidden sizes) and kernels run near
    the peak. It is refused here, since its MFU means nothing.

    Communicates: an all-reduce over all ranks; for a second measurement, another and a barrier.

    Returns:
        The speed, with the better of the two peaks.

    Raises:
        ResultImplausibleError: on rank 0, the hardware FLOP/s are above the peak.
    """
    measure_again = torch.tensor(
        float(speed.hfu > 1 and peak_source.startswith(MEASURED_PEAK)), device=device
    )
    dist.all_reduce(measure_again, op=ReduceOp.MAX)
    if measure_again.item():
        best_tflops = max(speed.peak_tflops_per_device, _measured_again(speed, device))
        speed = replace(speed, peak_tflops_per_device=best_tflops)
    if speed.hfu > 1:
        raise ResultImplausibleError(
            f"{speed.hardware_tflops_per_device:.4g} TFLOP/s a device were counted, over its peak "
            f"of {speed.peak_tflops_per_device:.4g} ({peak_source}); the peak, the clock or the "
            "counted work is wrong: state the peak of this device in the cluster's description, or "
            "run on a machine that is not busy"
        )
    return speed


def _measured_again(speed: Throughput, device: torch.device) -> float:
    """The median of the ranks' peaks, measured on all ranks at the same time."""
    figures = torch.zeros(speed.layout.num_devices, dtype=torch.float64, device=device)
    barrier(device)
    figures[dist.get_rank()], _ = matmul_peak(device.type, speed.layout.precision, again=True)
    dist.all_reduce(figures)
    measured: list[float] = figures.tolist()
    return median(measured)
