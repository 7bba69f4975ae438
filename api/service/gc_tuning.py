"""When Python looks for garbage: not while it starts, and not through what was made then."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

YOUNG_AT_MOST: Final = 5000
"""New objects after which Python looks through them, 700 by default: a page of the leaderboard has 1,000 at
a time, all of which go with it."""


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Looks for no garbage in the block, where hardly any is made: it takes a tenth of a start."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def keep_for_good() -> None:
    """Takes whatever there is to stay: modules, classes, routes. For a process that has just started.

    Each full collection would look through them, and hold every request up for as long as ten of them take.
    To collect first would cost as much for the little garbage that starting makes.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_AT_MOST, *gc.get_threshold()[1:])
