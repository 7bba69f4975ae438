"""A group of ranks on its nodes, from the first fork to the last process."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from search_spaces.outcome import FailureReason
from workers.errors import NodeLostError
from workers.json_lines import Document
from workers.launchers.base import Cancelled, NodeEvent, NodeSet, OnEvent
from workers.rank_task import RankTask

_TICK_S: Final = 0.5
"""How often a cancellation is looked at while nothing happens: over Ray, each look costs the ranks
a little of their cores."""

_CAUSE_WITHIN_S: Final = 0.4
"""How long the first failure may take to show after its consequences: a rank that sees the
connection of a dead peer closed may be heard before the kernel has told of the peer's death."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFailure:
    """Why a group did not get to its end."""

    reason: FailureReason
    message: str
    node: int | None = None
    """Where, as a position among the nodes."""
    rank: int | None = None
    transport: bool = False
    """Whether it may be the consequence of another rank's failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupEnd:
    """How a group ended. Nothing of it is left."""

    failure: GroupFailure | None
    results: Mapping[int, Document]
    """What each rank returned."""
    log_tail: str
    """Last lines of the rank that failed, or of all of them when none did so first."""
    duration_s: float


@dataclass(kw_only=True)
class _Progress:
    """What is known of a running group."""

    results: dict[int, Document] = field(default_factory=dict)
    exited: set[int] = field(default_factory=set)
    complained: set[int] = field(default_factory=set)
    met: bool = False
    last_iteration: int | None = None
    failure: GroupFailure | None = None
    failed_at: float = 0.0

    def note(self, failure: GroupFailure) -> None:
        """Keeps the first failure; one that is no mere consequence replaces one that may be."""
        if self.failure is None:
            self.failure, self.failed_at = failure, time.monotonic()
        elif self.failure.transport and not failure.transport:
            self.failure = failure

    def is_over(self, num_ranks: int) -> bool:
        """Whether there is nothing more to wait for."""
        if self.failure is not None and not self.failure.transport:
            return True
        if self.failure is not None and time.monotonic() >= self.failed_at + _CAUSE_WITHIN_S:
            return True
        return len(self.exited) == num_ranks

    def wait_s(self) -> float:
        """How long to wait for the next event: a failure's cause has little time to show."""
        if self.failure is None:
            return _TICK_S
        return max(0.0, self.failed_at + _CAUSE_WITHIN_S - time.monotonic())

    def last(self) -> str:
        """How far it got, for people."""
        if self.last_iteration is not None:
            return f"last: iteration {self.last_iteration}"
        return "no iteration had ended" if self.met else "the ranks had not met"


