"""Logs an outage with two lines: one when it starts and one when it ends."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from layout_tuner.errors import LayoutTunerError

MOST_STARTS: Final = 5
"""Most outages that are logged within a minute; further ones are counted."""
START_WINDOW_S: Final = 60.0


class OutageLog:
    """Logs one line when something starts to fail and one when it works again.

    It is thread-safe: all threads that use the same resource share one instance.
    """

    def __init__(
        self,
        log: logging.Logger,
        what: str,
        *,
        most_reasons: int = 5,
        settled_after_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts without an outage of `what`, the subject of a sentence.

        Of an outage, at most `most_reasons` causes are logged; a success ends it when there was no
        failure for `settled_after_s`.
        """
        self._log, self._what, self._most_reasons, self._clock = log, what, most_reasons, clock
        self._settled_after_s = settled_after_s
        self._lock = threading.Lock()
        self._began_at: float | None = None
        self._failed_at = 0.0
        self._worked_at: float | None = None
        """When something first worked since the last failure."""
        self._num_failures = 0
        self._parts: set[str] = set()
        """The parts of the resource that have failed in this outage."""
        self._written: set[str] = set()
        """Causes of this outage that were logged."""
        self._starts: deque[float] = deque()
        self._num_unwritten = 0

    def failed(
        self,
        reason: str,
        error: BaseException | None = None,
        *,
        cause: str | None = None,
        part: str = "",
    ) -> None:
        """Records a failure, and logs it if it starts an outage.

        A failure whose error another outage log has written is left out.

        Args:
            reason: what failed; without an error, also why.
            error: the reason; its traceback is logged unless it is an error of ours.
            cause: the kind of the reason, of which one is logged; None: the reason itself.
            part: the part of the resource that failed; a success of another part ends no outage.
        """
        trace = None
        if isinstance(error, LayoutTunerError) and error.is_logged:
            return
        if error is not None:
            reason = f"{reason}: {str(error) or type(error).__name__}"
            trace = None if isinstance(error, LayoutTunerError) else error
        with self._lock:
            self._failed_at, self._worked_at = self._clock(), None
            if self._began_at is None:
                self._began_at, self._num_failures = self._failed_at, 0
                self._parts, self._written = set(), set()
            self._parts.add(part)
            self._num_failures += 1
            if (cause or reason) in self._written or len(self._written) >= self._most_reasons:
                return
            if not self._written and not self._may_write():
                return
            self._written.add(cause or reason)
            unwritten, self._num_unwritten = self._num_unwritten, 0
        before = f" ({unwritten} shorter outages before it were not written)" if unwritten else ""
        self._log.warning(
            "%s; the next line about this is written when it works%s",
            reason,
            before,
            exc_info=trace,
        )

    def worked(self, part: str = "") -> None:
        """Records a success, and logs the end of an outage whose start was logged."""
        if self._began_at is None:
            return
        with self._lock:
            if self._began_at is None or part not in self._parts:
                return
            now = self._clock()
            if self._worked_at is None:
                self._worked_at = now
            if now - self._failed_at < self._settled_after_s:
                return
            lasted_s, number = self._worked_at - self._began_at, self._num_failures
            self._began_at = None
            if not self._written:
                self._num_unwritten += 1
                return
        self._log.warning(
            "%s works again after %.1f s (failed attempts: %d)", self._what, lasted_s, number
        )

    def _may_write(self) -> bool:
        """Whether fewer than `MOST_STARTS` outages began within the last minute."""
        now = self._clock()
        while self._starts and now - self._starts[0] >= START_WINDOW_S:
            self._starts.popleft()
        if len(self._starts) >= MOST_STARTS:
            return False
        self._starts.append(now)
        return True
