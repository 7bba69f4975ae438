"""The worker: leases trials, runs their probes side by side, and posts the outcomes.

It ends after SIGTERM or SIGINT, and at the end of its allocation.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final

from layout_tuner.protocol.worker_messages import WorkerCreate, WorkerCreated
from layout_tuner.workers.errors import WorkerError, WorkerReplacedError, WorkerUnknownError
from layout_tuner.workers.launchers.group_launcher import GroupLauncher
from layout_tuner.workers.launchers.launcher_nodes import Cancelled
from layout_tuner.workers.packing.packer import Packer
from layout_tuner.workers.service.lease_client import LeaseClient
from layout_tuner.workers.worker.events import DrainAsked, EndMoved, Events, WorkerEvent
from layout_tuner.workers.worker.heartbeat import Heartbeat, News
from layout_tuner.workers.worker.leasing import Leasing
from layout_tuner.workers.worker.node_health import HealthReport
from layout_tuner.workers.worker.outcome_posting import Outbox, Posting
from layout_tuner.workers.worker.roster import NodeRoster
from layout_tuner.workers.worker.scheduler import Scheduler, SchedulerOptions
from layout_tuner.workers.worker.trial_book import TrialBook, start_probe

_LOG = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 60.0
"""The wall time of a running job may be changed. Each query costs Slurm's controller time."""

EndsIn = Callable[[], float | None]
"""Seconds until the allocation ends; None: unknown, or never."""

_POST_WITHIN_S: Final = 10.0
_REGISTER_WITHIN_S: Final = 10.0
_LEAVE_LEASING_WITHIN_S: Final = 1.0

CheckOf = Callable[
    [GroupLauncher, Sequence[int], Cancelled, Mapping[int, HealthReport]],
    Mapping[int, HealthReport],
]
"""Checks the health of some nodes of a launcher, in comparison with reports of other nodes."""


class DrainRequested(BaseException):
    """Ends a wait of the worker: it has been signalled to end."""


class Drain:
    """Whether the worker has been signalled to end.

    A signal ends a wait by an exception, and otherwise calls `on_request`. Further signals have no
    effect: ending takes a moment.
    """

    def __init__(self) -> None:
        self.requested = False
        self.on_request: Callable[[], object] = lambda: None
        """Called in the signal handler."""
        self._waiting = False

    def listen(self) -> None:
        """Takes over SIGTERM and SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Surrounds code that a signal may leave at any point, by DrainRequested."""
        self._waiting = True
        try:
            if self.requested:
                raise DrainRequested
            yield
        finally:
            self._waiting = False

    def sleep(self, seconds: float) -> None:
        """Waits until the time is over; DrainRequested if a signal comes."""
        with self.waiting():
            time.sleep(seconds)

    def _on_signal(self, *_: Any) -> None:
        self.requested = True
        self.on_request()
        if self._waiting:
            self._waiting = False
            raise DrainRequested


class AllocationEnd:
    """Looks up the end of the allocation now and then, and sends it to the worker as `EndMoved`.

    It has a thread of its own: Slurm's controller may take minutes to answer.
    """

    def __init__(
        self, ends_in_s: EndsIn, events: Events, *, look_every_s: float = _LOOK_EVERY_S
    ) -> None:
        self._ends_in_s = ends_in_s
        self._events = events
        self._look_every_s = look_every_s
        self._closing = threading.Event()
        threading.Thread(target=self._run, name="allocation-end", daemon=True).start()

    def close(self) -> None:
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            now = time.monotonic()
            try:
                left_s = self._ends_in_s()
            except Exception as error:  # the worker goes on with the last known end
                _LOG.warning("the end of the allocation is not known: %s", error)
            else:
                self._events.put(EndMoved(ends_at=None if left_s is None else now + left_s))
            self._closing.wait(self._look_every_s)


def ends_after(seconds: float) -> EndsIn:
    ends_at = time.monotonic() + seconds
    return lambda: max(0.0, ends_at - time.monotonic())


