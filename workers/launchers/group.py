"""A group of ranks on its nodes, from the first fork to the end of the last process."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from layout_tuner.protocol.outcome import FailureReason
from layout_tuner.trainers.failure_texts import lacking
from layout_tuner.units import memory
from layout_tuner.workers.errors import NodeLostError
from layout_tuner.workers.launchers.launcher_nodes import (
    CAUSE_WITHIN_S,
    Cancelled,
    NodeEvent,
    NodeSet,
    OnEvent,
)
from layout_tuner.workers.ranks.json_lines import Document
from layout_tuner.workers.ranks.rank_task import RankTask

FAILED_LOG_LENGTH: Final = 1 << 16
COMPLETED_LOG_LENGTH: Final = 1 << 14
"""Most characters of the output of all ranks of a group that are kept."""

_LEAST_OF_A_RANK: Final = 400
_TICK_S: Final = 0.5
"""How often `cancelled` is called while there is no event: each look takes a little time of the
ranks' cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFailure:
    """Why a group failed."""

    reason: FailureReason
    message: str
    node: int | None = None
    """Position of the node."""
    rank: int | None = None
    transport: bool = False
    """Whether to wait for what other ranks report: it may be the consequence of their failure, or
    came after the last step of a program."""

    @property
    def weight(self) -> int:
        """How much it says of the cause; of two failures the one of more weight is the outcome."""
        if self.transport or (self.reason == "timeout" and self.rank is None):
            return 0
        return 1 if self.reason in ("crashed", "timeout") else 2


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupEnd:
    """How a group ended. No process of it is left."""

    failure: GroupFailure | None
    results: Mapping[int, Document]
    log_tail: str
    """Last lines of output of the rank that failed, or of all ranks where none failed first."""
    duration_s: float
    first_node: int = 0
    """Position of the node of rank 0."""
    oversubscribed: bool = False
    """Whether its ranks shared devices."""


Verdict = Callable[[], GroupFailure | bool]
"""Whether a running group must end: True where its result is complete, or as a failure. It must
still be so after every rank has passed on all reports of its program."""


@dataclass(kw_only=True)
class _Progress:
    results: dict[int, Document] = field(default_factory=dict)
    drained: set[int] = field(default_factory=set)
    """Ranks that have reported all that their programs reported before they were asked to."""
    asked_to_drain: bool = False
    exited: set[int] = field(default_factory=set)
    complained: set[int] = field(default_factory=set)
    met: bool = False
    last_iteration: int | None = None
    failure: GroupFailure | None = None
    failed_at: float = 0.0

    def fail(self, reason: FailureReason, message: str, **where: Any) -> None:
        """Notes a failure, and `where` as the other fields of `GroupFailure` say it."""
        self.note(GroupFailure(reason=reason, message=message, **where))

    def note(self, failure: GroupFailure) -> None:
        """Keeps the first of the failures of the most weight."""
        if self.failure is None:
            self.failure, self.failed_at = failure, time.monotonic()
        elif failure.weight > self.failure.weight:
            self.failure = failure

    def is_over(self, num_ranks: int) -> bool:
        """Whether to stop waiting for events."""
        if self.failure is not None and (
            not self.failure.transport or time.monotonic() >= self.failed_at + CAUSE_WITHIN_S
        ):
            return True
        return len(self.exited) == num_ranks

    def last(self) -> str:
        """How far the group got, for messages."""
        if self.last_iteration is not None:
            return f"last: iteration {self.last_iteration}"
        return "no iteration had ended" if self.met else "the ranks had not met"


