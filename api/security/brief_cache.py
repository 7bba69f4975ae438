"""Answers of the database to each request's question, which are used for a second."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final, Generic, TypeVar

from starlette.concurrency import run_in_threadpool

USED_FOR_S: Final = 1.0
"""Seconds for which an answer of the database is used: revocation by another process may take that
long to be noticed."""

MAX_REMEMBERED: Final = 4096
"""Cached answers; the one that was used longest ago is removed first."""

Value = TypeVar("Value")


@dataclass(kw_only=True, slots=True)
class _Answer(Generic[Value]):
    value: Value
    since: float
    """Monotonic seconds."""


class BriefCache(Generic[Value]):
    """Looks values up by a hash. Not thread-safe: the event loop uses it."""

    def __init__(
        self, look_up: Callable[[str], Value | None], *, ticks: Callable[[], float] = monotonic
    ) -> None:
        """An empty cache.

        Args:
            look_up: asks the database; it runs in a thread.
            ticks: monotonic seconds.
        """
        self._look_up, self._ticks = look_up, ticks
        self._answers: OrderedDict[str, _Answer[Value]] = OrderedDict()
        self._num_forgotten = 0

    async def find(self, hashed: str) -> Value | None:
        """The value of this hash; None: there is none, which is not cached.

        Raises:
            DatabaseUnavailableError: the database cannot be asked.
        """
        answer = self._answers.get(hashed)
        now = self._ticks()
        if answer is not None:
            if now - answer.since < USED_FOR_S:
                return answer.value
            # Concurrent requests use the old answer: one query a second for any number of them.
            answer.since = now
        forgotten = self._num_forgotten
        value = await run_in_threadpool(self._look_up, hashed)
        if value is None:
            self._answers.pop(hashed, None)
        elif forgotten == self._num_forgotten:  # else it may have ended during the query
            self._answers[hashed] = _Answer(value=value, since=now)
            self._answers.move_to_end(hashed)
            while len(self._answers) > MAX_REMEMBERED:
                self._answers.popitem(last=False)
        return value

    def forget(self, is_meant: Callable[[Value], bool]) -> None:
        """Removes values, because they are no longer valid."""
        self._num_forgotten += 1
        for hashed, answer in list(self._answers.items()):
            if is_meant(answer.value):
                del self._answers[hashed]

    def forget_hash(self, hashed: str) -> None:
        """Removes the value of a hash, because it is no longer valid."""
        self._num_forgotten += 1
        self._answers.pop(hashed, None)
