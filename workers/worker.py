"""The worker: leases trials, runs them, and posts what came of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from search_spaces.errors import SearchSpaceError
from search_spaces.outcome import Outcome, ProbeRequest
from workers.drain import Drain, DrainRequested
from workers.errors import (
    ServiceUnreachableError,
    WorkerError,
    WorkerSupersededError,
    WorkerUnknownError,
)
from workers.launchers.base import Launcher
from workers.lease_client import (
    Beat,
    Lease,
    LeaseClient,
    OutcomeReport,
    Registration,
    WorkerIdentity,
    patiently,
)
from workers.outbox import Outbox

_LOG = logging.getLogger(__name__)

_LONG_POLL_S: Final = 5.0
_SHORTEST_BEAT_S: Final = 1.0

T = TypeVar("T")


@dataclass(kw_only=True)
class _RunningTrial:
    """The trial whose probe is under way."""

    lease: Lease
    iterations_done: int = 0
    stopped: bool = False


class Heartbeat:
    """Tells the service every few seconds that the worker lives and how far its trial is."""

    def __init__(self, client: LeaseClient, registration: Registration) -> None:
        self._client = client
        self._registration = registration
        # A connection that hangs must not cost the lease while the next beat would get through.
        self._within_s = max(2 * registration.heartbeat_interval_s, _SHORTEST_BEAT_S)
        self._ended = threading.Event()
        self.superseded: WorkerSupersededError | None = None
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.trial: _RunningTrial | None = None
        self._thread.start()

    @property
    def stops_trial(self) -> bool:
        """Whether the probe under way shall end."""
        return self.superseded is not None or (self.trial is not None and self.trial.stopped)

    def end(self) -> None:
        """Ends the heartbeats; returns when none is under way."""
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        away = False
        while not self._ended.wait(self._registration.heartbeat_interval_s):
            trial = self.trial
            try:
                beats = [] if trial is None else [_beat_of(trial)]
                stop = self._client.heartbeat(
                    self._registration.worker_id, beats, within_s=self._within_s
                )
            except ServiceUnreachableError as error:
                if not away:
                    _LOG.warning("%s; the probe goes on", error)
                away = True
                continue
            except WorkerSupersededError as error:
                self.superseded = error
                return
            except WorkerError as error:  # the main loop hears the same and acts on it
                _LOG.warning("the heartbeat was refused: %s", error)
                continue
            away = False
            if trial is not None and trial.lease.trial_id in stop:
                trial.stopped = True


class Worker:
    """Runs trials one after the other until it is asked to end.

    Args:
        client: the service.
        identity: who this is.
        start_launcher: starts what runs the probes; the worker closes it.
        outbox: where outcomes wait until they are posted.
        drain: whether to end.
    """

    def __init__(
        self,
        *,
        client: LeaseClient,
        identity: WorkerIdentity,
        start_launcher: Callable[[], Launcher],
        outbox: Outbox,
        drain: Drain,
    ) -> None:
        self._client = client
        self._identity = identity
        self._start_launcher = start_launcher
        self._outbox = outbox
        self._drain = drain

    def run(self, *, patience_s: float) -> None:
        """Works until it is asked to end; then the probe is ended and its lease returned.

        Args:
            patience_s: how long the service may be away at the start. Later it may be for ever.

        Raises:
            WorkerError: it can't go on; the lease has been returned where possible.
            WorkerSupersededError: another worker has taken its name over; so it is one of these.
        """
        try:
            self._register(patience_s)
        except DrainRequested:
            return
        try:
            launcher = self._start_launcher()
            try:
                self._serve(launcher)
            finally:
                launcher.close()
        except DrainRequested:
            _LOG.info("ending: asked to")
        finally:
            self._unregister()

    def _register(self, patience_s: float | None) -> None:
        self._registration = self._patiently(
            lambda: self._client.register(self._identity), patience_s
        )
        self._heartbeat = Heartbeat(self._client, self._registration)
        _LOG.info(
            "registered as %s (%s) at %s",
            self._identity.name,
            self._registration.worker_id,
            self._client.url,
        )

    def _unregister(self) -> None:
        self._heartbeat.end()
        try:
            self._outbox.post()
            self._client.unregister(self._registration.worker_id)
        except (WorkerUnknownError, WorkerSupersededError):
            return
        except WorkerError as error:
            _LOG.warning("the lease could not be returned, so it runs out: %s", error)
        finally:
            self._outbox.close()

    def _serve(self, launcher: Launcher) -> None:
        _LOG.info("ready: waiting for trials on cluster %s", self._identity.cluster)
        while True:
            try:
                self._patiently(self._outbox.post)
                lease = self._patiently(self._lease)
            except WorkerUnknownError:
                _LOG.warning("the service does not know this worker any more; registering again")
                self._heartbeat.end()
                self._register(None)
                continue
            if lease is not None:
                self._run(launcher, lease)
            if self._heartbeat.superseded is not None:
                raise self._heartbeat.superseded

    def _lease(self) -> Lease | None:
        with self._drain.waiting():  # if it was heard, the end of the session returns the lease
            return self._client.lease(self._registration.worker_id, wait_s=_LONG_POLL_S)

    def _run(self, launcher: Launcher, lease: Lease) -> None:
        trial = _RunningTrial(lease=lease)
        _LOG.info("trial %d of %s, attempt %d", lease.number, lease.campaign, lease.attempt)
        self._heartbeat.trial = trial
        try:
            outcome = self._outcome(launcher, trial)
        finally:
            self._heartbeat.trial = None
        reason = "" if outcome.reason is None else f" ({outcome.reason}: {outcome.message})"
        _LOG.info("trial %d of %s %s%s", lease.number, lease.campaign, outcome.state, reason)
        gone = self._drain.requested or self._heartbeat.superseded is not None
        if outcome.state == "cancelled" and gone:
            return  # the lease is returned with the session, or another's already
        self._outbox.keep(
            OutcomeReport(
                trial_id=lease.trial_id,
                attempt=lease.attempt,
                worker_id=self._registration.worker_id,
                outcome=outcome.to_mapping(),
            )
        )

    def _outcome(self, launcher: Launcher, trial: _RunningTrial) -> Outcome:
        try:
            request = ProbeRequest.from_mapping(trial.lease.request)
        except SearchSpaceError as error:
            message = f"this worker does not understand the request: {error}"
            return Outcome(state="failed", reason="unsupported", message=message)

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "iteration":
                trial.iterations_done = event["index"] + 1

        for node in tuple(launcher.lost()):
            launcher.recover(node)
        return launcher.run(
            request,
            on_event=on_event,
            cancelled=lambda: self._heartbeat.stops_trial or self._drain.requested,
        )

    def _patiently(self, call: Callable[[], T], patience_s: float | None = None) -> T:
        """Makes a call until the service is there, unless the worker is asked to end.

        Only the pauses are left at once: a call that is left half-way may have been heard.
        """
        return patiently(call, patience_s=patience_s, wait=self._drain.sleep)


def _beat_of(trial: _RunningTrial) -> Beat:
    return Beat(
        trial_id=trial.lease.trial_id,
        attempt=trial.lease.attempt,
        iterations_done=trial.iterations_done,
    )
