"""Posting outcomes: stored on disk and sent on threads of their own, so that no probe waits."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Final

from layout_tuner.documents.limits import visible_line
from layout_tuner.protocol.connection.backoff import Backoff
from layout_tuner.protocol.connection.outage_log import OutageLog
from layout_tuner.protocol.outcome import MAX_MESSAGE_LENGTH, Outcome
from layout_tuner.protocol.worker_messages import OutcomeReport
from layout_tuner.timing_mark import shares_cores, wait_while_timing
from layout_tuner.workers.errors import (
    AnswerUnreadableError,
    ContentRefusedError,
    RequestRefusedError,
    ServiceFailedError,
    ServiceUnreachableError,
    SpoolUnusableError,
    WorkerError,
)
from layout_tuner.workers.service.lease_client import EncodedOutcome, LeaseClient, pauses
from layout_tuner.workers.worker.outcome_spool import Spool

_LOG = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 300.0
_TRIES: Final = 12
"""With the pauses above about twenty minutes, in which a service can be repaired."""

_Key = tuple[int, int]

_LATER_WHILE_TIMING_S: Final = 5.0
"""How long an outcome waits at most for ranks that time iterations on the cores of the service."""

_LOOK_AGAIN_S: Final = 0.5
"""How often the outcomes over which the service failed are looked at."""


@dataclass(kw_only=True)
class _Trouble:
    """The failed attempts to post one outcome."""

    tries: int = 0
    backoff: Backoff = field(default_factory=lambda: Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S))
    next_try_at: float = 0.0
    reason: str = ""

    def note(self, now: float) -> bool:
        """Counts a failure; returns whether to try again."""
        self.next_try_at = now + self.backoff.take()
        self.tries += 1
        return self.tries < _TRIES


@dataclass
class Outbox:
    """Outcomes that wait to be posted: in memory, and on disk so that they survive a crash.

    An outcome over which the service fails does not delay the others: it is posted again later, and
    set aside after too many tries. If the service refuses an outcome, the trial is reported as
    failed with the reason, and is not run again. One thread may store outcomes while another posts
    them.

    Raises:
        SpoolUnusableError: at construction, when the directory can't be read.
    """

    client: LeaseClient
    """The service."""
    spool: Spool
    """The directory on disk; what an earlier process left there is posted too."""
    now: Callable[[], float] = time.monotonic
    """A clock in seconds."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        """Held around the outcomes, which both threads write."""
        self._waiting = {_key(outcome): outcome for outcome in self.spool.kept()}
        self._unsaved: set[_Key] = set()
        self._troubles: dict[_Key, _Trouble] = {}

    def keep(self, report: OutcomeReport) -> None:
        """Stores an outcome; `post` posts it."""
        outcome = EncodedOutcome.of(report)
        try:
            self.spool.keep(outcome)
        except SpoolUnusableError as error:
            _LOG.error("%s: the outcome is kept in memory until it is posted", error)
            self._unsaved.add(_key(outcome))
        with self._lock:
            self._waiting[_key(outcome)] = outcome

    def post(self) -> bool:
        """Posts the outcomes that are due; returns whether some are left for later.

        Raises:
            ServiceUnreachableError: the service does not answer; nothing is lost.
        """
        with self._lock:
            waiting = list(self._waiting.values())
        for outcome in waiting:
            trouble = self._troubles.get(_key(outcome))
            if trouble is None or self.now() >= trouble.next_try_at:
                self._post(outcome)
        return bool(self._troubles)

    def close(self) -> None:
        """Logs the outcomes that are lost with this process."""
        for trial_id, _ in self._unsaved:
            _LOG.error("the outcome of trial id %d is lost: neither stored nor posted", trial_id)

    def _post(self, outcome: EncodedOutcome) -> None:
        try:
            self.client.post_outcome(outcome)
        except (ServiceFailedError, AnswerUnreadableError) as error:
            trouble = self._troubles.setdefault(_key(outcome), _Trouble())
            if not trouble.note(self.now()):
                return self._set_aside(outcome, f"{_TRIES} tries have failed: {error}")
            if trouble.reason != str(error):
                trouble.reason = str(error)
                _LOG.warning(
                    "the outcome of trial id %d is posted again later: %s", outcome.trial_id, error
                )
            return None
        except ContentRefusedError as error:
            return self._set_aside(outcome, str(error), _in_place_of(outcome, error.why))
        except RequestRefusedError as error:
            return self._set_aside(outcome, str(error))
        self._drop(outcome)
        try:
            self.spool.forget(outcome)
        except SpoolUnusableError as error:  # the next process posts it once more
            _LOG.error("%s; the outcome of trial id %d is posted", error, outcome.trial_id)

    def _set_aside(
        self, outcome: EncodedOutcome, why: str, instead: EncodedOutcome | None = None
    ) -> None:
        self._drop(outcome)
        try:
            self.spool.reject(outcome, why, instead)
        except SpoolUnusableError as error:
            _LOG.error("the outcome of trial id %d is lost: %s; %s", outcome.trial_id, why, error)
            self._unsaved.update({_key(outcome)} if instead else ())
        if instead is not None:
            with self._lock:
                self._waiting[_key(instead)] = instead
            self._post(instead)

    def _drop(self, outcome: EncodedOutcome) -> None:
        """Removes an outcome that does not wait any more."""
        self._troubles.pop(_key(outcome), None)
        self._unsaved.discard(_key(outcome))
        with self._lock:
            self._waiting.pop(_key(outcome), None)


def _key(outcome: EncodedOutcome) -> _Key:
    return outcome.trial_id, outcome.attempt


def _in_place_of(refused: EncodedOutcome, why: str) -> EncodedOutcome | None:
    """The outcome to post instead of one whose content the service refuses.

    A measurement becomes a failure at the same cost. Anything else loses its figures and its log,
    but stays what it was. None: it has neither, or it can't be read.
    """
    try:
        document = json.loads(refused.body)
        said = Outcome.from_mapping(document["outcome"])
    except (ValueError, LookupError, TypeError):
        return None
    if said.measurement is not None:
        message = f"the service refused the measurement: {why}"
        less = replace(said, state="failed", reason="implausible", measurement=None)
    else:
        message = f"{said.message}; the service refused the figures or the log: {why}"
        less = Outcome(state=said.state, reason=said.reason, node=said.node)
        figures = ("nodes_held", "iterations_s")
        if said == replace(less, message=said.message) and not any(map(document.get, figures)):
            return None
        document |= dict.fromkeys(figures)
    less = replace(less, message=visible_line(message, MAX_MESSAGE_LENGTH))
    body = json.dumps(document | {"outcome": less.to_mapping()}).encode()
    return replace(refused, body=body)


class Posting:
    """Stores outcomes at once, and posts them as soon as the service accepts them.

    Outcomes that an earlier process left in the outbox are posted too.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._reports: SimpleQueue[OutcomeReport | None] = SimpleQueue()
        self._news = threading.Event()
        self._news.set()  # an earlier process may have left outcomes
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
        """Hands an outcome over; returns at once."""
        with self._lock:
            self._num_unkept += 1
            self._has_caught_up.clear()
        self._reports.put(report)

    def catch_up(self, within_s: float) -> None:
        """Waits until no outcome waits because of an outage: each is posted, or refused.

        Otherwise a trial whose lease expired in the outage would be leased again before its outcome
        is known.

        Raises:
            ServiceUnreachableError: outcomes still wait.
        """
        self._hurried.set()
        self._news.set()
        if not self._has_caught_up.wait(within_s):
            error = ServiceUnreachableError("outcomes wait to be posted before trials are leased")
            error.is_logged = True  # why they wait has a line of its own
            raise error

    @property
    def has_caught_up(self) -> bool:
        """Whether no outcome waits, but those over which the service fails."""
        return self._has_caught_up.is_set()

    def close(self, within_s: float) -> None:
        """Stores the outcomes, tries once more to post them, and ends the threads.

        What is not posted in time waits on disk.
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
            except Exception:  # the next outcomes must still be stored
                _LOG.exception("the outcome of trial id %d is lost", report.trial_id)
            # Both under the lock: the poster has caught up if all is stored and nothing is new.
            with self._lock:
                self._num_unkept -= 1
                self._news.set()

    def _post(self) -> None:
        pause_s: float | None = None
        outage, backoff = OutageLog(_LOG, "posting outcomes"), pauses()
        while not self._closing.is_set():
            self._news.wait(pause_s)
            if shares_cores():
                wait_while_timing(self._hurried.wait, longest_s=_LATER_WHILE_TIMING_S)
            self._news.clear()
            try:
                pause_s = _LOOK_AGAIN_S if self._outbox.post() else None
                outage.worked()
                backoff.reset()
                self._note_catching_up()
            except Exception as error:  # this thread is the only one that posts outcomes
                if not isinstance(error, ServiceUnreachableError):
                    self._note_catching_up()  # the service answers, so leases can be requested
                outage.failed("outcomes are posted again later", error)
                pause_s = backoff.take()
                self._hurried.wait(pause_s)
                self._hurried.clear()
                self._news.set()
        # Once more: an outcome may have come during the last try.
        try:
            self._outbox.post()
        except WorkerError as error:
            _LOG.warning("outcomes wait on disk for the next worker: %s", error)

    def _note_catching_up(self) -> None:
        with self._lock:
            if not self._num_unkept and not self._news.is_set():
                self._hurried.clear()
                self._has_caught_up.set()
