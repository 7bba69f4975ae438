"""Outages of the database: log lines, and waiting for it at the start of a process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from results_db.errors import DatabaseUnavailableError, ResultsDbError
from search_spaces.connection.outage_log import OutageLog

SETTLED_AFTER_S: Final = 0.5
"""An outage ends after so long without a failure: a stopping server closes its connections one by
one."""

MOST_REASONS: Final = 5
"""Different reasons that are logged for one outage of a loop."""

_log: Final = logging.getLogger(__name__)


class DatabaseOutage:
    """The outage log of a process, to which all its transactions report."""

    def __init__(self, shown_url: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines = OutageLog(_log, f"the database {shown_url}", clock=clock)
        self._clock = clock
        self._lock = threading.Lock()
        self._is_open = False
        self._failed_at = 0.0
        self._only_writes = False
        """Whether only writing fails, as on a full disk; then only a successful write ends the
        outage."""

    def failed(self, error: DatabaseUnavailableError, *, writes: bool) -> None:
        """Reports a failed transaction."""
        with self._lock:
            self._only_writes = writes and (self._only_writes or not self._is_open)
            self._is_open, self._failed_at = True, self._clock()
            self._lines.failed(str(error))

    def worked(self, *, writes: bool) -> None:
        """Reports a transaction that worked."""
        if not self._is_open:
            return
        with self._lock:
            has_settled = self._clock() - self._failed_at >= SETTLED_AFTER_S
            if has_settled and (writes or not self._only_writes):
                self._is_open = False
                self._lines.worked()


class LoopOutage:
    """The outage log of a loop: one line when turns begin to fail, one when they work again."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        """Creates the log.

        Args:
            log: where the lines are written.
            what: the loop, as the subject of a sentence.
        """
        self._lines = OutageLog(log, what, most_reasons=MOST_REASONS)

    def failed(self, what: str, error: Exception) -> None:
        """Reports a failed turn; an outage of the database is logged by `DatabaseOutage` instead.

        Args:
            what: the action that failed.
            error: the reason; its traceback is logged unless it is a `ResultsDbError`.
        """
        if isinstance(error, DatabaseUnavailableError) and error.is_logged:
            return
        trace = None if isinstance(error, ResultsDbError) else error
        self._lines.failed(f"{what}: {str(error) or type(error).__name__}", trace=trace)

    def worked(self) -> None:
        """Reports a turn that worked."""
        self._lines.worked()


START_PATIENCE_S: Final = 60.0
"""Longest wait for a database that does not answer."""

PAUSE_S: Final = 0.5
"""Pause between two tries."""

T = TypeVar("T")


def _sleep(pause_s: float) -> bool:
    time.sleep(pause_s)
    return False


def once_it_answers(
    start: Callable[[], T],
    *,
    patience_s: float = START_PATIENCE_S,
    wait: Callable[[float], bool] = _sleep,
) -> T:
    """Calls `start` again while the database server is unreachable; returns its result.

    Args:
        start: opens the database; it can be called again after a partial failure.
        patience_s: how long to try.
        wait: pauses for so many seconds; returns whether to stop.

    Raises:
        DatabaseUnavailableError: the server did not answer in time, or it answered with a refusal.
    """
    outage = OutageLog(_log, "connecting to the database")
    give_up_at = time.monotonic() + patience_s
    while True:
        try:
            started = start()
        except DatabaseUnavailableError as error:
            if not error.is_away:
                raise
            if time.monotonic() >= give_up_at:
                raise DatabaseUnavailableError(
                    f"{error}; it was tried for {patience_s:g} s", is_away=True
                ) from error
            outage.failed(f"{error}; it is tried again for up to {patience_s:g} s")
            if wait(PAUSE_S):
                raise
        else:
            outage.worked()
            return started
