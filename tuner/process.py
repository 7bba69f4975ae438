"""The driver as a process: one a data directory, until a signal ends it."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from results_db.data_dir import DataDir
from results_db.errors import DataDirLockedError
from results_db.store import Store
from tuner.driver import Driver
from tuner.errors import DriverAlreadyRunningError

LOCK_NAME: Final = "driver"
LOOK_INTERVAL_S: Final = 0.1
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def drive_data_dir(path: Path | None) -> None:
    """Drives the campaigns of a data directory until SIGTERM or SIGINT.

    Raises:
        DriverAlreadyRunningError: another driver works on it.
        results_db.errors.ResultsDbError: it cannot be used, or a newer version wrote its database.
    """
    data_dir = DataDir.default() if path is None else DataDir(path)
    data_dir.create()
    _log_to_stderr()
    stop = StopRequest()
    for number in STOP_SIGNALS:
        signal.signal(number, stop.note)
    with _only_driver(data_dir), closing(Store.open(data_dir)) as store:
        Driver(store).run(stop.wait)


class StopRequest:
    """Whether a signal asked for the end; a round that is under way is finished first.

    A plain flag, looked at between short sleeps: a handler that set a `threading.Event` could
    interrupt the very thread that holds the event's lock.
    """

    def __init__(self) -> None:
        self._requested = False

    def note(self, _number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        self._requested = True

    def wait(self, pause_s: float) -> bool:
        """Pauses, for less once the end is asked for, and says whether it is."""
        deadline = time.monotonic() + pause_s
        while not self._requested and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_INTERVAL_S))
        return self._requested


@contextmanager
def _only_driver(data_dir: DataDir) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(data_dir.lock(LOCK_NAME))
        except DataDirLockedError as error:
            raise DriverAlreadyRunningError(
                f"another driver works on {data_dir.path}; end it, or choose another --data-dir"
            ) from error
        yield


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("tuner")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
