"""Waiting for a database server that does not answer when a process starts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from layout_tuner.protocol.connection.outage_log import OutageLog
from layout_tuner.results_db.errors import DatabaseUnavailableError

if TYPE_CHECKING:
    from tenacity import RetryCallState

START_PATIENCE_S: Final = 60.0
"""Longest wait, at the start of a process, for a database that does not answer."""

PAUSE_S: Final = 0.5
"""Pause between two tries to reach it."""

_log: Final = logging.getLogger(__name__)

R = TypeVar("R")


def once_it_answers(
    start: Callable[[], R],
    *,
    patience_s: float = START_PATIENCE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> R:
    """Calls `start` again while the database server is unreachable; returns its result.

    `start` can be called again after a partial failure. `sleep` may raise an exception to end the
    tries.

    Raises:
        DatabaseUnavailableError: the server did not answer in time, or it answered with a refusal.
    """
    # Imported here: `up` reads the patience alone.
    from tenacity import RetryError, Retrying, retry_if_exception, stop_after_delay, wait_fixed

    outage = OutageLog(_log, "connecting to the database", most_reasons=1)

    def log(attempt: RetryCallState) -> None:
        error = attempt.outcome and attempt.outcome.exception()
        outage.failed(f"{error}; it is tried again for up to {patience_s:g} s")

    retrying = Retrying(
        retry=retry_if_exception(
            lambda error: isinstance(error, DatabaseUnavailableError) and error.is_away
        ),
        stop=stop_after_delay(patience_s),
        wait=wait_fixed(PAUSE_S),
        before_sleep=log,
        sleep=sleep,
    )
    try:
        started = retrying(start)
    except RetryError as error:
        last = error.last_attempt.exception()
        raise DatabaseUnavailableError(
            f"{last}; it was tried for {patience_s:g} s", is_away=True
        ) from last
    outage.worked()
    return started
