"""The worker's end of the bridge to Ray: starts the process, watches it, and ends it."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Final

from layout_tuner.workers.launchers.ray.directory import RayDirectory
from layout_tuner.workers.ranks.json_lines import JsonLines
from layout_tuner.workers.ranks.processes import ended_within, last_words
from layout_tuner.workers.ranks.warden import python_module, start_under_warden

_CLOSE_WITHIN_S: Final = 40.0
_LAST_WORDS: Final = 3


class BridgeProcess:
    """A process `workers.launchers.ray.bridge` below a warden of this process.

    Any thread may call it. When this process ends for any reason, the warden ends the bridge and a
    cluster that it has started.

    Raises:
        OSError: it can't be started.
        RayClusterFailedError: there is no place for Ray's files.
    """

    def __init__(self, flags: Sequence[str], variables: Mapping[str, str]) -> None:
        with ExitStack() as on_failure:
            self._log = on_failure.enter_context(tempfile.TemporaryFile())
            ours, theirs = socket.socketpair()
            on_failure.enter_context(ours)
            # The warden that ends last removes the directory. Where no warden can be started, the
            # next start of a worker removes it.
            with theirs, closing(RayDirectory.create()) as directory:
                own_flags = [f"--socket={theirs.fileno()}", f"--directory={directory.path}"]
                self._warden = start_under_warden(
                    [
                        *python_module("layout_tuner.workers.launchers.ray.bridge"),
                        *own_flags,
                        *flags,
                    ],
                    env={**os.environ, **variables, **directory.variables},
                    pass_fds=[theirs.fileno()],
                    directory=directory,
                    log_fd=self._log.fileno(),
                )
            on_failure.pop_all()  # closed in `close`
        self._line = JsonLines(ours)

    def replace(self, node: str) -> None:
        """Has the agent of a node replaced; a bridge that has ended leaves that to the next one."""
        with suppress(OSError):
            self._line.send({"order": "replace", "node": node})

    def wait(self) -> str:
        """Waits until no process of the bridge is left; returns how it ended, for messages."""
        return f"exit code {self._warden.wait()}{self.last_words()}"

    def last_words(self) -> str:
        """What the bridge printed last, for messages: for example why agents do not get ready."""
        if self._log.closed:
            return ""
        words = last_words(self._log.fileno(), _LAST_WORDS)
        return f"; its last words: {words}" if words else ""

    def end(self) -> None:
        """Has the bridge and all below it killed, which may hang; `wait` then returns."""
        self._warden.terminate()

    def close(self) -> None:
        """Ends the bridge, its agents, and a cluster that it has started."""
        self._line.close()
        if not ended_within(self._warden, _CLOSE_WITHIN_S):
            self._warden.terminate()
            self._warden.wait(_CLOSE_WITHIN_S)
        self._log.close()