@dataclass(kw_only=True)
class Worker:
    """Runs trials until it is signalled to end or the allocation ends.

    The thread that calls `run` owns all state. Other threads lease, send heartbeats, store and post
    outcomes, and run one probe each; they put events into the queue of the first thread.
    """

    client: LeaseClient
    identity: WorkerCreate
    """How the worker registers."""
    start_launcher: Callable[[], GroupLauncher]
    """Starts the launcher of the probes; the worker closes it."""
    outbox: Outbox
    """Where outcomes wait until they are posted."""
    drain: Drain
    """Whether the worker has been signalled to end."""
    options: SchedulerOptions
    ends_in_s: EndsIn | None = None
    """Looks up when the allocation ends; None: never."""
    check: CheckOf | None = None
    """Checks the health of a launcher's nodes; None: they are not checked."""

    def __post_init__(self) -> None:
        self._events: SimpleQueue[WorkerEvent] = SimpleQueue()

    def run(self, *, patience_s: float) -> None:
        """Works until it must end; then it ends the probes and returns their leases.

        It waits `patience_s` for a service that does not answer at the start, and later without a
        limit.

        Raises:
            WorkerError: the worker can't go on; the leases have been returned where possible.
            WorkerReplacedError: another worker has registered under its name.
        """
        try:
            registration = self.client.register_patiently(
                self.identity, patience_s=patience_s, sleep=self.drain.sleep
            )
        except DrainRequested:
            return
        who, where = self.identity.name, self.client.url
        _LOG.info("registered as %s (%s) at %s", who, registration.worker_id, where)
        heartbeat = Heartbeat(
            self.client,
            interval_s=registration.heartbeat_interval_s,
            news=News(worker_id=registration.worker_id),
            events=self._events,
        )
        posting = Posting(self.outbox)
        leasing = Leasing(
            client=self.client,
            identity=self.identity,
            worker_id=registration.worker_id,
            events=self._events,
            catch_up=posting.catch_up,
        )
        end = None if self.ends_in_s is None else AllocationEnd(self.ends_in_s, self._events)
        try:
            warn_of_too_much_power(self.client)
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
            unregister(self.client, leasing.worker_id)
            # The service ends its long poll with the session.
            leasing.close(_LEAVE_LEASING_WITHIN_S)

    def _work(
        self, registration: WorkerCreated, heartbeat: Heartbeat, posting: Posting, leasing: Leasing
    ) -> None:
        with self.drain.waiting():  # starting on an allocation may take minutes
            launcher = self.start_launcher()
        roster = NodeRoster(
            launcher,
            Packer(share_nodes=self.options.share_nodes),
            self._events,
            check=None if self.check is None else partial(self.check, launcher),
            topology=self.options.topology,
            cpu=self.options.devices_are_cores,
        )
        try:
            trials = TrialBook(
                start_probe=partial(start_probe, launcher, self._events),
                roster=roster,
                posting=posting,
            )
            scheduler = Scheduler(
                trials=trials,
                leasing=leasing,
                registration=registration,
                options=self.options,
            )
            self._serve(scheduler, heartbeat)
        finally:
            roster.close()
            launcher.close()

    def _serve(self, scheduler: Scheduler, heartbeat: Heartbeat) -> None:
        _LOG.info("ready: waiting for trials on cluster %s", self.identity.cluster)
        self.drain.on_request = lambda: self._events.put(DrainAsked())
        if self.drain.requested:
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


def warn_of_too_much_power(client: LeaseClient) -> None:
    """Logs a warning where the token is not one of a worker."""
    try:
        role = client.role()
    except WorkerError as error:
        _LOG.info("the role of the token could not be read: %s", error)
        return
    if role != "worker":
        _LOG.warning(
            "the token has the role %s: anyone who can read its file on this machine has that role; "
            "give the worker a token of its own, made with `layout-tuner token create NAME --role "
            "worker --out FILE`",
            role,
        )


def unregister(client: LeaseClient, worker_id: str) -> None:
    """Ends a session; a failure is logged."""
    try:
        client.unregister(worker_id)
    except (WorkerUnknownError, WorkerReplacedError):
        return
    except WorkerError as error:
        _LOG.warning("the leases could not be returned and will expire: %s", error)
