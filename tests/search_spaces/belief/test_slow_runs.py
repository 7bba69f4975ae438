"""Runs that were slowed down: how likely, and how little they count."""

from __future__ import annotations

import numpy as np
import pytest

from search_spaces.belief.slow_runs import (
    MEAN_EXCESS,
    SLOW_SHARE,
    run_weights,
    sound_probability,
)


def test_the_probability_is_that_of_the_mixture() -> None:
    """Counted in a sample of the mixture itself."""
    rng = np.random.default_rng(0)
    count = 2_000_000
    is_slow = rng.random(count) < SLOW_SHARE
    off = np.where(is_slow, rng.exponential(MEAN_EXCESS, count), rng.normal(0.0, 0.1, count))
    for low, high in ((0.02, 0.04), (0.15, 0.17), (0.24, 0.26)):
        seen = (off > low) & (off < high)
        counted = 1.0 - is_slow[seen].mean()
        stated = float(sound_probability(np.array([(low + high) / 2]), 0.1)[0])
        assert stated == pytest.approx(counted, abs=0.02)


def test_a_run_that_is_faster_than_predicted_was_not_slowed_down() -> None:
    assert sound_probability(np.array([-9.0, -0.1]), 0.1).tolist() == [1.0, 1.0]
    weights = run_weights(np.array([-9.0, -0.1]), 0.1)
    assert weights[0] < 0.01 < 0.9 < weights[1], "but it may be an outlier of another kind"


def test_a_far_slower_run_hardly_counts_and_nothing_overflows() -> None:
    off = np.array([0.0, 0.2, 1.0, 50.0, 1e6])
    with np.errstate(all="raise", under="ignore"):
        weights = run_weights(off, np.full(5, 0.02))
    assert np.all(np.diff(weights) <= 0)
    assert weights[0] > 0.9
    assert 0.0 < weights[-1] <= weights[2] < 1e-3
