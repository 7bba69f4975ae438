"""The driver as a process: one a data directory, until a signal ends it."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final

from results_db.data_dir import DataDir
from results_db.errors import DataDirLockedError
from results_db.store import Store
from tuner.driver import Driver
from tuner.errors import DriverAlreadyRunningError

LOCK_NAME: Final = "driver"
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
    # Blocked and waited for instead of handled: a signal never arrives in the middle of a round.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    with _only_driver(data_dir), closing(Store.open(data_dir)) as store:
        Driver(store).run(lambda pause_s: signal.sigtimedwait(STOP_SIGNALS, pause_s) is not None)


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
