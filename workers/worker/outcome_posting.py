"""The way of outcomes to the service: kept until they are taken, whatever fails meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from workers.errors import (
    AnswerUnreadableError,
    RequestRefusedError,
    ServiceFailedError,
    SpoolUnusableError,
)
from workers.lease_client import LeaseClient
from workers.protocol import OutcomeReport
from workers.spool import Spool

_LOG = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 300.0
_TRIES: Final = 12
"""With the pauses above about twenty minutes: the time to repair a service."""

_Key = tuple[int, int]


@dataclass(kw_only=True)
class _Trouble:
    """What the service has made of an outcome so far."""

    tries: int = 0
    next_try_at: float = 0.0

    def note(self, now: float) -> bool:
        """Counts a failure; returns whether there shall be another try."""
        self.next_try_at = now + min(_FIRST_PAUSE_S * 2**self.tries, _LONGEST_PAUSE_S)
        self.tries += 1
        return self.tries < _TRIES


class Outbox:
    """Outcomes that wait to be posted: on disk, where a crash can't reach them, else in memory.

    An outcome at which the service fails does not hold up the others: it is posted again later,
    and set aside in the end. One thread may keep outcomes while another posts them.

    Args:
        client: the service.
        spool: the place on disk.
        now: a clock in seconds.
    """

    def __init__(
        self, client: LeaseClient, spool: Spool, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._now = now
        self._spool = spool
        self._lock = threading.Lock()
        """Around what both threads write: the outcomes in memory."""
        self._in_memory: dict[_Key, OutcomeReport] = {}
        self._taken: set[_Key] = set()
        self._troubles: dict[_Key, _Trouble] = {}
        self._spool_complaint = ""

    def keep(self, report: OutcomeReport) -> None:
        """Takes an outcome on; it is posted by `post`."""
        try:
            self._spool.keep(report)
        except SpoolUnusableError as error:
            _LOG.error("%s: the outcome is kept in memory until the service has it", error)
            with self._lock:
                self._in_memory[_key(report)] = report

    def post(self) -> bool:
        """Posts what is due; returns whether something is left for later.

        Raises:
            ServiceUnreachableError: the service is away; nothing is lost.
        """
        for report in self._waiting():
            trouble = self._troubles.get(_key(report))
            if trouble is None or self._now() >= trouble.next_try_at:
                self._post(report)
        return bool(self._troubles) or bool(self._spool_complaint)

    def close(self) -> None:
        """Says what is lost with this process."""
        for trial_id, _ in self._in_memory:
            _LOG.error("the outcome of trial id %d is lost: neither written nor posted", trial_id)

    def _waiting(self) -> list[OutcomeReport]:
        try:
            kept = self._spool.kept()
            self._spool_complaint = ""
        except SpoolUnusableError as error:
            self._complain(str(error))
            kept = []
        with self._lock:
            in_memory = list(self._in_memory.values())
        return [*(report for report in kept if _key(report) not in self._taken), *in_memory]

    def _post(self, report: OutcomeReport) -> None:
        try:
            accepted = self._client.post_outcome(report)
        except (ServiceFailedError, AnswerUnreadableError) as error:
            if not self._troubles.setdefault(_key(report), _Trouble()).note(self._now()):
                return self._set_aside(report, f"{_TRIES} tries have failed: {error}")
            return _LOG.warning(
                "the outcome of trial id %d is posted again later: %s", report.trial_id, error
            )
        except RequestRefusedError as error:
            return self._set_aside(report, str(error))
        if not accepted:
            _LOG.info("trial id %d had ended before: outcome not needed", report.trial_id)
        try:
            self._forget(report)
            self._spool.forget(report)
        except SpoolUnusableError as error:
            self._taken.add(_key(report))
            _LOG.error("%s; the outcome of trial id %d is posted", error, report.trial_id)

    def _set_aside(self, report: OutcomeReport, why: str) -> None:
        in_memory = self._forget(report)
        try:
            if in_memory:
                self._spool.keep(report)  # the disk may be back
            self._spool.reject(report, why)
        except SpoolUnusableError as error:
            self._taken.add(_key(report))
            _LOG.error("the outcome of trial id %d is lost: %s; %s", report.trial_id, why, error)

    def _forget(self, report: OutcomeReport) -> bool:
        """Forgets what is known of an outcome; returns whether it was held in memory."""
        self._troubles.pop(_key(report), None)
        with self._lock:
            return self._in_memory.pop(_key(report), None) is not None

    def _complain(self, complaint: str) -> None:
        if complaint != self._spool_complaint:
            _LOG.error("%s; outcomes that are kept there have to wait", complaint)
        self._spool_complaint = complaint


def _key(report: OutcomeReport) -> _Key:
    return report.trial_id, report.attempt
