"""What dead keepers left: found among the zygote's children, and ended while other groups run."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final

from workers.processes import OnReaped, children, kill, reap

_FIRST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.02
_PAUSE_ONCE_GIVEN_UP_S: Final = 1.0


class Orphans:
    """Ends all children of the zygote but its keepers, bit by bit, so that nobody waits for it.

    A living process below a dead keeper has a forebear, or is itself, among the zygote's children,
    and no child vanishes before it is reaped here: one look that finds none is proof.

    Args:
        give_up_after_s: seconds after which there is a `problem`; the attempts go on.
    """

    def __init__(self, *, give_up_after_s: float) -> None:
        self._give_up_after_s = give_up_after_s
        self._since = 0.0
        self._pause_s = 0.0
        self.next_look_at: float | None = None
        """On the monotonic clock; None: there are no orphans."""
        self.problem: str | None = None
        """Who can't be ended, once that is clear."""

    @property
    def looked_for(self) -> bool:
        """Whether there may be some."""
        return self.next_look_at is not None

    def look(self) -> None:
        """A keeper has died: from now on there may be some."""
        self._since = self.next_look_at = time.monotonic()
        self._pause_s = _FIRST_PAUSE_S
        self.problem = None

    def tend(self, *, keepers: Collection[int], on_reaped: OnReaped) -> None:
        """Kills and reaps, if it is time to.

        Args:
            keepers: pids of the children that are none.
            on_reaped: is told of each child that was reaped, keepers included.
        """
        now = time.monotonic()
        if self.next_look_at is None or now < self.next_look_at:
            return
        found = set(children()) - set(keepers)
        if not found:
            self.next_look_at = self.problem = None
            return
        self.next_look_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        if now > self._since + self._give_up_after_s:
            self.problem = (
                f"processes {sorted(found)} are still there {self._give_up_after_s:g} s after they "
                "were killed; look for a hung device or file system on this node"
            )
            self.next_look_at = now + _PAUSE_ONCE_GIVEN_UP_S
        kill(found)
        reap(on_reaped)
