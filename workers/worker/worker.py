"""The worker: leases trials, runs them side by side, and posts what came of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final

from workers.allocation_end import AllocationEnd, EndsIn
from workers.drain import Drain, DrainRequested
from workers.errors import WorkerError, WorkerSupersededError, WorkerUnknownError
from workers.health import HealthReport
from workers.heartbeat import Heartbeat
from workers.launchers.base import Cancelled, Launcher
from workers.lease_client import LeaseClient
from workers.leasing import Leasing
from workers.node_roster import NodeRoster
from workers.outbox import Outbox
from workers.packing.packer import Packer
from workers.posting import Posting
from workers.protocol import Registration, WorkerIdentity
from workers.scheduler import Scheduler, SchedulerOptions
from workers.service_http import patiently
from workers.worker_events import DrainAsked, Events
from workers.worker_status import News

_LOG = logging.getLogger(__name__)

_POST_WITHIN_S: Final = 10.0
_REGISTER_WITHIN_S: Final = 10.0
_LEAVE_LEASING_WITHIN_S: Final = 1.0

CheckOf = Callable[
    [Launcher, Sequence[int], Cancelled, Mapping[int, HealthReport]], Mapping[int, HealthReport]
]
"""Checks the health of some nodes of a launcher, beside reports of others."""


class Worker:
    """Runs trials until it is asked to end, or its time is over.

    The thread that calls `run` owns all state. Others lease, send heartbeats, keep and post outcomes,
    and run a probe each; they tell it what happened by events.

    Args:
        client: the service.
        identity: who this is.
        start_launcher: starts what runs the probes; the worker closes it.
        outbox: where outcomes wait until they are posted.
        drain: whether to end.
        options: how trials are run.
        ends_in_s: looks up when the nodes are taken away; None: never.
        check: checks a launcher's nodes; None: they are believed to be fit.
    """

    def __init__(
        self,
        *,
        client: LeaseClient,
        identity: WorkerIdentity,
        start_launcher: Callable[[], Launcher],
        outbox: Outbox,
        drain: Drain,
        options: SchedulerOptions,
        ends_in_s: EndsIn | None = None,
        check: CheckOf | None = None,
    ) -> None:
        self._client = client
        self._identity = identity
        self._start_launcher = start_launcher
        self._outbox = outbox
        self._drain = drain
        self._options = options
        self._ends_in_s = ends_in_s
        self._check = check
        self._events: Events = SimpleQueue()

    def run(self, *, patience_s: float) -> None:
        """Works until it is to end; then the probes are ended and their leases returned.

        Args:
            patience_s: how long the service may be away at the start. Later it may be for ever.

        Raises:
            WorkerError: it can't go on; the leases have been returned where possible.
            WorkerSupersededError: another worker has taken its name over; so it is one of these.
        """
        try:
            registration = patiently(
                lambda: self._client.register(self._identity),
                patience_s=patience_s,
                wait=self._drain.sleep,
            )
        except DrainRequested:
            return
        who, where = self._identity.name, self._client.url
        _LOG.info("registered as %s (%s) at %s", who, registration.worker_id, where)
        heartbeat = Heartbeat(
            self._client,
            interval_s=registration.heartbeat_interval_s,
            news=News(worker_id=registration.worker_id),
            events=self._events,
        )
        posting = Posting(self._outbox)
        leasing = Leasing(
            self._client,
            self._identity,
            registration.worker_id,
            self._events,
            catch_up=posting.catch_up,
        )
        end = None if self._ends_in_s is None else AllocationEnd(self._ends_in_s, self._events)
        try:
            self._work(registration, heartbeat, posting, leasing)
        except DrainRequested:
            _LOG.info("ending: asked to, before anything ran")
        finally:
            if end is not None:
                end.close()
            heartbeat.end()
            posting.close(_POST_WITHIN_S)
            is_registering = heartbeat.news.worker_id is None
            leasing.close(_REGISTER_WITHIN_S if is_registering else 0)
            self._unregister(leasing.worker_id)
            leasing.close(_LEAVE_LEASING_WITHIN_S)  # its long poll ends with the session

    def _work(
        self, registration: Registration, heartbeat: Heartbeat, posting: Posting, leasing: Leasing
    ) -> None:
        with self._drain.waiting():  # for the nodes of an allocation, perhaps for minutes
            launcher = self._start_launcher()
        packer = Packer(share_nodes=self._options.share_nodes)
        roster = NodeRoster(
            launcher,
            packer,
            self._events,
            check=None if self._check is None else partial(self._check, launcher),
            cpu=self._options.devices_are_cores,
        )
        try:
            scheduler = Scheduler(
                launcher=launcher,
                packer=packer,
                roster=roster,
                leasing=leasing,
                posting=posting,
                events=self._events,
                registration=registration,
                num_nodes=self._identity.num_nodes,
                options=self._options,
            )
            self._serve(scheduler, heartbeat)
        finally:
            roster.close()
            launcher.close()

    def _serve(self, scheduler: Scheduler, heartbeat: Heartbeat) -> None:
        _LOG.info("ready: waiting for trials on cluster %s", self._identity.cluster)
        self._drain.on_request = lambda: self._events.put(DrainAsked())
        if self._drain.requested:
            scheduler.drain("asked to")
        while not scheduler.has_ended:
            scheduler.advance()
            heartbeat.news = scheduler.news()
            try:
                event = self._events.get(timeout=scheduler.wait_s)
            except Empty:
                continue
            scheduler.take(event)
            while not self._events.empty():
                scheduler.take(self._events.get())
        heartbeat.news = scheduler.news()
        if scheduler.failure is not None:
            raise scheduler.failure

    def _unregister(self, worker_id: str) -> None:
        try:
            self._client.unregister(worker_id)
        except (WorkerUnknownError, WorkerSupersededError):
            return
        except WorkerError as error:
            _LOG.warning("the leases could not be returned, so they run out: %s", error)
