"""A complete outcome as a worker posts it, made from the request of its lease; fast to make.

It has ten timed iterations after the warm-up, the peak of each stage, a breakdown, an environment
and the tail of a log. The losses are the same for every layout of the campaign, so that none
deviates.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Final

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
_PEAK_TFLOPS: Final = 191.5


def completed_outcome(
    request: Mapping[str, Any], sequence_length: int, chance: random.Random
) -> dict[str, Any]:
    """The outcome of a probe that completed.

    Args:
        request: the `ProbeRequest` document of its lease.
        sequence_length: tokens of one sample.
        chance: what its step time is drawn from.
    """
    layout = request["layout"]
    devices = layout["tp"] * layout["pp"] * layout["dp"]
    batch = layout["dp"] * layout["micro_batch_size"] * layout["num_microbatches"]
    step_time_s = chance.uniform(0.5, 2.0)
    return {
        "state": "completed",
        "reason": None,
        "message": "",
        "node": "",
        "log_tail": _LOG_TAIL,
        "duration_s": 15 * step_time_s,
        "environment": _ENVIRONMENT,
        "measurement": {
            **_figures(batch * sequence_length, devices, step_time_s),
            **_memory(layout["pp"]),
            "iterations": [
                _iteration(index, request["warmup"], step_time_s)
                for index in range(request["warmup"] + request["iterations"])
            ],
            "breakdown": _breakdown(step_time_s),
        },
    }


def _figures(tokens: int, devices: int, step_time_s: float) -> dict[str, Any]:
    tflops = 20.0 / step_time_s
    return {
        "step_time_s": step_time_s,
        "step_time_q25_s": 0.99 * step_time_s,
        "step_time_q75_s": 1.01 * step_time_s,
        "tokens_per_step": tokens,
        "tokens_per_s": tokens / step_time_s,
        "tokens_per_s_per_device": tokens / step_time_s / devices,
        "model_tflops_per_device": tflops,
        "hardware_tflops_per_device": 1.2 * tflops,
        "peak_tflops_per_device": _PEAK_TFLOPS,
        "peak_source": "table (MI250X GCD, bf16)",
        "mfu": tflops / _PEAK_TFLOPS,
        "hfu": 1.2 * tflops / _PEAK_TFLOPS,
        "oversubscribed": False,
        "warmup_settled": True,
    }


def _memory(stages: int) -> dict[str, Any]:
    peaks = [(40 << 30) - stage for stage in range(stages)]
    return {
        "peak_memory_bytes": peaks[0],
        "peak_memory_bytes_by_stage": peaks,
        "peak_reserved_bytes_by_stage": [peak + (1 << 30) for peak in peaks],
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
