"""The zygote's line to its agent: what can wait goes in company, so that it disturbs no rank."""

from __future__ import annotations

import time
from typing import Final

from workers.json_lines import Document, JsonLines

HOLD_S: Final = 0.5
"""Seconds between two lots of iterations: news for people, and for heartbeats of seconds."""


class PacedLine:
    """Sends events in their order: iterations twice a second, everything else at once.

    Each event that arrives wakes the agent, the raylet and the worker, on cores that the ranks are
    measured on: sent one by one, a campaign's iterations of milliseconds cost more than the
    probes of a machine without Ray.

    Args:
        line: to the agent.
        hold_s: seconds between two lots of iterations.
    """

    def __init__(self, line: JsonLines, hold_s: float = HOLD_S) -> None:
        self._line = line
        self._hold_s = hold_s
        self._held: list[Document] = []
        self._next_lot_at = 0.0

    def send(self, event: Document) -> None:
        """Sends an event, or keeps it for the next lot.

        Raises:
            OSError: the other end is gone.
        """
        self._held.append(event)
        if not _can_wait(event) or time.monotonic() >= self._next_lot_at:
            self._flush()

    def flush_if_due(self) -> None:
        """Sends what has been held for long enough.

        Raises:
            OSError: the other end is gone.
        """
        if self._held and time.monotonic() >= self._next_lot_at:
            self._flush()

    def due_in_ms(self) -> int | None:
        """Milliseconds until something must be sent; None: nothing is held."""
        if not self._held:
            return None
        return max(0, int(1e3 * (self._next_lot_at - time.monotonic())) + 1)

    def _flush(self) -> None:
        events, self._held = self._held, []
        if any(map(_can_wait, events)):
            self._next_lot_at = time.monotonic() + self._hold_s
        self._line.send(*events)


def _can_wait(event: Document) -> bool:
    return bool(event["event"] == "report" and event["document"]["event"] == "iteration")
