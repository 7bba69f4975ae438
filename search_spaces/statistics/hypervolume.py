"""The hypervolume of a front: the volume of all that one of its points is better than."""

from __future__ import annotations

import numpy as np

from search_spaces.arrays import Floats


def hypervolume(points: Floats) -> float:
    """The volume between the origin and the points (Zitzler and Thiele 1998), by slices.

    Args:
        points: one row a point, one column an objective, more is better; points that are not above
            the origin in every objective add nothing.
    """
    above = points[(points > 0).all(axis=1)]
    if not len(above):
        return 0.0
    if above.shape[1] == 1:
        return float(above.max())
    above = above[np.argsort(-above[:, -1], kind="stable")]
    heights = above[:, -1] - np.append(above[1:, -1], 0.0)
    if above.shape[1] == 2:
        return float(heights @ np.maximum.accumulate(above[:, 0]))
    return float(
        sum(
            height * hypervolume(above[: count + 1, :-1])
            for count, height in enumerate(heights)
            if height > 0
        )
    )
