"""Fits a link's latency and bandwidth to timings of messages of many sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from layout_tuner.array_types import Floats

_ROUNDS: Final = 60
_SMALLEST_GAIN: Final = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFit:
    """The fit seconds = latency + bytes / bandwidth."""

    latency_s: float
    """Time of an empty message."""
    bytes_per_s: float
    """Bandwidth of very large messages."""
    error: float
    """Root mean square of log(fitted / measured), over all sizes alike: 0.1 is 10 %."""


def fit_link(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> LinkFit:
    """Least squares on the logarithm of the time: small messages count as much as large ones.

    At least two of the sizes must differ.

    The method is Levenberg-Marquardt over the logarithms of both constants, which keeps them
    positive. For timings that do not grow with the size, the bandwidth is meaningless and very
    large.

    Raises:
        ValueError: fewer than two sizes, or a time that is not positive.
    """
    sizes, times = np.asarray(sizes_bytes, np.float64), np.asarray(seconds, np.float64)
    if len(set(sizes_bytes)) < 2 or np.any(times <= 0) or np.any(sizes <= 0):
        raise ValueError(f"{len(sizes)} timings of {sorted(set(sizes_bytes))} bytes fit no line")
    smallest, largest = int(sizes.argmin()), int(sizes.argmax())
    constants = np.log([times[smallest], times[largest] / sizes[largest]])
    damping, loss = 1e-3, _loss(constants, sizes, times)
    for _ in range(_ROUNDS):
        step = _step(constants, sizes, times, damping)
        tried = _loss(constants + step, sizes, times)
        if tried < loss:
            gained, constants, loss, damping = loss - tried, constants + step, tried, damping / 4
            if gained < _SMALLEST_GAIN:
                break
        else:
            damping *= 8
    latency_s, seconds_a_byte = np.exp(constants)
    return LinkFit(
        latency_s=float(latency_s),
        bytes_per_s=float(1 / seconds_a_byte),
        error=float(np.sqrt(loss / len(times))),
    )


def _residuals(constants: Floats, sizes: Floats, times: Floats) -> Floats:
    latency_s, seconds_a_byte = np.exp(constants)
    return np.asarray(np.log(latency_s + seconds_a_byte * sizes) - np.log(times))


def _loss(constants: Floats, sizes: Floats, times: Floats) -> float:
    return float(np.sum(_residuals(constants, sizes, times) ** 2))


def _step(constants: Floats, sizes: Floats, times: Floats, damping: float) -> Floats:
    latency_s, seconds_a_byte = np.exp(constants)
    whole = latency_s + seconds_a_byte * sizes
    slopes = np.stack([latency_s / whole, seconds_a_byte * sizes / whole], axis=1)
    normal = slopes.T @ slopes
    normal += damping * (np.diag(np.diag(normal)) + 1e-9 * np.eye(2))
    return np.asarray(-np.linalg.solve(normal, slopes.T @ _residuals(constants, sizes, times)))
