"""Waiting for what another process, or another thread, does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import pytest

_LONGEST_LOOK_S: Final = 1.0


def wait_until(what: str, condition: Callable[[], Any], patience_s: float = 60.0) -> Any:
    """The first true answer of `condition`; fails with `what` when there is none in time.

    The time from one look to the next counts at most one second, since a machine that tests share
    can stand still for longer than their patience.
    """
    left_s, looked_at, pause_s = patience_s, time.monotonic(), 0.005
    while not (answer := condition()):
        now = time.monotonic()
        left_s -= min(now - looked_at, _LONGEST_LOOK_S)
        if left_s < 0:
            pytest.fail(f"waited {patience_s:g} s in vain until {what}")
        looked_at = now
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
    return answer