@dataclass(kw_only=True)
class RankGroup:
    """Runs one group: starts it, passes on the port of rank 0, ends it at the first failure."""

    nodes: NodeSet
    """Where it runs."""
    tasks: Mapping[int, Sequence[RankTask]]
    """The ranks, by position of their node."""
    deadline_s: float
    """Seconds from the start after which it is ended."""
    on_event: OnEvent
    """Called with each report of the ranks."""
    cancelled: Cancelled
    """Called now and then; whether to end."""
    memory_limit_bytes: int | None = None
    """Memory that each rank may use; None: no limit was given."""
    verdict: Verdict = lambda: False
    """Called now and then; a failure ends the group with it, and True without one."""

    def __post_init__(self) -> None:
        self._used = tuple(self.tasks)
        first = self.tasks[self._used[0]][0]
        self._group = first.group
        self._num_ranks = first.world_size
        self._on_cpu = first.device == "cpu"
        self._master_address = first.address
        self._progress = _Progress(met=not first.rendezvous)
        self._ends_at = math.inf

    def run(self) -> GroupEnd:
        """Runs the group until none of its processes is left, or raises RanksLeftError."""
        started = time.monotonic()
        try:
            self.nodes.wait_until_ready()
            started = time.monotonic()  # importing torch does not count
            self._ends_at = started + self.deadline_s
            self.nodes.start(self.tasks)
            self._follow()
        except NodeLostError as error:
            self._progress.fail("node_lost", str(error), node=error.node)
        finally:
            tails = self.nodes.end(self._used, self._group)
        return GroupEnd(
            failure=self._progress.failure,
            results=self._progress.results,
            log_tail=_log_tail(tails, self._progress.failure),
            duration_s=time.monotonic() - started,
            first_node=self._used[0],
            oversubscribed=self.tasks[self._used[0]][0].oversubscribed,
        )

    def _follow(self) -> None:
        progress = self._progress
        while not self._stops_waiting():
            left_s = self._ends_at - time.monotonic()
            if self.cancelled():
                progress.fail("cancelled", f"the probe was cancelled ({progress.last()})")
            elif left_s <= 0:
                names = ", ".join(self.nodes.nodes[node].name for node in self._used)
                message = (
                    f"the probe did not end within deadline_s={self.deadline_s:g} "
                    f"({progress.last()}) on {names}"
                )
                only_node = self._used[0] if len(self._used) == 1 else None
                return progress.fail("timeout", message, node=only_node)
            else:
                timeout_s = min(left_s, _TICK_S)
                for event in self.nodes.poll(self._used, self._group, timeout_s):
                    self._take(event)
        return None

    def _stops_waiting(self) -> bool:
        progress, verdict = self._progress, self.verdict()
        if verdict is True:
            if not progress.asked_to_drain:
                progress.asked_to_drain = True
                self.nodes.tell(self._used, self._group, {"drain": True})
            if len(progress.drained) == self._num_ranks:
                progress.failure = None
                return True
            if progress.failure is not None and progress.failure.rank in progress.drained:
                return False  # it failed after the last step
        elif verdict:
            progress.note(verdict)
        return progress.is_over(self._num_ranks)

    def _take(self, event: NodeEvent) -> None:
        document = event.document
        match document["event"]:
            case "lost" | "group_lost":
                message = document.get("message", "the node's agent or zygote ended")
                self._progress.fail("node_lost", message, node=event.node)
            case "starting":  # the start of the nodes does not count
                self._ends_at = math.inf
            case "started":
                self._ends_at = time.monotonic() + self.deadline_s
            case "exit":
                self._take_exit(event.node, document)
            case _:
                self._take_report(event.node, document["rank"], document["document"])

    def _take_report(self, node: int, rank: int, report: Document) -> None:
        match report["event"]:
            case "listening":
                self._progress.met = True
                where = {"address": self._master_address, "port": report["port"]}
                self.nodes.tell(self._used, self._group, where)
                self.on_event(report)
            case "drained":
                self._progress.drained.add(rank)
            case "result":
                self._progress.results[rank] = report
            case "error":
                self._progress.complained.add(rank)
                message, transport = f"rank {rank}: {report['message']}", report["transport"]
                self._progress.fail(
                    report["reason"], message, node=node, rank=rank, transport=transport
                )
            case _:
                if "index" in report:
                    self._progress.last_iteration = report["index"]
                self.on_event(report)

    def _take_exit(self, node: int, document: Document) -> None:
        rank, code = document["rank"], document["code"]
        self._progress.exited.add(rank)
        if code == 0 and rank in self._progress.results:
            return
        if code > 0 and rank in self._progress.complained:
            return
        reason, how = self._how_it_ended(document)
        is_aborted = code == -signal.SIGABRT  # by NCCL, which aborts a rank whose peer has ended
        message = f"rank {rank} {how}"
        self._progress.fail(reason, message, node=node, rank=rank, transport=is_aborted)

    def _how_it_ended(self, document: Document) -> tuple[FailureReason, str]:
        code, oom_kills = document["code"], document["oom_kills"]
        if code == 0:
            return "crashed", "ended without a result"
        if code > 0:
            return "crashed", f"ended with exit code {code} without saying why"
        if code == -signal.SIGALRM:
            return "timeout", "was ended by its own alarm after the deadline"
        killed = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        if code == -signal.SIGBUS:
            return "host_resource", f"{killed}; {lacking('shared memory')}"
        if code != -signal.SIGKILL:
            return "crashed", killed
        if oom_kills is None:
            why = "whether the out-of-memory killer did that can't be known: the kernel keeps no count"
            return "crashed", f"{killed}; {why}"
        if not oom_kills:
            why = "the kernel's out-of-memory killer did not strike on the node meanwhile"
            return "crashed", f"{killed}; {why}"
        reason, why = self._blame(document)
        kills = f"the kernel's out-of-memory killer struck {oom_kills} times on the node meanwhile"
        return reason, f"{killed}; {kills}, {why}"

    def _blame(self, document: Document) -> tuple[FailureReason, str]:
        """Decides whether the layout is at fault where a node ran out of memory.

        It is where one of its ranks on that node took more than its limit, or where there is no
        limit. Otherwise other processes, perhaps those of another group, used the memory. The
        memory of a GPU is another one.
        """
        limit_bytes = self.memory_limit_bytes
        free = f"{memory(document['memory_available_bytes'])} free at the start"
        if not self._on_cpu:
            return "host_resource", f"which had {free}; {lacking('host memory')}"
        if limit_bytes is None:
            return "out_of_memory", f"which had {free}"
        taken = {int(rank): taken for rank, taken in document["memory_taken_bytes"].items()}
        most = max(taken, key=lambda rank: taken[rank])
        if taken[most] > limit_bytes:
            why = f"rank {most} had taken {memory(taken[most])}, over its limit of {memory(limit_bytes)}"
            return "out_of_memory", f"which had {free}; {why}"
        of = f"{memory(taken[most])} of the {memory(limit_bytes)} promised"
        why = f"no rank took more than rank {most}, {of}"
        return "node_lost", f"which had {free}; {why}"