class Group:
    """Runs one group: starts it, brings its ranks together, and ends it at the first failure.

    Args:
        nodes: where it runs.
        tasks: the ranks, by position of their node.
        deadline_s: seconds from the start after which it is ended.
        on_event: is told what the ranks report.
        cancelled: is asked now and then whether to end.
        memory_limit_bytes: what each rank was promised; None: nothing.
    """

    def __init__(
        self,
        nodes: NodeSet,
        tasks: Mapping[int, Sequence[RankTask]],
        *,
        deadline_s: float,
        on_event: OnEvent,
        cancelled: Cancelled,
        memory_limit_bytes: int | None = None,
    ) -> None:
        self._nodes = nodes
        self._tasks = tasks
        self._used = tuple(tasks)
        first = tasks[self._used[0]][0]
        self._group = first.group
        self._num_ranks = first.world_size
        self._master_address = first.address
        self._deadline_s = deadline_s
        self._on_event = on_event
        self._cancelled = cancelled
        self._memory_limit_bytes = memory_limit_bytes
        self._progress = _Progress(met=not first.rendezvous)
        self._ends_at = math.inf

    def run(self) -> GroupEnd:
        """Runs the group to its end; when this returns, no process of it is left.

        Raises:
            RanksLeftError: some process can't be ended.
        """
        started = time.monotonic()
        try:
            self._nodes.wait_until_ready()
            started = time.monotonic()  # importing torch is none of the ranks' time
            self._ends_at = started + self._deadline_s
            self._nodes.start(self._tasks)
            self._follow()
        except NodeLostError as error:
            lost = GroupFailure(reason="node_lost", message=str(error), node=error.node)
            self._progress.note(lost)
        finally:
            tails = self._nodes.end(self._used, self._group)
        failure = self._progress.failure
        return GroupEnd(
            failure=failure,
            results=self._progress.results,
            log_tail=_log_tail(tails, None if failure is None else failure.rank),
            duration_s=time.monotonic() - started,
        )

    def _follow(self) -> None:
        progress = self._progress
        while not progress.is_over(self._num_ranks):
            left_s = self._ends_at - time.monotonic()
            if self._cancelled():
                message = f"the probe was cancelled ({progress.last()})"
                progress.note(GroupFailure(reason="cancelled", message=message))
            elif left_s <= 0:
                progress.note(self._out_of_time())
            else:
                timeout_s = min(left_s, progress.wait_s())
                for event in self._nodes.poll(self._used, self._group, timeout_s):
                    self._take(event)

    def _out_of_time(self) -> GroupFailure:
        """It is on all of its nodes; where it was on one alone, that one is named."""
        names = ", ".join(self._nodes.nodes[node].name for node in self._used)
        return GroupFailure(
            reason="timeout",
            message=f"the probe did not end within deadline_s={self._deadline_s:g} "
            f"({self._progress.last()}) on {names}",
            node=self._used[0] if len(self._used) == 1 else None,
        )

    def _take(self, event: NodeEvent) -> None:
        document = event.document
        if document["event"] in ("lost", "group_lost"):
            message = document.get("message", "the node's agent or zygote ended")
            failure = GroupFailure(reason="node_lost", message=message, node=event.node)
            return self._progress.note(failure)
        if (
            document["event"] == "starting"
        ):  # nodes that take their time, which is none of the ranks'
            self._ends_at = math.inf
            return None
        if document["event"] == "started":
            self._ends_at = time.monotonic() + self._deadline_s
            return None
        if document["event"] == "exit":
            return self._take_exit(event.node, document)
        return self._take_report(event.node, document["rank"], document["document"])

    def _take_report(self, node: int, rank: int, report: Document) -> None:
        match report["event"]:
            case "listening":
                self._progress.met = True
                where = {"address": self._master_address, "port": report["port"]}
                self._nodes.tell(self._used, self._group, where)
                self._on_event(report)
            case "result":
                self._progress.results[rank] = report
            case "error":
                self._progress.complained.add(rank)
                failure = GroupFailure(
                    reason=report["reason"],
                    message=f"rank {rank}: {report['message']}",
                    node=node,
                    rank=rank,
                    transport=report["transport"],
                )
                self._progress.note(failure)
            case _:
                if "index" in report:
                    self._progress.last_iteration = report["index"]
                self._on_event(report)

    def _take_exit(self, node: int, document: Document) -> None:
        rank, code = document["rank"], document["code"]
        self._progress.exited.add(rank)
        if code == 0 and rank in self._progress.results:
            return
        if code > 0 and rank in self._progress.complained:
            return
        reason, how = self._how_it_ended(document)
        failure = GroupFailure(reason=reason, message=f"rank {rank} {how}", node=node, rank=rank)
        self._progress.note(failure)

    def _how_it_ended(self, document: Document) -> tuple[FailureReason, str]:
        code, oom_kills = document["code"], document["oom_kills"]
        if code == 0:
            return "crashed", "ended without a result"
        if code > 0:
            return "crashed", f"ended with exit code {code} without saying why"
        if code == -signal.SIGALRM:
            return "timeout", "was ended by its own alarm after the deadline"
        killed = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        if code != -signal.SIGKILL:
            return "crashed", killed
        if oom_kills is None:
            why = "whether the out-of-memory killer did that can't be known: the kernel keeps no count"
            return "crashed", f"{killed}; {why}"
        if not oom_kills:
            why = "the kernel's out-of-memory killer did not strike on the node meanwhile"
            return "crashed", f"{killed}; {why}"
        reason, why = self._blame(document)
        struck = f"the kernel's out-of-memory killer struck {oom_kills} times on the node meanwhile"
        return reason, f"{killed}; {struck}, {why}"

    def _blame(self, document: Document) -> tuple[FailureReason, str]:
        """Whether it is the layout's fault that a node ran out of memory.

        It is where one of its ranks there took more than it was promised, or nothing was promised.
        Else others had the memory, be it a group beside this one, and that says nothing about it.
        """
        limit_bytes = self._memory_limit_bytes
        free = f"{document['memory_available_bytes']} bytes free at the start"
        if limit_bytes is None:
            return "out_of_memory", f"which had {free}"
        taken = {int(rank): taken for rank, taken in document["memory_taken_bytes"].items()}
        most = max(taken, key=lambda rank: taken[rank])
        if taken[most] > limit_bytes:
            why = f"rank {most} had taken {taken[most]} bytes, over its limit of {limit_bytes}"
            return "out_of_memory", f"which had {free}; {why}"
        why = (
            f"no rank took more than rank {most}, {taken[most]} of the {limit_bytes} bytes promised"
        )
        return "node_lost", f"which had {free}; {why}"


def _log_tail(tails: Mapping[int, str], rank: int | None) -> str:
    """The tail of one rank, or all of them under a heading each."""
    if rank is not None:
        return tails.get(rank, "")
    told: dict[int, Any] = {rank: tail for rank, tail in sorted(tails.items()) if tail}
    return "\n".join(f"--- rank {rank}\n{tail}" for rank, tail in told.items())
