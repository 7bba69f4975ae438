"""Pauses between the tries of something that fails."""

from __future__ import annotations

from typing import Final

HEALTHY_AFTER_S: Final = 60.0
"""What ran this long before it failed can work, so that the next pause is short."""


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

    def take_after(self, ran_s: float) -> float:
        """The pause after something that has run for so long."""
        if ran_s > HEALTHY_AFTER_S:
            self.reset()
        return self.take()

    def reset(self) -> None:
        self.next_s = self._first_s
