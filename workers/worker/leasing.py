"""Leasing trials: what to request next, and the thread that sends one long poll at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

from layout_tuner.protocol.connection.outage_log import OutageLog
from layout_tuner.protocol.worker_messages import LeaseRequest, RoomBody, WorkerCreate
from layout_tuner.workers.errors import (
    ServiceUnreachableError,
    TokenRefusedError,
    WorkerError,
    WorkerReplacedError,
    WorkerUnknownError,
)
from layout_tuner.workers.packing.request import Room
from layout_tuner.workers.service.lease_client import LeaseClient, pauses
from layout_tuner.workers.worker.events import (
    Events,
    LeaseAnswered,
    SessionBegan,
    SessionLost,
    WorkerBroken,
    WorkerEvent,
)

_LOG = logging.getLogger(__name__)

END_WITHIN_S: Final = 10.0
"""Seconds after a probe's deadline by which its devices are free in every case."""

MOST_WAITING: Final = 2
"""Leases that may wait for devices: that of the oldest trial, and one that was to fill a gap."""

_LONG_POLL_S: Final = 5.0
_SHORT_POLL_S: Final = 1.0
"""For a trial that fits a gap: the gap may be another one a moment later."""

_CATCH_UP_WITHIN_S: Final = 10.0
"""For posting outcomes after an outage: a call that began in the outage may take as long."""

_MOST_CATCHING_UP: Final = 3
"""Tries in a row, after which trials are leased although outcomes wait: the service may fail over a
single outcome."""


def next_request(
    *, usable: Sequence[int], all_usable: bool, num_waiting: int, room: Room, left_s: float | None
) -> LeaseRequest | None:
    """The next request: for the oldest trial that fits; while one waits, for trials beside it.

    So one trial is leased ahead while all devices are busy, and the next probe starts without a
    request to the service.

    Args:
        usable: devices of each node that can be used.
        all_usable: whether those are all nodes, also those that have yet to join.
        num_waiting: trials that wait for devices.
        room: the largest probe that could start at once beside them.
        left_s: seconds that probes still have; None: no limit.

    Returns:
        None: no trial is needed.
    """
    if not usable or num_waiting >= MOST_WAITING:
        return None
    if not num_waiting:
        whole = RoomBody(nodes=len(usable), devices=max(usable))
        return request_within(_LONG_POLL_S, None if all_usable else whole, left_s)
    if not room.devices and not room.nodes:
        return None
    gap = RoomBody(nodes=room.nodes, devices=room.devices)
    return request_within(_SHORT_POLL_S, gap, room.longest_s)


def request_within(
    wait_s: float, room: RoomBody | None, left_s: float | None
) -> LeaseRequest | None:
    """A request for a trial that fits into this room, and ends in time; None: none would."""
    if left_s is None:
        return LeaseRequest(wait_s=wait_s, room=room)
    # A trial that comes at the end of the wait has that much less time.
    longest_s = left_s - wait_s - END_WITHIN_S
    return LeaseRequest(wait_s=wait_s, room=room, longest_s=longest_s) if longest_s > 0 else None


@dataclass(kw_only=True)
class Leasing:
    """Leases trials and registers again, on a thread of its own; each order ends with one event."""

    client: LeaseClient
    identity: WorkerCreate
    """How the worker registers."""
    worker_id: str
    """The newest session."""
    events: Events
    """Where the answers are put."""
    catch_up: Callable[[float], None]
    """Called before the next request after an outage, with the seconds that it may take; raises an
    error while the outage lasts."""

    def __post_init__(self) -> None:
        self._was_away = False
        self._num_catching_up = 0
        self._orders: SimpleQueue[tuple[str, LeaseRequest] | None] = SimpleQueue()
        self._closing = threading.Event()
        self._outage = OutageLog(_LOG, "leasing trials")
        self._pauses = pauses()
        self._thread = threading.Thread(target=self._run, name="leasing", daemon=True)
        self._thread.start()

    def request(self, worker_id: str, request: LeaseRequest) -> None:
        """Requests a trial; the event is `LeaseAnswered` or `SessionLost`."""
        self._orders.put((worker_id, request))

    def register(self) -> None:
        """Begins a new session; the event is `SessionBegan`, without a time limit."""
        self._orders.put(None)

    def close(self, within_s: float) -> None:
        """Ends the thread after the call that is under way; later answers are dropped."""
        self._closing.set()
        self._orders.put(None)
        self._thread.join(within_s)

    def _run(self) -> None:
        while True:
            order = self._orders.get()
            event = None
            while event is None:
                if self._closing.is_set():
                    return
                event = self._try(order)
            self.events.put(event)

    def _try(self, order: tuple[str, LeaseRequest] | None) -> WorkerEvent | None:
        """Carries out an order; None: it must be tried again."""
        try:
            event = self._registered() if order is None else self._leased(*order)
        except (TokenRefusedError, WorkerReplacedError) as error:
            return WorkerBroken(error=error)
        except WorkerUnknownError:
            return None if order is None else SessionLost(worker_id=order[0])
        except WorkerError as error:
            self._was_away |= isinstance(error, ServiceUnreachableError)
            if self._closing.is_set():
                return None
            self._outage.failed("trials are requested again", error)
            self._closing.wait(self._pauses.take())
            # The free devices may have changed: the scheduler makes a new request.
            return None if order is None else LeaseAnswered(worker_id=order[0])
        except Exception as error:  # without this thread the worker would be idle
            return WorkerBroken(error=error)
        self._outage.worked()
        self._pauses.reset()
        return event

    def _registered(self) -> WorkerEvent:
        registration = self.client.register(self.identity)
        self.worker_id = registration.worker_id
        return SessionBegan(registration=registration)

    def _leased(self, worker_id: str, request: LeaseRequest) -> WorkerEvent:
        has_caught_up = not self._was_away or self._catch_up_first()
        lease = self.client.lease(worker_id, request)
        self._was_away = False
        if not has_caught_up:
            _LOG.warning("trials are leased although outcomes still wait to be posted")
        return LeaseAnswered(worker_id=worker_id, lease=lease)

    def _catch_up_first(self) -> bool:
        """Posts the outcomes that wait; returns False, without a try, after too many tries."""
        has_patience = self._num_catching_up < _MOST_CATCHING_UP
        if has_patience:
            self._num_catching_up += 1
            self.catch_up(_CATCH_UP_WITHIN_S)
        self._num_catching_up = 0
        return has_patience
