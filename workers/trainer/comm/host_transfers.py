"""What a rank has under way with the ranks of its host, and how it waits for it.

There is no thread: operations go on where one is started, and while this rank waits for any. It
polls, then sleeps for moments, and looks now and then whether those that it waits for are alive.
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

from workers.trainer.errors import PeerLostError

_POLL_S: Final = 1e-3
"""How long a rank with a core of its own polls before it sleeps: longer than peers are apart in a
pass, shorter than a pipeline's bubble."""
_NAP_S: Final = 1e-3
"""A sleeper is woken by who posts; what others may need of this rank beside that is seen so often."""
_LOOK_EVERY_S: Final = 0.05
"""How often a rank that sleeps looks whether its peers are alive."""


class Host:
    """What a rank has under way with the ranks of its host, and how it waits for them."""

    def __init__(self, processes: dict[int, int], *, timeout_s: float, shares_cores: bool) -> None:
        """Watches the processes of these ranks.

        Raises:
            PeerLostError: one of them has ended.
        """
        self._timeout_s = timeout_s
        # Where ranks share cores, the one that is waited for may need this one's.
        self._poll_s = 0.0 if shares_cores else _POLL_S
        self._queues: list[deque[Operation]] = []
        self._watched: dict[int, int] = {}
        for rank, process in processes.items():
            try:
                self._watched[rank] = os.pidfd_open(process)
            except ProcessLookupError as error:
                raise PeerLostError(_lost([rank])) from error

    def new_queue(self) -> deque[Operation]:
        """A queue whose operations are done one after the other."""
        self._queues.append(deque())
        return self._queues[-1]

    def start(self, operation: Operation, queue: deque[Operation]) -> None:
        """Begins an operation as soon as those before it are done."""
        queue.append(operation)
        with _uncounted():
            _advance(queue)

    def wait(self, operation: Operation) -> None:
        """Returns once the operation is done.

        Raises:
            PeerLostError: a rank that it needs has ended, or did not come in time.
        """
        if not operation.is_done:
            with _uncounted():
                self._wait(operation)

    def _wait(self, operation: Operation) -> None:
        now = time.monotonic()
        moved_at, look_at, is_armed = now, now + _LOOK_EVERY_S, False
        while True:
            moved = self._advance_all()
            if operation.is_done:
                return
            now = time.monotonic()
            if moved:
                moved_at, is_armed = now, False
            elif is_armed:
                operation.sleep(_NAP_S)
                is_armed = False
            elif now - moved_at >= self._poll_s:
                operation.arm()
                is_armed = True
            if now > look_at:
                look_at = now + _LOOK_EVERY_S
                self._look_after(operation, waited_s=now - moved_at)

    def _advance_all(self) -> bool:
        """All that is under way: what others wait for may be behind what this rank waits for."""
        moved = False
        for queue in self._queues:
            if queue:
                moved |= _advance(queue)
        return moved

    def _look_after(self, operation: Operation, *, waited_s: float) -> None:
        poll = select.poll()
        ranks = {self._watched[peer]: peer for peer in operation.peers}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        ended = [ranks[descriptor] for descriptor, _ in poll.poll(0)]
        # One that ends well has left all that is needed of it.
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
    """Slots are the transport's, as sockets' buffers are: no tensors of the rank."""
    if _get_current_dispatch_mode() is None:
        return nullcontext()
    return _disable_current_modes()


class Operation(ABC):
    """Something that is sent, received, or both, piece by piece."""

    peers: tuple[int, ...]
    """Global ranks that it needs."""
    is_done: bool = False

    def __init__(self, host: Host, peers: tuple[int, ...]) -> None:
        self._host, self.peers = host, peers

    @abstractmethod
    def advance(self) -> bool:
        """Does what can be done now; whether that was anything. Called while it is the first of its queue."""

    @abstractmethod
    def arm(self) -> None:
        """Asks those that it needs to wake this rank."""

    @abstractmethod
    def sleep(self, at_most_s: float) -> None:
        """Sleeps until one of them has done something since."""

    def wait(self) -> None:
        """Returns once what was received may be read, and what was sent may be written over."""
        self._host.wait(self)
