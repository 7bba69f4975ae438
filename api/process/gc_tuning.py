"""Tuning of Python's garbage collector: off during the start, and rarer after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

YOUNG_AT_MOST: Final = 5000
"""New objects between collections of the youngest generation; Python's default is 700. A page of
the leaderboard has 1,000 objects at a time, which are all freed with it."""


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Turns collection off in the block. In a start it would take a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def keep_for_good() -> None:
    """Excludes all objects of a process that has just started from collection: modules, routes.

    A full collection would visit them, and delay a request by the time of about ten requests. They
    are not collected before: that takes as long, and a start makes little garbage.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_AT_MOST, *gc.get_threshold()[1:])
