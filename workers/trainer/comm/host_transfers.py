"""Progress of a rank's operations with the ranks of its host, and how it waits for them.

There is no thread: all operations advance when one is started, and while this rank waits for any
of them. A waiting rank polls, then sleeps for short times, and checks regularly whether the ranks
that it waits for are alive.
"""

from __future__ import annotations

import os
import select
import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from layout_tuner.workers.trainer.comm.shared_memory import Region
from layout_tuner.workers.trainer.errors import PeerLostError

_POLL_S: Final = 1e-3
"""How long a rank with a core of its own polls before it sleeps: longer than the delays between
peers within a pass, shorter than a pipeline's bubble."""
_SLEEP_S: Final = 1e-3
"""Longest sleep. A peer that posts wakes the sleeper; the sleeper's other operations can advance
only after it has woken."""
_CHECK_PEERS_EVERY_S: Final = 0.05
"""How often a waiting rank checks whether its peers are alive."""


class Host:
    """A rank's operations with the other ranks of its host, in queues."""

    def __init__(self, processes: dict[int, int], *, timeout_s: float, shares_cores: bool) -> None:
        """Watches the peers' `processes`, by rank; PeerLostError if one of them has ended."""
        self._timeout_s = timeout_s
        # Where ranks share cores, the peer may need the core that polling would occupy.
        self._poll_s = 0.0 if shares_cores else _POLL_S
        self._queues: list[deque[Operation]] = []
        self._watched: dict[int, int] = {}
        for rank, process in processes.items():
            try:
                self._watched[rank] = os.pidfd_open(process)
            except ProcessLookupError as error:
                raise PeerLostError(_lost([rank])) from error

    def new_queue(self) -> deque[Operation]:
        """A queue whose operations run one after the other."""
        self._queues.append(deque())
        return self._queues[-1]

    def start(self, operation: Operation, queue: deque[Operation]) -> None:
        """Adds an operation to a queue; it begins once those before it are done."""
        queue.append(operation)
        with _uncounted():
            _advance(queue)

    def wait(self, operation: Operation) -> None:
        """Returns once it is done; PeerLostError if a rank has ended, or did nothing in time."""
        if not operation.is_done:
            with _uncounted():
                self._wait(operation)

    def _wait(self, operation: Operation) -> None:
        now = time.monotonic()
        moved_at, check_at, is_armed = now, now + _CHECK_PEERS_EVERY_S, False
        while True:
            moved = self._advance_all()
            if operation.is_done:
                return
            now = time.monotonic()
            if moved:
                moved_at, is_armed = now, False
            elif is_armed:
                operation.region.sleep(operation.rank, _SLEEP_S)
                is_armed = False
            elif now - moved_at >= self._poll_s:
                operation.region.arm(operation.rank)
                is_armed = True
            if now > check_at:
                check_at = now + _CHECK_PEERS_EVERY_S
                self._check_peers(operation, waited_s=now - moved_at)

    def _advance_all(self) -> bool:
        """Advances every queue: a peer may wait for an operation other than the awaited one."""
        moved = False
        for queue in self._queues:
            if queue:
                moved |= _advance(queue)
        return moved

    def _check_peers(self, operation: Operation, *, waited_s: float) -> None:
        poll = select.poll()
        ranks = {self._watched[peer]: peer for peer in operation.peers}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        ended = [ranks[descriptor] for descriptor, _ in poll.poll(0)]
        # A rank that ended normally has posted everything that its peers need: read that first.
        if ended and not self._advance_all() and not operation.is_done:
            raise PeerLostError(_lost(ended))
        if waited_s > self._timeout_s:
            raise PeerLostError(
                f"timed out waiting {waited_s:.3g} s for ranks {sorted(ranks.values())}, longer than "
                f"the timeout of {self._timeout_s:g} s; see what they do, or allow more time"
            )


def _lost(ranks: list[int]) -> str:
    return f"connection closed by peer: the processes of ranks {sorted(ranks)} have ended"


def _advance(queue: deque[Operation]) -> bool:
    moved = False
    while queue:
        moved |= queue[0].advance()
        if not queue[0].is_done:
            break
        queue.popleft()
    return moved


def _uncounted() -> AbstractContextManager[Any]:
    """Hides slots from dispatch modes: they are buffers of the transport, like those of sockets."""
    if _get_current_dispatch_mode() is None:
        return nullcontext()
    return _disable_current_modes()


class Operation(ABC):
    """A collective or a transfer, done piece by piece, in the shared memory of a group.

    `rank` is this rank's index in the group; the peers that it depends on are global ranks.
    """

    is_done: bool = False

    def __init__(self, host: Host, region: Region, rank: int, peers: tuple[int, ...]) -> None:
        self._host, self.region, self.rank, self.peers = host, region, rank, peers

    @abstractmethod
    def advance(self) -> bool:
        """Does what can be done now and returns whether that was anything.

        Only the first operation of a queue is advanced.
        """

    def wait(self) -> None:
        """Returns once received tensors may be read and sent tensors may be overwritten."""
        self._host.wait(self)
