"""The worker's end of the bridge to Ray: starts it, sends orders, reads events, restarts it."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Final

from workers.launchers.ray.directory import RayDirectory
from workers.ranks.json_lines import Document, JsonLines
from workers.ranks.processes import ended_within, last_words
from workers.ranks.warden import python_module, start_under_warden

_CLOSE_WITHIN_S: Final = 40.0
_LAST_WORDS: Final = 3


class BridgeProcess:
    """A process `workers.launchers.ray.bridge` below a warden of this process.

    Any thread may send; one reads. When this process ends for any reason, the warden ends the
    bridge and a cluster that it has started.

    Args:
        flags: command-line flags of the bridge.
        variables: for its environment.
    """

    def __init__(self, flags: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        self._flags = flags
        self._variables = variables or {}
        self._sending = threading.Lock()
        self._closing = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        try:
            self._start()
        except BaseException:
            self._log.close()
            raise

    def send(self, order: Document) -> None:
        """Sends an order; drops it where the bridge has ended, since its nodes are lost."""
        with suppress(OSError), self._sending:
            self._line.send(order)

    def events(self) -> Iterator[Document]:
        """The events of the bridge, until it ends."""
        while True:
            try:
                documents = self._line.read(block=True)
            except OSError:  # another thread closed it
                return
            if documents is None:
                return
            yield from documents

    def wait(self) -> str:
        """Waits until no process of the bridge is left; returns how it ended, for messages."""
        if not ended_within(self._warden, _CLOSE_WITHIN_S):
            self._warden.terminate()
            self._warden.wait(_CLOSE_WITHIN_S)
        return f"exit code {self._warden.returncode}{self._last_words()}"

    def terminate(self) -> None:
        """Ends a bridge that hangs, through its warden."""
        self._warden.terminate()

    def restart(self) -> None:
        """Starts another bridge, unless `close` was called meanwhile; to be called after `wait`."""
        with self._sending:
            if not self._closing:
                self._line.close()
                self._start()

    def close(self) -> None:
        """Ends the bridge, its agents, and a cluster that it has started."""
        self._closing = True
        self._line.close()  # wakes a thread that is blocked in `send`
        with self._sending:
            self._line.close()  # a restart may have come before
        self.wait()
        with self._sending:
            self._log.close()

    def _last_words(self) -> str:
        with self._sending:
            if self._log.closed:
                return ""
            words = last_words(self._log.fileno(), _LAST_WORDS)
        return f"; its last words: {words}" if words else ""

    def _start(self) -> None:
        self._log.seek(0)
        self._log.truncate()
        # The warden that ends last removes the directory. Where no warden can be started, the next
        # start of a worker removes it.
        with closing(RayDirectory.create()) as directory:
            ours, theirs = socket.socketpair()
            flags = [f"--socket={theirs.fileno()}", f"--directory={directory.path}", *self._flags]
            try:
                self._warden = start_under_warden(
                    [*python_module("workers.launchers.ray.bridge"), *flags],
                    env={**os.environ, **self._variables, **directory.variables},
                    pass_fds=[theirs.fileno()],
                    remove=directory.path,
                    held_fds=[directory.lock_fd],
                    stdout=self._log.fileno(),
                    stderr=self._log.fileno(),
                )
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
        self._line = JsonLines(ours)
