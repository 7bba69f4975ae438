"""The driver as a process: active or standing by, until a signal ends it."""

from __future__ import annotations

import logging
import signal
import sys
import time
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Final

from results_db.data_dir import DataDir
from results_db.errors import DatabaseUnavailableError
from results_db.store import Store
from tuner.driver import Driver
from tuner.tenure import Standby, Tenure

LOOK_INTERVAL_S: Final = 0.1
STANDBY_INTERVAL_S: Final = 0.5
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

_log: Final = logging.getLogger("tuner.process")


def drive(data_dir: Path | None, database: str | None = None) -> None:
    """Drives the campaigns of a database until SIGTERM or SIGINT, while no other driver does.

    Args:
        data_dir: where its SQLite lies; None: the default.
        database: URL of a PostgreSQL instead; None: there is none.

    Raises:
        results_db.errors.ResultsDbError: it cannot be used, or a newer version wrote it.
    """
    data = DataDir.default() if data_dir is None else DataDir(data_dir)
    _log_to_stderr()
    stop = StopRequest()
    for number in STOP_SIGNALS:
        signal.signal(number, stop.note)
    with closing(Store.open(data, database=database)) as store:
        while not stop.is_requested:
            _drive_once(store, stop)


def _drive_once(store: Store, stop: StopRequest) -> None:
    """Stands by until no other driver is at work, and drives until another has taken over."""
    standby = Standby(store)
    while not stop.wait(0):
        try:
            lease = standby.take_over()
        except DatabaseUnavailableError as error:
            _log.warning("cannot see whether a driver is at work: %s", error)
            lease = None
        if lease is not None:
            break
        stop.wait(STANDBY_INTERVAL_S)
    else:
        return
    with Tenure(store, lease) as tenure:
        Driver(store.as_driver(lease.fence)).run(
            lambda pause_s: stop.wait(pause_s) or not tenure.goes_on()
        )


class StopRequest:
    """Whether a signal asked for the end; a round that is under way is finished first.

    A plain flag, looked at between short sleeps: a handler that set a `threading.Event` could
    interrupt the very thread that holds the event's lock.
    """

    def __init__(self) -> None:
        self._requested = False

    @property
    def is_requested(self) -> bool:
        """Whether the end was asked for."""
        return self._requested

    def note(self, _number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        self._requested = True

    def wait(self, pause_s: float) -> bool:
        """Pauses, for less once the end is asked for, and says whether it is."""
        deadline = time.monotonic() + pause_s
        while not self._requested and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_INTERVAL_S))
        return self._requested


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("tuner")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
