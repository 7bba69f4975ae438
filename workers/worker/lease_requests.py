"""The conversation about leases: one long poll at a time, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Final

from workers.errors import (
    ServiceUnreachableError,
    TokenRefusedError,
    WorkerError,
    WorkerSupersededError,
    WorkerUnknownError,
)
from workers.lease_client import LeaseClient
from workers.protocol import LeaseAsk, WorkerIdentity
from workers.service_http import pauses
from workers.worker_events import (
    Events,
    LeaseAnswered,
    SessionBegan,
    SessionLost,
    WorkerBroken,
    WorkerEvent,
)

_LOG = logging.getLogger(__name__)

_CATCH_UP_WITHIN_S: Final = 10.0
"""For outcomes that waited for the service: a call that began while it was away may take as long."""
_MOST_CATCHING_UP: Final = 3
"""Tries in a row, after which trials are leased all the same: the service may be away for one outcome alone."""


class Leasing:
    """Asks for trials and registers anew, as it is told; each order is answered by one event.

    Args:
        client: the service.
        identity: who this is.
        worker_id: the session.
        events: where the answers go.
        catch_up: called before the next try once the service was away, with seconds that it may take;
            raises where the service still is.
    """

    def __init__(
        self,
        client: LeaseClient,
        identity: WorkerIdentity,
        worker_id: str,
        events: Events,
        *,
        catch_up: Callable[[float], None],
    ) -> None:
        self.worker_id = worker_id
        """The newest session."""
        self._client = client
        self._identity = identity
        self._events = events
        self._catch_up = catch_up
        self._was_away = False
        self._num_catching_up = 0
        self._orders: SimpleQueue[tuple[str, LeaseAsk] | None] = SimpleQueue()
        self._closing = threading.Event()
        self._pauses: Iterator[float] = pauses()
        self._thread = threading.Thread(target=self._run, name="leasing", daemon=True)
        self._thread.start()

    def ask(self, worker_id: str, ask: LeaseAsk) -> None:
        """Has a trial asked for: `LeaseAnswered`, or `SessionLost`."""
        self._orders.put((worker_id, ask))

    def register(self) -> None:
        """Has a new session begun: `SessionBegan`, however long it takes."""
        self._orders.put(None)

    def close(self, within_s: float) -> None:
        """Ends the thread; what it hears from now on counts for nothing.

        Args:
            within_s: how long a call that is under way is waited for.
        """
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
            self._events.put(event)

    def _try(self, order: tuple[str, LeaseAsk] | None) -> WorkerEvent | None:
        """Does an order; None: not this time, it is to be tried again."""
        try:
            event = self._registered() if order is None else self._leased(*order)
        except (TokenRefusedError, WorkerSupersededError) as error:
            return WorkerBroken(error=error)
        except WorkerUnknownError:
            return None if order is None else SessionLost(worker_id=order[0])
        except WorkerError as error:
            self._was_away |= isinstance(error, ServiceUnreachableError)
            pause_s = next(self._pauses)
            if not self._closing.is_set():
                _LOG.warning("%s; trying again in %.1f s", error, pause_s)
            self._closing.wait(pause_s)
            # What is asked for may have changed meanwhile: a lease is asked for anew.
            return None if order is None else LeaseAnswered(worker_id=order[0], ask=order[1])
        except Exception as error:  # without this thread the worker would be idle for ever
            return WorkerBroken(error=error)
        self._pauses = pauses()
        return event

    def _registered(self) -> WorkerEvent:
        registration = self._client.register(self._identity)
        self.worker_id = registration.worker_id
        return SessionBegan(registration=registration)

    def _leased(self, worker_id: str, ask: LeaseAsk) -> WorkerEvent:
        if self._was_away:
            self._catch_up_first()
        lease = self._client.lease(worker_id, ask)
        self._was_away = False
        return LeaseAnswered(worker_id=worker_id, ask=ask, lease=lease)

    def _catch_up_first(self) -> None:
        if self._num_catching_up < _MOST_CATCHING_UP:
            self._num_catching_up += 1
            self._catch_up(_CATCH_UP_WITHIN_S)
        else:
            _LOG.warning("trials are leased although outcomes still wait to be posted")
        self._num_catching_up = 0
