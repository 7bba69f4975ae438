"""One step of an allocation: a group's nodes, from the call of the first to the end of the last."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from workers.errors import NodeLostError, RanksLeftError
from workers.json_lines import Document, JsonLines
from workers.launchers.base import NodeEvent
from workers.launchers.srun_process import SrunProcess
from workers.rank_task import RankTask

_LOOK_EVERY_S: Final = 0.2
"""How often a waiting step looks whether its `srun` lives."""
_CAUSE_WITHIN_S: Final = 0.4
"""How long `srun` may take to say, or show by its own end, why a node's line has closed."""
_ENDED_WITHIN_S: Final = 40.0
"""Longer than a node gives its zygote."""
_GONE_WITHIN_S: Final = 15.0


@dataclass(kw_only=True, slots=True)
class _Member:
    """A node of the step."""

    name: str
    hello: Document | None = None
    line: JsonLines | None = None
    ordered: bool = False
    untold: list[Document] = field(default_factory=list)
    """Orders that came before its ranks."""
    started: bool = False
    ended: Document | None = None
    lost: bool = False
    hung_up_at: float | None = None
    is_cut_off: bool = False

    @property
    def is_there(self) -> bool:
        return self.line is not None and self.hung_up_at is None

    @property
    def is_gone(self) -> bool:
        """Whether its task has ended for sure: its kernel said so."""
        return self.hung_up_at is not None and not self.is_cut_off


