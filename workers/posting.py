"""Outcomes leave the worker on threads of their own: neither a disk nor the service holds up probes."""

from __future__ import annotations

import logging
import threading
import time
from queue import SimpleQueue
from typing import Final

from workers.errors import ServiceUnreachableError, WorkerError
from workers.outbox import Outbox
from workers.protocol import OutcomeReport
from workers.service_http import pauses

_LOG = logging.getLogger(__name__)

_LOOK_AGAIN_S: Final = 0.5
"""How often an outcome that the service broke down over is looked at."""


class Posting:
    """Keeps outcomes as they come, and posts them as soon as the service takes them.

    Args:
        outbox: where they wait; this posts what an earlier process has left there too.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._reports: SimpleQueue[OutcomeReport | None] = SimpleQueue()
        self._news = threading.Event()
        self._news.set()  # of an earlier process, perhaps
        self._closing = threading.Event()
        self._hurried = threading.Event()
        self._lock = threading.Lock()
        self._num_unkept = 0
        self._has_caught_up = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="outcome-keeper", daemon=True)
        self._poster = threading.Thread(target=self._post, name="outcome-poster", daemon=True)
        self._keeper.start()
        self._poster.start()

    def take(self, report: OutcomeReport) -> None:
        """Takes an outcome on; returns at once."""
        with self._lock:
            self._num_unkept += 1
            self._has_caught_up.clear()
        self._reports.put(report)

    def catch_up(self, within_s: float) -> None:
        """Returns once no outcome waits for a service that was away: each is posted, or has other troubles.

        A trial whose lease ran out meanwhile would otherwise be leased again before its outcome is known.

        Args:
            within_s: how long that may take.

        Raises:
            ServiceUnreachableError: outcomes still wait.
        """
        self._hurried.set()
        self._news.set()
        if not self._has_caught_up.wait(within_s):
            raise ServiceUnreachableError("outcomes wait to be posted before trials are leased")

    def close(self, within_s: float) -> None:
        """Keeps what was taken, tries once more to post it, and ends the threads.

        Args:
            within_s: how long that may take; what is not posted then waits on disk.
        """
        give_up_at = time.monotonic() + within_s
        self._reports.put(None)
        self._keeper.join(within_s)
        self._closing.set()
        self._news.set()
        self._hurried.set()
        self._poster.join(max(0.0, give_up_at - time.monotonic()))
        self._outbox.close()

    def _keep(self) -> None:
        while (report := self._reports.get()) is not None:
            try:
                self._outbox.keep(report)
            except Exception:  # the next outcomes are to be kept all the same
                _LOG.exception("the outcome of trial id %d is lost", report.trial_id)
            # At once: the poster says that it has caught up where nothing is unkept and nothing is news.
            with self._lock:
                self._num_unkept -= 1
                self._news.set()

    def _post(self) -> None:
        pause = pauses()
        pause_s: float | None = None
        while not self._closing.is_set():
            self._news.wait(pause_s)
            self._news.clear()
            try:
                pause_s = _LOOK_AGAIN_S if self._outbox.post() else None
                pause = pauses()
                self._note_catching_up()
            except Exception as error:  # outcomes have no other way to the service than this thread
                if not isinstance(error, ServiceUnreachableError):
                    self._note_catching_up()  # the service is there: whatever else it is asked is heard
                pause_s = next(pause)
                trace = None if isinstance(error, WorkerError) else error
                _LOG.warning(
                    "%s; outcomes are posted again in %.1f s", error, pause_s, exc_info=trace
                )
                self._hurried.wait(pause_s)
                self._hurried.clear()
                self._news.set()
        # Once more: an outcome may have come while the last try was under way.
        try:
            self._outbox.post()
        except WorkerError as error:
            _LOG.warning("outcomes wait on disk for the next worker: %s", error)

    def _note_catching_up(self) -> None:
        with self._lock:
            if not self._num_unkept and not self._news.is_set():
                self._has_caught_up.set()
