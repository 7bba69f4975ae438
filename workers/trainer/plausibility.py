"""No device does more than its peak: a result that says so is wrong, and is refused."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

from workers.trainer.collectives import barrier
from workers.trainer.errors import ResultImplausibleError
from workers.trainer.peak import MEASURED, matmul_peak
from workers.trainer.throughput import Throughput


def plausible(speed: Throughput, peak_source: str, *, device: torch.device) -> Throughput:
    """The same speed, over a peak that it does not pass; all ranks call this, and rank 0 decides.

    A peak that was measured, and is passed, is measured again on every rank at once: something
    else may have been running the first time. The better of both counts.

    FLOPs are those of equation 3, which counts attention over the whole square, while causal
    kernels skip half of it. An honest run could pass its peak by that alone where attention is most
    of the work (a sequence of many times six hidden sizes) and kernels run near the peak; it would
    be refused here, as its MFU means nothing.

    Raises:
        ResultImplausibleError: on rank 0, the hardware FLOP/s are above the peak.
    """
    if _any_rank(speed.hfu > 1 and peak_source.startswith(MEASURED), device):
        again_tflops = _measured_again(speed, device)
        best_tflops = max(speed.peak_tflops_per_device, again_tflops)
        speed = replace(speed, peak_tflops_per_device=best_tflops)
    if speed.hfu > 1:
        raise ResultImplausibleError(
            f"{speed.hardware_tflops_per_device:.4g} TFLOP/s a device were counted, over its peak "
            f"of {speed.peak_tflops_per_device:.4g} ({peak_source}); the peak, the clock or the "
            "counted work is wrong: state the peak of this device in the cluster's description, or "
            "run on a machine that is not busy"
        )
    return speed


def _any_rank(wanted: bool, device: torch.device) -> bool:
    flag = torch.tensor(float(wanted), device=device)
    dist.all_reduce(flag, op=ReduceOp.MAX)
    return bool(flag.item())


def _measured_again(speed: Throughput, device: torch.device) -> float:
    """The median of what every rank measures while all of them do."""
    figures = torch.zeros(speed.layout.num_devices, dtype=torch.float64, device=device)
    barrier(device)
    figures[dist.get_rank()], _ = matmul_peak(device.type, speed.layout.precision)
    dist.all_reduce(figures)
    measured: list[float] = figures.tolist()
    return median(measured)
