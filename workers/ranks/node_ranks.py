"""The ranks of one node: starts the warden and the zygote, and speaks with the zygote."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from typing import Any, Final

from workers.errors import NodeLostError, RanksLeftError, WorkerError
from workers.json_lines import Document, JsonLines
from workers.memory_watch import MemoryWatch
from workers.rank_task import RANK_ENTRY, RankTask
from workers.warden import python_module, start_under_warden

START_WITHIN_S: Final = 90.0
_END_WITHIN_S: Final = 25.0
"""Longer than the zygote gives a keeper that hangs, and then those that the keeper leaves."""
_CLOSE_WITHIN_S: Final = 10.0
_LOSS_WITHIN_S: Final = 3.0
_LAST_WORDS: Final = 5
_LOG_TAIL_BYTES: Final = 8 << 10
_MEMORY_IS_KEPT: Final = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
}
"""Freed tensors stay with the process (decision 0009)."""

_ONE_THREAD: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class NodeRanks:
    """Forks groups of ranks on this node, tells what they report, and ends them.

    Any thread may call it. The zygote's life ends with this process, however that ends, and with
    the other guardians.

    Args:
        other_guardians: pids besides this process's whose end ends everything on the node.
        rank_entry: "module:function" that a forked rank runs.
        memory: what waits for the memory of ended groups; None: this machine's.
    """

    def __init__(
        self,
        *,
        other_guardians: Sequence[int] = (),
        rank_entry: str = RANK_ENTRY,
        memory: MemoryWatch | None = None,
    ) -> None:
        self._memory = MemoryWatch() if memory is None else memory
        ours, theirs = socket.socketpair()
        flags = [f"--socket={theirs.fileno()}", f"--entry={rank_entry}"]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._warden = start_under_warden(
            [*python_module("workers.zygote"), *flags],
            env=_zygote_environment(),
            pass_fds=[theirs.fileno()],
            other_guardians=other_guardians,
            stdout=self._log.fileno(),
            stderr=self._log.fileno(),
        )
        theirs.close()
        self._line = JsonLines(ours)
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._events: list[Document] = []
        self._ended: dict[str, Document] = {}
        self._zygote_pid: int | None = None
        self._loss = ""  # how the zygote ended, once it has
        self._reader = threading.Thread(target=self._read, name="zygote-reader", daemon=True)
        self._reader.start()

    @property
    def pids(self) -> dict[str, int]:
        """Pids of the warden and of the zygote."""
        return {"warden": self._warden.pid, "zygote": self._zygote_pid or 0}

    def wait_until_ready(self, within_s: float = START_WITHIN_S) -> None:
        """Waits until the zygote has loaded what ranks need.

        Raises:
            NodeLostError: it ended, or did not get there in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._zygote_pid or self._loss, within_s)
            if self._zygote_pid is not None:
                return
            why = f": {self._loss}" if self._loss else f" within {within_s:g} s{self._last_words()}"
            raise NodeLostError(f"the zygote on {socket.gethostname()} did not get ready{why}")

    def start(self, tasks: Sequence[RankTask]) -> None:
        """Forks the ranks of one group.

        Raises:
            NodeLostError: the zygote is gone.
        """
        self._memory.group_starts(tasks)
        self._order({"order": "start", "tasks": [task.to_mapping() for task in tasks]})

    def tell(self, group: str, document: Document) -> None:
        """Sends a document to every rank of the group on this node.

        Raises:
            NodeLostError: the zygote is gone.
        """
        self._order({"order": "tell", "group": group, "document": document})

    def poll(self, timeout_s: float) -> list[Document]:
        """The events since the last call; waits for one up to the timeout.

        Once the zygote is gone, the last event of every answer is {"event": "lost", "message": ...}.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._loss, timeout_s)
            events, self._events = self._events, []
            lost = {"event": "lost", "message": self._gone()}
            return [*events, lost] if self._loss else events

    def end(self, group: str) -> dict[int, str]:
        """Ends what is left of a group; returns when nothing is, with the ranks' log tails.

        Nothing: neither a process nor memory that it had.

        Raises:
            NodeLostError: the zygote is gone (its warden ends the ranks).
            RanksLeftError: a process of the group can't be ended.
            MemoryNotBackError: memory that it had is not free again.
        """
        try:
            tails = self._end_processes(group)
        except WorkerError:
            self._memory.forget(group)
            raise
        self._memory.wait_until_back(group)
        return tails

    def _end_processes(self, group: str) -> dict[int, str]:
        self._order({"order": "end", "group": group})
        with self._changed:
            self._changed.wait_for(lambda: group in self._ended or self._loss, _END_WITHIN_S)
            ended = self._ended.pop(group, None)
            lost = bool(self._loss)
        if ended is None and lost:
            raise NodeLostError(self._gone())
        if ended is None:
            raise RanksLeftError(f"the zygote did not end group {group} in {_END_WITHIN_S} s")
        if ended["left"]:
            raise RanksLeftError(ended["left"])
        return {int(rank): tail for rank, tail in ended["log_tails"].items()}

    def close(self) -> None:
        """Ends the zygote and everything below it; returns when it is gone.

        Raises:
            RanksLeftError: something below it can't be ended; its warden goes on trying.
        """
        self._line.close()
        try:
            self._warden.wait(_CLOSE_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._warden.terminate()  # the warden kills what does not end by itself
            self._wait_for_warden()
        finally:
            self._reader.join(_CLOSE_WITHIN_S)
            self._log.close()

    def _wait_for_warden(self) -> None:
        try:
            self._warden.wait(_CLOSE_WITHIN_S)
        except subprocess.TimeoutExpired as error:
            raise RanksLeftError(
                f"the warden, process {self._warden.pid}, could not end everything below it in "
                f"{2 * _CLOSE_WITHIN_S:g} s; look for a hung device or file system on this node"
            ) from error

    def _order(self, order: Document) -> None:
        try:
            with self._sending:
                self._line.send(order)
        except OSError as error:
            with self._changed:
                self._changed.wait_for(lambda: self._loss, _LOSS_WITHIN_S)
                raise NodeLostError(self._gone()) from error

    def _read(self) -> None:
        while True:
            try:
                documents = self._line.read(block=True)
            except OSError:  # closed under us
                documents = None
            loss = self._describe_loss() if documents is None else ""
            with self._changed:
                self._loss = loss
                for document in documents or ():
                    self._take(document)
                self._changed.notify_all()
            if documents is None:
                return

    def _take(self, document: Document) -> None:
        match document["event"]:
            case "ready":
                self._zygote_pid = document["pid"]
            case "ended":
                self._ended[document["group"]] = document
            case _:
                self._events.append(document)

    def _gone(self) -> str:
        return f"the zygote is gone: {self._loss}"

    def _describe_loss(self) -> str:
        """How the zygote ended, as its warden tells it; to be asked when its line has closed."""
        try:
            code = self._warden.wait(_LOSS_WITHIN_S)
        except subprocess.TimeoutExpired:
            return f"its warden is still at work{self._last_words()}"
        return f"its warden ended with exit code {code}{self._last_words()}"

    def _last_words(self) -> str:
        """What warden and zygote printed last. They share the file's offset: it is left alone."""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _LOG_TAIL_BYTES, max(0, size - _LOG_TAIL_BYTES))
        lines = tail.decode(errors="replace").splitlines()
        return f"; its last words: {' / '.join(lines[-_LAST_WORDS:])}" if lines else ""


def _zygote_environment() -> dict[str, str]:
    """This process's environment, without what ranks have no business with.

    One OpenMP thread: a fork after a multi-threaded region hangs in the child, and more threads
    than cores slow every rank. Ray hides devices from actors that ask for none by an empty list.
    """
    kept: dict[str, Any] = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY_", "LAYOUT_TUNER_TOKEN"))
        and not (name.endswith("VISIBLE_DEVICES") and not value)
    }
    return {**_MEMORY_IS_KEPT, **kept, **dict.fromkeys(_ONE_THREAD, "1")}
