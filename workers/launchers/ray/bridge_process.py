"""The bridge to Ray as its worker holds it: started, spoken with, started again when it ends."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from workers.json_lines import Document, JsonLines
from workers.ray_cluster import make_directory
from workers.warden import python_module, start_under_warden

_CLOSE_WITHIN_S: Final = 40.0
_LAST_WORDS: Final = 3
_LOG_TAIL_BYTES: Final = 8 << 10


class BridgeProcess:
    """A `workers.ray_bridge` below a warden of this process.

    Any thread may send; one reads. However this process ends, the warden ends the bridge and a
    cluster that it has started.

    Args:
        flags: of the bridge.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        self._flags = flags
        self._sending = threading.Lock()
        self._closing = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._start()

    def send(self, order: Document) -> None:
        """Sends an order; one to a bridge that has ended is dropped: its nodes are lost."""
        try:
            with self._sending:
                self._line.send(order)
        except OSError:
            return

    def events(self) -> Iterator[Document]:
        """What the bridge tells, until it ends."""
        while True:
            try:
                documents = self._line.read(block=True)
            except OSError:  # closed under us
                return
            if documents is None:
                return
            yield from documents

    def wait(self) -> str:
        """Waits until nothing of the bridge is left; returns how it ended, for people."""
        try:
            code = self._warden.wait(_CLOSE_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._warden.terminate()
            code = self._warden.wait(_CLOSE_WITHIN_S)
        return f"exit code {code}{self._last_words()}"

    def terminate(self) -> None:
        """Has the warden end a bridge that hangs."""
        self._warden.terminate()

    def restart(self) -> None:
        """Starts another one, unless it has been closed meanwhile; to be called after `wait`."""
        with self._sending:
            if not self._closing:
                self._line.close()
                self._start()

    def close(self) -> None:
        """Ends the bridge, and with it agents and a cluster of its own."""
        self._closing = True
        self._line.close()  # whoever is blocked in sending wakes up
        with self._sending:
            self._line.close()  # a restart may have been faster
        self.wait()
        with self._sending:
            self._log.close()

    def _last_words(self) -> str:
        with self._sending:
            if self._log.closed:
                return ""
            size = os.fstat(self._log.fileno()).st_size
            tail = os.pread(self._log.fileno(), _LOG_TAIL_BYTES, max(0, size - _LOG_TAIL_BYTES))
        lines = [line for line in tail.decode(errors="replace").splitlines() if line.strip()]
        return f"; its last words: {' / '.join(lines[-_LAST_WORDS:])}" if lines else ""

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._log.seek(0)
        self._log.truncate()
        # It is removed by the warden that ends last: it may have to kill the cluster's own.
        directory = make_directory()
        flags = [f"--socket={theirs.fileno()}", f"--directory={directory}", *self._flags]
        self._warden = start_under_warden(
            [*python_module("workers.ray_bridge"), *flags],
            env=dict(os.environ),
            pass_fds=[theirs.fileno()],
            remove=directory,
            stdout=self._log.fileno(),
            stderr=self._log.fileno(),
        )
        theirs.close()
        self._line = JsonLines(ours)
