"""Latency and bandwidth from timings."""

from __future__ import annotations

import random

import pytest

from search_spaces.estimates.link_fit import fit_link

SIZES = [float(1 << power) for power in range(10, 25, 2)]


def timings(latency_s: float, bytes_per_s: float) -> list[float]:
    return [latency_s + size / bytes_per_s for size in SIZES]


def test_a_line_without_noise_gives_its_constants_back() -> None:
    for latency_s, bytes_per_s in ((1e-6, 1e11), (60e-6, 2e9), (5e-3, 3e8), (1e-5, 1e12)):
        fit = fit_link(SIZES, timings(latency_s, bytes_per_s))
        assert fit.latency_s == pytest.approx(latency_s, rel=1e-3)
        assert fit.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)
        assert fit.error < 1e-3
    with pytest.raises(ValueError, match="fit no line"):
        fit_link([1024.0, 1024.0], [1e-3, 1.1e-3])


def test_noise_of_a_tenth_moves_the_constants_by_no_more_and_shows_in_the_error() -> None:
    rng = random.Random(5)
    noisy = [seconds * rng.lognormvariate(0, 0.1) for seconds in timings(50e-6, 1e9)]
    fit = fit_link(SIZES, noisy)
    assert fit.latency_s == pytest.approx(50e-6, rel=0.15)
    assert fit.bytes_per_s == pytest.approx(1e9, rel=0.15)
    assert 0.03 < fit.error < 0.2
    jumps = [
        t * (10 if size > 1e5 else 1) for size, t in zip(SIZES, timings(1e-3, 1e9), strict=True)
    ]
    assert fit_link(SIZES, jumps).error > 0.3
