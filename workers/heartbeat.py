"""Heartbeats: the service hears every few seconds that the worker lives and what it does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final

from workers.errors import (
    AnswerUnreadableError,
    RequestRefusedError,
    ServiceUnreachableError,
    WorkerError,
    WorkerSupersededError,
    WorkerUnknownError,
)
from workers.health import HealthReport
from workers.lease_client import LeaseClient
from workers.protocol import Beat, HeartbeatAnswer, WorkerStatus
from workers.worker_events import Events, HeartbeatAnswered, SessionLost, WorkerBroken
from workers.worker_status import News

_LOG = logging.getLogger(__name__)

_SHORTEST_BEAT_S: Final = 1.0


class Heartbeat:
    """Tells the service the newest news every few seconds, from a thread of its own.

    Args:
        client: the service.
        interval_s: seconds between heartbeats.
        news: the first.
        events: where the answers go.
    """

    def __init__(
        self, client: LeaseClient, *, interval_s: float, news: News, events: Events
    ) -> None:
        self._client = client
        self._interval_s = interval_s
        # A connection that hangs must not cost the leases while the next beat would get through.
        self._within_s = max(2 * interval_s, _SHORTEST_BEAT_S)
        self._events = events
        self._ended = threading.Event()
        self._complaint = ""
        self._is_refused = False
        self._session = ""
        self._known: dict[str, HealthReport] = {}
        """By node, what the service has been told in this session: a thousand reports are long."""
        self.news = news
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends the heartbeats; returns when none is under way."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            news = self.news
            try:
                if news.worker_id is not None and not self._beat(news.worker_id, news):
                    return
            except Exception as error:  # without heartbeats all leases run out, and nobody knew why
                self._events.put(WorkerBroken(error=error))
                return

    def _beat(self, worker_id: str, news: News) -> bool:
        """Sends one heartbeat; returns whether there shall be more."""
        beats = [trial.beat() for trial in news.trials]
        if worker_id != self._session:
            self._session, self._known = worker_id, {}
        try:
            answer = self._send(worker_id, beats, news.status(self._known))
        except ServiceUnreachableError as error:
            self._complain(f"{error}; the probes go on")
        except WorkerUnknownError:
            self._events.put(SessionLost(worker_id=worker_id))
        except WorkerSupersededError as error:
            self._events.put(WorkerBroken(error=error))
            return False
        except WorkerError as error:
            self._complain(f"the heartbeat was refused: {error}")
        else:
            self._events.put(
                HeartbeatAnswered(worker_id=worker_id, trials=news.trials, answer=answer)
            )
            self._complaint = ""
            reports = ((node.name, node.report) for node in news.nodes)
            self._known = {name: report for name, report in reports if report is not None}
        return True

    def _complain(self, complaint: str) -> None:
        """Once about the same: beats come every few seconds."""
        if complaint != self._complaint:
            _LOG.warning("%s", complaint)
        self._complaint = complaint

    def _send(
        self, worker_id: str, beats: Sequence[Beat], status: WorkerStatus | None
    ) -> HeartbeatAnswer:
        """Sends it without the status where the service does not take that: leases matter more."""
        try:
            return self._client.heartbeat(worker_id, beats, status, within_s=self._within_s)
        except (WorkerUnknownError, WorkerSupersededError, AnswerUnreadableError):
            raise
        except RequestRefusedError as error:
            if not self._is_refused:
                _LOG.error("the service does not take the nodes' status: %s", error)
            self._is_refused = True
            return self._client.heartbeat(worker_id, beats, within_s=self._within_s)
