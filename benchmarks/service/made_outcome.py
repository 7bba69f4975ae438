"""A complete outcome as a worker posts it, made from the request of its lease; fast to make.

It has ten timed iterations after the warm-up, the peak of each stage, a breakdown, an environment
and the tail of a log. The losses are the same for every layout of the campaign, so that none
deviates.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Final

from layout_tuner.predictions.statistics.step_times import quartiles
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.throughput import Throughput

LOG_LINES: Final = 50
"""As many as a worker sends at most."""

_LOG_TAIL: Final = "\n".join(
    f"[rank {line % 8}] iteration {line // 4}: loss {10 - line / 100:.4f}, grad norm 1.52, "
    f"step {0.8 + line / 1000:.3f} s, 12.1 GiB live"
    for line in range(LOG_LINES)
)
_ENVIRONMENT: Final = {
    "host": "node-0001",
    "device": "MI250X GCD",
    "backend": "rccl",
    "python_version": "3.11.7",
    "torch_version": "2.7.0+rocm6.3",
    "numpy_version": "2.4.6",
    "git_revision": "0123456789abcdef0123456789abcdef01234567",
}


def completed_outcome(request: Mapping[str, Any], chance: random.Random) -> dict[str, Any]:
    """The outcome of a probe that completed.

    Args:
        request: the `ProbeRequest` document of its lease.
        chance: what its step time is drawn from.
    """
    step_time_s = chance.uniform(0.5, 2.0)
    iterations = [
        _iteration(index, request["warmup"], step_time_s)
        for index in range(request["warmup"] + request["iterations"])
    ]
    return {
        "state": "completed",
        "reason": None,
        "message": "",
        "node": "",
        "log_tail": _LOG_TAIL,
        "duration_s": 15 * step_time_s,
        "environment": _ENVIRONMENT,
        "measurement": {
            **_figures(request, [each["step_time_s"] for each in iterations[request["warmup"] :]]),
            **_memory(request),
            "iterations": iterations,
            "iterations_asked": request["iterations"],
        },
    }


def _figures(request: Mapping[str, Any], timed_s: list[float]) -> dict[str, Any]:
    """They use a quarter of the device's peak."""
    layout, model = (
        Layout.from_mapping(request["layout"]),
        ModelShape.from_mapping(request["model"]),
    )
    tokens, (q25_s, step_time_s, q75_s) = (
        layout.global_batch_size * model.seq_length,
        quartiles(timed_s),
    )
    speed = Throughput(
        model=model,
        layout=layout,
        tokens_per_s=tokens / step_time_s,
        peak_tflops_per_device=1.0,
    )
    tflops, executed_tflops = speed.model_tflops_per_device, speed.hardware_tflops_per_device
    return {
        "step_time_s": step_time_s,
        "step_time_q25_s": q25_s,
        "step_time_q75_s": q75_s,
        "tokens_per_step": tokens,
        "tokens_per_s": speed.tokens_per_s,
        "tokens_per_s_per_device": speed.tokens_per_s_per_device,
        "model_tflops_per_device": tflops,
        "hardware_tflops_per_device": executed_tflops,
        "peak_tflops_per_device": 4 * executed_tflops,
        "peak_source": "table (MI250X GCD, bf16)",
        "mfu": tflops / (4 * executed_tflops),
        "hfu": 0.25,
        "oversubscribed": False,
        "warmup_settled": True,
        "breakdown": _breakdown(step_time_s),
    }


def _memory(request: Mapping[str, Any]) -> dict[str, Any]:
    """Five eighths of the device, and reserved a little more."""
    most = request["memory_limit_bytes"] or 64 << 30
    peaks = [most // 8 * 5 - stage for stage in range(request["layout"]["pp"])]
    return {
        "peak_memory_bytes": peaks[0],
        "peak_memory_bytes_by_stage": peaks,
        "peak_reserved_bytes_by_stage": [peak + most // 64 for peak in peaks],
        "memory_kind": "allocated",
    }


def _iteration(index: int, warmup: int, step_time_s: float) -> dict[str, Any]:
    return {
        "index": index,
        "kind": "warmup" if index < warmup else "timed",
        "step_time_s": step_time_s * (1 + 0.01 * (index % 3 - 1)),
        "loss": 10.0 - 0.1 * index,
        "grad_norm": 1.5,
    }


def _breakdown(step_time_s: float) -> dict[str, float]:
    shares = {"compute": 0.5, "tp": 0.2, "pp": 0.1, "dp": 0.1, "optimizer": 0.0625}
    parts = {f"{name}_s": share * step_time_s for name, share in shares.items()}
    return parts | {"unexplained_s": step_time_s - sum(parts.values())}
