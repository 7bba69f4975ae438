"""The ranks of one node: starts the warden and the zygote, and speaks with the zygote."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import Any, Final

from workers.errors import NodeLostError, RanksLeftError
from workers.json_lines import Document, JsonLines
from workers.rank_task import RankTask
from workers.warden import python_module, start_under_warden

START_WITHIN_S: Final = 90.0
_END_WITHIN_S: Final = 20.0
_CLOSE_WITHIN_S: Final = 10.0
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class NodeRanks:
    """Forks groups of ranks on this node, tells what they report, and ends them.

    Any thread may call it. The zygote's life ends with this process, however that ends, and with
    the other guardians.

    Args:
        other_guardians: pids besides this process's whose end ends everything on the node.
        rank_entry: "module:function" that a forked rank runs.
    """

    def __init__(
        self, *, other_guardians: Sequence[int] = (), rank_entry: str = "workers.rank:main"
    ) -> None:
        ours, theirs = socket.socketpair()
        flags = [f"--socket={theirs.fileno()}", f"--entry={rank_entry}"]
        self._warden = start_under_warden(
            [*python_module("workers.zygote"), *flags],
            env=_zygote_environment(),
            pass_fds=[theirs.fileno()],
            other_guardians=other_guardians,
        )
        theirs.close()
        self._line = JsonLines(ours)
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._events: list[Document] = []
        self._ended: dict[str, Document] = {}
        self._zygote_pid: int | None = None
        self._lost = False
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
            self._changed.wait_for(lambda: self._zygote_pid or self._lost, within_s)
            if self._zygote_pid is None:
                raise NodeLostError(
                    f"the zygote on {socket.gethostname()} did not get ready within {within_s} s; "
                    "see the worker's standard error for what went wrong while torch was imported"
                )

    def start(self, tasks: Sequence[RankTask]) -> None:
        """Forks the ranks of one group.

        Raises:
            NodeLostError: the zygote is gone.
        """
        self._order({"order": "start", "tasks": [task.to_mapping() for task in tasks]})

    def tell(self, group: str, document: Document) -> None:
        """Sends a document to every rank of the group on this node.

        Raises:
            NodeLostError: the zygote is gone.
        """
        self._order({"order": "tell", "group": group, "document": document})

    def poll(self, timeout_s: float) -> list[Document]:
        """The events since the last call; waits for one up to the timeout.

        Once the zygote is gone, the last event of every answer is {"event": "lost"}.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._lost, timeout_s)
            events, self._events = self._events, []
            return [*events, {"event": "lost"}] if self._lost else events

    def end(self, group: str) -> dict[int, str]:
        """Ends what is left of a group; returns when nothing is, with the ranks' log tails.

        Raises:
            NodeLostError: the zygote is gone (its warden ends the ranks).
            RanksLeftError: a process of the group can't be ended.
        """
        self._order({"order": "end", "group": group})
        with self._changed:
            self._changed.wait_for(lambda: group in self._ended or self._lost, _END_WITHIN_S)
            ended = self._ended.pop(group, None)
            lost = self._lost
        if ended is None and lost:
            raise NodeLostError(_GONE)
        if ended is None:
            raise RanksLeftError(f"the zygote did not end group {group} in {_END_WITHIN_S} s")
        if ended["left"]:
            raise RanksLeftError(ended["left"])
        return {int(rank): tail for rank, tail in ended["log_tails"].items()}

    def close(self) -> None:
        """Ends the zygote and everything below it; returns when it is gone."""
        self._line.close()
        try:
            self._warden.wait(_CLOSE_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._warden.terminate()  # the warden kills what does not end by itself
            self._warden.wait(_CLOSE_WITHIN_S)
        self._reader.join(_CLOSE_WITHIN_S)

    def _order(self, order: Document) -> None:
        try:
            with self._sending:
                self._line.send(order)
        except OSError as error:
            raise NodeLostError(_GONE) from error

    def _read(self) -> None:
        while True:
            try:
                documents = self._line.read(block=True)
            except OSError:  # closed under us
                documents = None
            with self._changed:
                if documents is None:
                    self._lost = True
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


_GONE: Final = "the zygote is gone; look for its end in the worker's standard error"


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
    return {**kept, **dict.fromkeys(_ONE_THREAD, "1")}
