"""The agent's side of the zygote: starts it below a warden, and orders groups of ranks.

It sets the environment of all ranks of the node, and watches the deadlines of ends. The warden ends
all processes when the agent ends.
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from layout_tuner.protocol.connection.service_address import PRIVATE_VARIABLES
from layout_tuner.workers.errors import NodeLostError, RanksLeftError, WorkerError
from layout_tuner.workers.ranks.json_lines import MOST_FDS, Document, JsonLines
from layout_tuner.workers.ranks.keeper import END_WITHIN_S
from layout_tuner.workers.ranks.memory_watch import MemoryWatch
from layout_tuner.workers.ranks.processes import end_marked, ended_within, last_words
from layout_tuner.workers.ranks.rank_reports import RankReports
from layout_tuner.workers.ranks.rank_task import RANK_ENTRY, RankTask
from layout_tuner.workers.ranks.scratch import SCRATCH_VARIABLE, HeldDirectory, remove
from layout_tuner.workers.ranks.warden import python_module, start_under_warden

START_WITHIN_S: Final = 90.0
_KEEPER_WITHIN_S: Final = END_WITHIN_S + 3.0
"""How long a keeper may take to end its group; then it is killed."""
_ORPHANS_WITHIN_S: Final = END_WITHIN_S + 2.0
"""How long the zygote may then take to end the remaining processes of the group."""
_CLOSE_WITHIN_S: Final = 10.0
_LOSS_WITHIN_S: Final = 3.0
_LAST_WORDS: Final = 5
_MEMORY_IS_KEPT: Final = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
}
"""Makes malloc keep freed memory, or each micro-batch faults the same pages in again."""

_MARK_VARIABLE: Final = "LAYOUT_TUNER_NODE_RANKS"
"""A variable of every process below the warden; its value is unique to the warden."""

_SCRATCH_PREFIX: Final = "layout-tuner-ranks-"
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ZygoteClient:
    """Forks groups of ranks on this node, reads their events, and ends them.

    Any thread may call it. The zygote ends when this process ends for any reason, and when one of
    the other guardians ends.

    Args:
        other_guardians: pids of further processes whose end ends all ranks on the node.
        rank_entry: "module:function" that a forked rank runs.
        memory: waits for the memory of ended groups; None: that of this machine.
    """

    def __init__(
        self,
        *,
        other_guardians: Sequence[int] = (),
        rank_entry: str = RANK_ENTRY,
        memory: MemoryWatch | None = None,
    ) -> None:
        self._memory = MemoryWatch() if memory is None else memory
        self._mark = secrets.token_hex(16)
        with ExitStack() as on_failure:
            self._log = on_failure.enter_context(tempfile.TemporaryFile())
            ours, theirs = socket.socketpair()
            on_failure.enter_context(ours)
            where = Path(tempfile.gettempdir()), _SCRATCH_PREFIX, SCRATCH_VARIABLE
            with theirs, closing(HeldDirectory.create_below(*where)) as directory:
                self._scratch = directory.path
                on_failure.callback(self._remove_scratch)
                flags = [f"--socket={theirs.fileno()}", f"--entry={rank_entry}"]
                self._warden = start_under_warden(
                    [*python_module("layout_tuner.workers.ranks.zygote"), *flags],
                    env={
                        **_zygote_environment(),
                        _MARK_VARIABLE: self._mark,
                        SCRATCH_VARIABLE: str(self._scratch),
                    },
                    pass_fds=[theirs.fileno()],
                    other_guardians=other_guardians,
                    directory=directory,
                    log_fd=self._log.fileno(),
                )
            on_failure.pop_all()  # closed in `close`
        self._line = JsonLines(ours)
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._events: list[Document] = []
        self._groups: dict[str, RankReports] = {}
        self._ended: dict[str, Document] = {}
        """Groups that their keepers have ended."""
        self._gone: set[str] = set()
        """Groups without a keeper, and without processes below it."""
        self._zygote_pid: int | None = None
        self._loss = ""  # how the zygote ended; empty: it runs
        self._reader = threading.Thread(target=self._read, name="zygote-reader", daemon=True)
        self._reader.start()

    @property
    def pids(self) -> dict[str, int]:
        return {"warden": self._warden.pid, "zygote": self._zygote_pid or 0}

    def wait_until_ready(self, within_s: float = START_WITHIN_S) -> None:
        """Waits until the zygote has imported the ranks' modules; NodeLostError if it does not."""
        with self._changed:
            self._changed.wait_for(lambda: self._zygote_pid or self._loss, within_s)
            if self._zygote_pid is not None:
                return
            why = f": {self._loss}" if self._loss else f" within {within_s:g} s{self._last_words()}"
            raise NodeLostError(f"the zygote on {socket.gethostname()} did not get ready{why}")

    def start(self, tasks: Sequence[RankTask]) -> None:
        """Forks the ranks of one group. Raises NodeLostError if the zygote has ended."""
        self._memory.group_starts(tasks)
        group = tasks[0].group
        try:
            reports = RankReports(tasks, self._take)
        except OSError as error:
            message = f"{len(tasks)} ranks could not be connected: {error}"
            return self._take([{"event": "group_lost", "group": group, "message": message}])
        try:
            self._order({"order": "start", "tasks": [asdict(task) for task in tasks]}, reports)
        except NodeLostError:
            reports.close()
            raise
        self._groups[group] = reports
        return threading.Thread(target=reports.run, name=f"group-{group}", daemon=True).start()

    def tell(self, group: str, document: Document) -> None:
        if (reports := self._groups.get(group)) is not None:
            reports.tell(document)

    def poll(self, timeout_s: float) -> list[Document]:
        """The events since the last call; waits for one up to the timeout.

        After the end of the zygote, the last event of every call is {"event": "lost", "message":
        ...}.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._loss, timeout_s)
            events, self._events = self._events, []
            if self._loss:
                events.append({"event": "lost", "message": self._how_lost()})
            return events

    def end(self, group: str) -> dict[int, str]:
        """Ends the remaining processes of a group and waits for its memory; returns the log tails.

        Raises:
            NodeLostError: the zygote has ended (its warden ends the ranks).
            RanksLeftError: a process of the group can't be ended.
            MemoryNotBackError: the memory of the group is not free again.
        """
        try:
            tails = self._end_processes(group)
        except WorkerError:
            self._memory.forget(group)
            raise
        self._memory.wait_until_back(group)
        return tails

    def _end_processes(self, group: str) -> dict[int, str]:
        if (reports := self._groups.get(group)) is not None:
            reports.end()
            if not self._wait_for_end(reports, _KEEPER_WITHIN_S):
                self._order({"order": "kill", "group": group})
                self._wait_for_end(reports, _ORPHANS_WITHIN_S)
        with self._changed:
            self._groups.pop(group, None)
            is_gone = group in self._gone
            self._gone.discard(group)
            ended = self._ended.pop(group, {"log_tails": {}, "left": None})
        if self._loss and not is_gone:
            raise NodeLostError(self._how_lost())
        left = ended["left"]
        if reports is not None and not is_gone and left is None:
            within_s = _KEEPER_WITHIN_S + _ORPHANS_WITHIN_S
            left = (
                f"processes of group {group} are still there {within_s:g} s after its end was "
                "ordered; look for a hung device or file system on this node"
            )
        if left is not None:
            raise RanksLeftError(left)
        return {int(rank): tail for rank, tail in ended["log_tails"].items()}

    def _wait_for_end(self, reports: RankReports, within_s: float) -> bool:
        """Waits until a group is gone and all of its events have come, or it can't be ended."""

        def is_over() -> bool:
            is_left = bool(self._ended.get(reports.group, {}).get("left"))
            return is_left or (reports.group in self._gone and reports.is_closed)

        with self._changed:
            self._changed.wait_for(lambda: is_over() or self._loss, within_s)
            return is_over() or bool(self._loss)

    def close(self) -> None:
        """Ends the zygote and all processes below it; returns when they have ended.

        Raises:
            RanksLeftError: a process can't be ended; the warden goes on trying.
        """
        self._line.close()
        try:
            if not (has_ended := ended_within(self._warden, _CLOSE_WITHIN_S)):
                self._warden.terminate()  # the warden kills processes that do not end by themselves
                has_ended = ended_within(self._warden, _CLOSE_WITHIN_S)
        finally:
            self._reader.join(_CLOSE_WITHIN_S)
            self._log.close()
        if not has_ended:
            raise RanksLeftError(
                f"the warden, process {self._warden.pid}, could not end everything below it in "
                f"{2 * _CLOSE_WITHIN_S:g} s; look for a hung device or file system on this node"
            )
        # Daemons below a warden that was killed still run if their keeper died too.
        if self._warden.returncode < 0:
            end_marked(_MARK_VARIABLE, self._mark, within_s=_CLOSE_WITHIN_S)
            self._remove_scratch()

    def _remove_scratch(self) -> None:
        with suppress(OSError):  # the next start removes what is left
            remove(self._scratch)

    def _order(self, order: Document, reports: RankReports | None = None) -> None:
        others_ends = () if reports is None else reports.others_ends
        fds = [end.fileno() for end in others_ends]
        try:
            with self._sending:
                for first in range(0, len(fds), MOST_FDS):
                    self._line.send_with_fds({"order": "lines"}, fds[first : first + MOST_FDS])
                self._line.send(order)
        except OSError as error:
            with self._changed:
                self._changed.wait_for(lambda: self._loss, _LOSS_WITHIN_S)
                raise NodeLostError(self._how_lost()) from error
        for end in others_ends:
            end.close()

    def _read(self) -> None:
        while True:
            unreadable = ""
            try:
                documents = self._line.read(block=True)
            except OSError:  # another thread closed it
                documents = None
            except ValueError as error:
                documents = None
                unreadable = f"its message can't be read ({error}), so it was ended; "
                self._line.close()
            loss = f"{unreadable}{self._describe_loss()}" if documents is None else ""
            with self._changed:
                self._loss = loss
                self._take(documents or ())
            if documents is None:
                return

    def _take(self, documents: Sequence[Document]) -> None:
        """Notes events of the zygote, or of a group."""
        with self._changed:
            for document in documents:
                match document["event"]:
                    case "ready":
                        self._zygote_pid = document["pid"]
                    case "ended":
                        self._ended[document["group"]] = document
                    case "gone":
                        self._gone.add(document["group"])
                    case _:
                        self._events.append(document)
            self._changed.notify_all()

    def _how_lost(self) -> str:
        return f"the zygote ended: {self._loss}"

    def _describe_loss(self) -> str:
        """How the zygote ended, by the exit of its warden; to be called after its line closed."""
        has_ended = ended_within(self._warden, _LOSS_WITHIN_S)
        how = f"ended with exit code {self._warden.returncode}" if has_ended else "still runs"
        return f"its warden {how}{self._last_words()}"

    def _last_words(self) -> str:
        """What the warden and the zygote printed last."""
        words = last_words(self._log.fileno(), _LAST_WORDS)
        return f"; its last words: {words}" if words else ""


def _zygote_environment() -> dict[str, str]:
    """This process's environment without variables that ranks must not have.

    Libraries get one thread: a fork after a multi-threaded region hangs in the child, and more
    threads than cores slow every rank. Ray sets an empty list of devices for actors that request
    none, which is removed.
    """
    kept: dict[str, Any] = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_")
        and name not in PRIVATE_VARIABLES
        and not (name.endswith("VISIBLE_DEVICES") and not value)
    }
    return {**_MEMORY_IS_KEPT, **kept, **dict.fromkeys(_ONE_THREAD, "1")}