class Step:
    """The nodes of one step and what they say. One thread asks, another one brings their words.

    Args:
        group: that it runs.
        nodes: names by position.
        connect_within_s: how long after its launch a node may take to call.
    """

    def __init__(self, *, group: str, nodes: Mapping[int, str], connect_within_s: float) -> None:
        self._group = group
        self._members = {node: _Member(name=name) for node, name in nodes.items()}
        self._connect_within_s = connect_within_s
        self._tasks: Mapping[int, Sequence[RankTask]] = {}
        self._changed = threading.Condition()
        self._events: list[NodeEvent] = []
        self._process: SrunProcess | None = None
        self._launched_at = 0.0
        self._is_over = False
        self.reasons: dict[int, str] = {}
        """Why nodes can't go on, whoever is to blame."""
        self.losses: dict[int, str] = {}
        """The same of nodes that are to blame themselves."""

    @property
    def nodes(self) -> Sequence[int]:
        """Their positions."""
        return tuple(self._members)

    @property
    def srun_pid(self) -> int | None:
        """Of the `srun`; None: it waits for its turn."""
        return None if self._process is None else self._process.pid

    @property
    def pids(self) -> Mapping[int, int]:
        """Of the step's task, by position of the node."""
        return {node: m.hello["pid"] for node, m in self._members.items() if m.hello}

    def launch(self, process: SrunProcess) -> None:
        """Takes over the `srun` that has been started for it."""
        with self._changed:
            self._process = process
            self._launched_at = time.monotonic()
            self._changed.notify_all()

    def give_up(self, why: str) -> None:
        """There is no `srun` for it, and there will be none."""
        with self._changed:
            self._is_over = True
            for node in self._members:
                self._lose(node, why, to_blame=False)
            self._changed.notify_all()

    def start(self, tasks: Mapping[int, Sequence[RankTask]]) -> None:
        """Has ranks started on each node as soon as it calls in."""
        self._tasks = tasks
        self._tell_of("starting")

    def hellos(self) -> Mapping[int, Document]:
        """What the nodes said of themselves; waits until all have, or are lost."""
        while not all(m.hello or m.lost for m in self._members.values()):
            self.poll(_LOOK_EVERY_S)
        return {node: m.hello for node, m in self._members.items() if m.hello}

    # The reading thread's.

    def called(self, hello: Document, line: JsonLines) -> int | None:
        """A node has called in."""
        with self._changed:
            for node, member in self._members.items():
                if member.name == hello["name"] and member.hello is None and not member.lost:
                    member.hello, member.line = hello, line
                    self._changed.notify_all()
                    return node
        return None

    def said(self, node: int, documents: list[Document]) -> None:
        """What a node says."""
        member = self._members[node]
        with self._changed:
            for document in documents:
                match document["event"]:
                    case "started":
                        self._note_start(member)
                    case "ended":
                        member.ended = document
                    case "lost" if member.ended:
                        continue  # its zygote ends with the step
                    case "lost":
                        self._lose(node, f"node {member.name} was lost: {document['message']}")
                    case _:
                        self._events.append(NodeEvent(node=node, document=document))
            self._changed.notify_all()

    def hung_up(self, node: int, *, is_cut_off: bool) -> None:
        """A node's line has closed."""
        with self._changed:
            self._members[node].hung_up_at = time.monotonic()
            self._members[node].is_cut_off = is_cut_off
            self._changed.notify_all()

    # The group's.

    def poll(self, timeout_s: float) -> list[NodeEvent]:
        """What happened since the last call; waits for something up to the timeout."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            self._send_start_orders()
            with self._changed:
                self._look()
                left_s = give_up_at - time.monotonic()
                if self._events or left_s <= 0:
                    events, self._events = self._events, []
                    return events
                if not self._to_order():
                    self._changed.wait(min(left_s, _LOOK_EVERY_S))

    def tell(self, document: Document) -> None:
        """Gives an order to all nodes; those that have no ranks yet get it with the ranks.

        Raises:
            NodeLostError: one of them does not take it.
        """
        for node, member in self._members.items():
            if member.ordered:
                self._send(node, member, document)
            else:  # the first ranks may listen before the last node has called in
                member.untold.append(document)

    def end(self) -> dict[int, str]:
        """Ends the group, then the step; returns the log tails of the ranks by rank.

        Raises:
            RanksLeftError: something can't be ended.
        """
        if self._process is None:
            return {}
        ordered = {node: m for node, m in self._members.items() if m.ordered and m.is_there}
        for node in ordered:
            self._try_to_send(node, {"order": "end", "group": self._group})
        self._wait_for(
            lambda: all(m.ended or m.lost or not m.is_there for m in ordered.values()),
            _ENDED_WITHIN_S,
        )
        self._close_lines()
        self._lose_who_did_not_end()
        members = self._members.values()
        self._process.end(
            step_id=self._step_id(),
            is_clean=all(m.is_gone and (m.ended or not m.ordered) for m in members),
            tasks_are_gone=all(m.is_gone for m in members),
        )
        return _tails({node: m.ended for node, m in self._members.items() if m.ended})

    def _lose_who_did_not_end(self) -> None:
        with self._changed:
            for node, member in self._members.items():
                if member.ordered and not member.ended and not self._is_over:
                    why = f"node {member.name} did not say that its ranks have ended"
                    self._lose(node, why + _quoted(self._last_words()))

    def _close_lines(self) -> None:
        """Hangs up; a node that has been heard to the end hangs up in turn as its task ends."""
        for member in self._members.values():
            if member.line is not None:
                member.line.end_writing()
        self._wait_for(lambda: not any(m.is_there for m in self._members.values()), _GONE_WITHIN_S)

    def _last_words(self) -> str:
        return "" if self._process is None else self._process.last_words()

    def _step_id(self) -> str | None:
        return next((m.hello["step"] for m in self._members.values() if m.hello), None)

    def _wait_for(self, condition: Callable[[], bool], within_s: float) -> None:
        with self._changed:
            self._changed.wait_for(condition, within_s)

    def _to_order(self) -> list[tuple[int, _Member]]:
        return [
            (node, m)
            for node, m in self._members.items()
            if node in self._tasks and m.is_there and not m.ordered and not m.lost
        ]

    def _send_start_orders(self) -> None:
        with self._changed:
            to_order = self._to_order()
        for node, member in to_order:
            member.ordered = True
            tasks = [task.to_mapping() for task in self._tasks[node]]
            self._try_to_send(node, {"order": "start", "tasks": tasks})
            for document in member.untold:
                self._try_to_send(node, document)

    def _send(self, node: int, member: _Member, document: Document) -> None:
        try:
            assert member.line is not None
            member.line.send(document)
        except OSError as error:
            raise NodeLostError(f"node {member.name} was lost: {error}", node=node) from error

    def _try_to_send(self, node: int, document: Document) -> None:
        """Its line is closed where that fails, and that is seen by the reading thread."""
        try:
            self._send(node, self._members[node], document)
        except NodeLostError:
            return

    def _note_start(self, member: _Member) -> None:
        member.started = True
        if all(m.started for m in self._members.values()):
            self._tell_of("started")

    def _tell_of(self, event: str) -> None:
        document = {"event": event, "group": self._group}
        self._events.append(NodeEvent(node=self.nodes[0], document=document))

    def _look(self) -> None:
        """Looks for nodes that are lost; their loss is told once."""
        if self._process is None or self._is_over:
            return None
        code = self._process.exit_code()
        if code is not None:
            self._is_over = True
            return self._lose_with_srun(code, self._last_words())
        now = time.monotonic()
        for node, member in self._members.items():
            if member.hello is None and now > self._launched_at + self._connect_within_s:
                why = f"node {member.name} did not call in within {self._connect_within_s:g} s"
                self._lose(node, why + _quoted(self._last_words()))
            elif member.hung_up_at is not None and not member.ended:
                words = self._last_words()
                if member.name in words or now > member.hung_up_at + _CAUSE_WITHIN_S:
                    why = f"node {member.name} was lost: its line closed"
                    self._lose(node, why + _quoted(words))
        return None

    def _lose(self, node: int, why: str, *, to_blame: bool = True) -> None:
        member = self._members[node]
        if member.lost:
            return
        member.lost = True
        self.reasons[node] = why
        if to_blame:
            self.losses[node] = why
        self._events.append(NodeEvent(node=node, document={"event": "lost", "message": why}))

    def _lose_with_srun(self, code: int, words: str) -> None:
        """The step is over. Those that never called are to blame where others did, or that are named."""
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        why = f"the step's srun ended with {how}{_quoted(words)}"
        silent = [node for node, m in self._members.items() if m.hello is None]
        if len(silent) == len(self._members) > 1:
            blamed = [node for node in silent if self._members[node].name in words]
        else:
            blamed = silent
        for node in blamed:
            self._lose(node, f"node {self._members[node].name} did not call in: {why}")
        for node in self._members:
            self._lose(node, why, to_blame=False)


def _tails(ended: Mapping[int, Document]) -> dict[int, str]:
    tails: dict[int, str] = {}
    for node, document in ended.items():
        if document["left"]:
            raise RanksLeftError(document["left"], node=node)
        tails.update({int(rank): tail for rank, tail in document["log_tails"].items()})
    return tails


def _quoted(words: str) -> str:
    return f"; srun's last words: {words}" if words else ""
