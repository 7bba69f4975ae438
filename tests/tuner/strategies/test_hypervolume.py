"""Hypervolumes that are known, and one that is counted instead."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.strategies.improvement import hypervolume


@pytest.mark.parametrize(
    ("points", "volume"),
    [
        ([[2.0, 3.0]], 6.0),
        ([[1.0, 3.0], [2.0, 1.0]], 4.0),
        ([[1.0, 3.0], [2.0, 1.0], [1.0, 1.0]], 4.0),  # the last one is dominated
        ([[2.0, 3.0], [5.0, -1.0]], 6.0),
        ([[5.0, 0.0]], 0.0),
        ([[1.0, 1.0, 1.0], [2.0, 1.0, 0.5]], 1.5),
        ([[3.0], [4.0]], 4.0),
    ],
)
def test_a_front_has_the_volume_of_its_boxes(points: list[list[float]], volume: float) -> None:
    assert hypervolume(np.array(points)) == pytest.approx(volume)


def test_nothing_has_no_volume() -> None:
    assert hypervolume(np.empty((0, 2))) == 0.0


@pytest.mark.parametrize("num_objectives", [2, 3])
def test_it_is_the_share_of_random_points_that_some_point_beats(num_objectives: int) -> None:
    rng = np.random.default_rng(num_objectives)
    points = rng.random((12, num_objectives))
    drawn = rng.random((40_000, num_objectives))
    beaten = (drawn[:, None, :] <= points[None, :, :]).all(axis=2).any(axis=1).mean()
    assert hypervolume(points) == pytest.approx(beaten, abs=0.01)