def _log_tail(tails: Mapping[int, str], failure: GroupFailure | None) -> str:
    """The tail of the rank that failed, or the tails of all ranks under a heading each."""
    if failure is not None and failure.rank is not None:
        return tails.get(failure.rank, "")
    most = COMPLETED_LOG_LENGTH if failure is None else FAILED_LOG_LENGTH
    return joined_tails(tails, most)


def joined_tails(tails: Mapping[int, str], most: int) -> str:
    """The tails of several ranks under a heading each, cut at their beginnings.

    Together they have `most` characters.

    Ranks with little output leave their share to the others. Where there are too many ranks for a
    few lines of each, the first ones are shown.
    """
    printed = [rank for rank in sorted(tails) if tails[rank]]
    num_shown = min(len(printed), most // _LEAST_OF_A_RANK)
    headings = {rank: f"--- rank {rank}\n" for rank in printed[:num_shown]}
    left_out = len(printed) - num_shown
    note = f"\n--- {left_out} more ranks printed something" if left_out else ""
    left = most - len(note) - sum(len(heading) + 1 for heading in headings.values())
    cut: dict[int, str] = {}
    for rank in sorted(headings, key=lambda rank: len(tails[rank])):
        cut[rank] = _last_lines(tails[rank], left // (num_shown - len(cut)))
        left -= len(cut[rank])
    return "\n".join(f"{heading}{cut[rank]}" for rank, heading in headings.items()) + note


def _last_lines(text: str, most: int) -> str:
    """The end of a text, from the start of a line where possible."""
    if len(text) <= most:
        return text
    end = text[-most:]
    return end.partition("\n")[2] or end
