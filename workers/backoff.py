"""Pauses between the tries of something that fails."""

from __future__ import annotations


class Backoff:
    """Pauses of which each is twice as long as the one before, up to a limit."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self.next_s = first_s

    def take(self) -> float:
        """Returns the next pause, and makes the one after it longer."""
        pause_s = self.next_s
        self.next_s = min(2 * pause_s, self._longest_s)
        return pause_s

    def reset(self) -> None:
        self.next_s = self._first_s
