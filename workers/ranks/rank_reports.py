"""How the reports of ranks reach their node's agent: a socket to each rank, and one to the keeper.

The agent makes these sockets before the group starts. The other ends reach the keeper through the
zygote, and each rank inherits its own; neither of the two relays what a rank reports.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final

from layout_tuner.workers.ranks.json_lines import Document, JsonLines, Readers
from layout_tuner.workers.ranks.rank_task import RankTask

HOLD_S: Final = 0.5
"""Seconds between two batches of iterations, which are only for users and heartbeats."""


class RankReports:
    """Reads the events of a group in their order: iterations in batches, all others at once.

    Each batch wakes the worker, perhaps on a core that the ranks are measured on. With iterations
    of milliseconds, one message for each would take more time than the probes.

    Args:
        tasks: the group's ranks on this node.
        emit: called with events on the thread of `run`, and with none when it returns.

    Raises:
        OSError: no more sockets can be opened.
    """

    def __init__(
        self, tasks: Sequence[RankTask], emit: Callable[[Sequence[Document]], None]
    ) -> None:
        self.group = tasks[0].group
        self._emit = emit
        self._held: list[Document] = []
        self._next_batch_at = 0.0
        self._readers = Readers()
        self.is_closed = False
        """Whether the keeper has ended, and all events have been emitted."""
        with ExitStack() as on_failure:
            pairs = []
            for _ in range(1 + len(tasks)):
                pairs.append(socket.socketpair())
                for end in pairs[-1]:
                    on_failure.enter_context(end)
            on_failure.pop_all()
        self.others_ends = tuple(theirs for _, theirs in pairs)
        """The ends of keeper and ranks, in this order; to be closed when they have been sent."""
        lines = [JsonLines(ours) for ours, _ in pairs]
        self._keeper = lines[0]
        self._ranks = dict(zip((task.rank for task in tasks), lines[1:], strict=True))
        for rank, line in self._ranks.items():
            read = partial(JsonLines.read, block=False)
            self._readers.add(line.socket.fileno(), partial(self._take_from_rank, rank, read))
        # The last one: of what is there at once, the reports of all ranks come before any exit.
        self._readers.add(self._keeper.socket.fileno(), self._take_from_keeper)

    def run(self) -> None:
        """Reads until the keeper has ended, then closes the lines."""
        try:
            while not self.is_closed:
                self._readers.handle(self._next_batch_at if self._held else None)
                if self._held and time.monotonic() >= self._next_batch_at:
                    self._flush()
        finally:
            self.is_closed = True
            self.close()
            self._flush()

    def close(self) -> None:
        for line in (self._keeper, *self._ranks.values()):
            line.close()
        for end in self.others_ends:
            end.close()

    def tell(self, document: Document) -> None:
        """Sends a document to every rank; one that has ended is left out."""
        for line in self._ranks.values():
            with suppress(OSError):
                line.send(document)

    def end(self) -> None:
        """Orders the keeper to end the group; it may have ended already."""
        with suppress(OSError):
            self._keeper.send({"order": "end"})

    def _take_from_keeper(self) -> None:
        documents = self._keeper.read(block=False)
        for document in documents or ():
            if document["event"] == "exit":  # it comes after all reports of the rank
                self._take_from_rank(document["rank"], JsonLines.read_all)
            self._add(document)
        self.is_closed = documents is None

    def _take_from_rank(
        self, rank: int, read: Callable[[JsonLines], list[Document] | None]
    ) -> None:
        line = self._ranks[rank]
        if line.socket.fileno() not in self._readers:
            return
        try:
            documents = read(line)
        except ValueError as error:
            documents = None
            message = f"a report of rank {rank} can't be read ({error})"
            self._add({"event": "group_lost", "group": self.group, "message": message})
        if documents is None:
            self._readers.remove(line.socket.fileno())
        for document in documents or ():
            self._add({"group": self.group, "rank": rank, "event": "report", "document": document})

    def _add(self, event: Document) -> None:
        """Emits an event, or keeps it for the next batch."""
        self._held.append(event)
        if not _can_wait(event) or time.monotonic() >= self._next_batch_at:
            self._flush()

    def _flush(self) -> None:
        events, self._held = self._held, []
        if any(map(_can_wait, events)):
            self._next_batch_at = time.monotonic() + HOLD_S
        self._emit(events)


def _can_wait(event: Document) -> bool:
    return bool(event["event"] == "report" and event["document"]["event"] == "iteration")
