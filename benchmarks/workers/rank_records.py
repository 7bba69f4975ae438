"""When ranks did what, as they wrote it down themselves: one file, a line a moment, one clock.

The clock is the monotonic one, which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from layout_tuner.workers.ranks.json_lines import Document, JsonLines
from layout_tuner.workers.ranks.rank_task import RankTask

RECORDS: Final = "LAYOUT_TUNER_BENCH_RECORDS"
"""Variable that names the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Something that a rank did."""

    at_s: float
    """On the monotonic clock."""
    what: str
    """"entered", or the event that it reported: "iteration", "result", "error"; or "fault"."""
    group: str
    """Whose rank it is."""
    rank: int
    step_time_s: float = 0.0
    """Of an iteration that has ended."""


def write_moment(moment: Moment) -> None:
    """Appends to the file; lines of several processes do not mix."""
    line = json.dumps(asdict(moment)).encode() + b"\n"
    file = os.open(os.environ[RECORDS], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, line)
    os.close(file)


def read_moments(path: Path) -> list[Moment]:
    """What was written, in the order of the clock."""
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted((Moment(**json.loads(line)) for line in lines), key=lambda moment: moment.at_s)


class RecordedLine(JsonLines):
    """A rank's line that also writes down when it was used."""

    def __init__(self, line: JsonLines, task: RankTask) -> None:
        super().__init__(line.socket)
        self._task = task

    def send(self, *documents: Document) -> None:
        at_s = time.monotonic()
        super().send(*documents)
        for document in documents:
            if document["event"] in ("iteration", "result", "error"):
                self.note(document["event"], at_s, document.get("step_time_s", 0.0))

    def note(self, what: str, at_s: float | None = None, step_time_s: float = 0.0) -> None:
        """Writes a moment down."""
        write_moment(
            Moment(
                at_s=time.monotonic() if at_s is None else at_s,
                what=what,
                group=self._task.group,
                rank=self._task.rank,
                step_time_s=step_time_s,
            )
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMoments:
    """A group of ranks, from its first fork to its last word."""

    group: str
    entered_s: float
    """When its first rank ran."""
    first_iteration_s: float | None
    """When its first iteration had ended; None: none did."""
    num_iterations: int
    iterations_s: float
    """Seconds in its iterations."""
    last_s: float
    """When the last of its ranks was heard of: its result, its error, or what befell it."""


def by_group(moments: Sequence[Moment]) -> list[GroupMoments]:
    """The groups, in the order of their starts."""
    groups: dict[str, list[Moment]] = {}
    for moment in moments:
        groups.setdefault(moment.group, []).append(moment)
    return [_group(name, its) for name, its in groups.items()]


def _group(name: str, moments: Sequence[Moment]) -> GroupMoments:
    iterations = [moment for moment in moments if moment.what == "iteration"]
    return GroupMoments(
        group=name,
        entered_s=moments[0].at_s,
        first_iteration_s=iterations[0].at_s if iterations else None,
        num_iterations=len(iterations),
        iterations_s=sum(moment.step_time_s for moment in iterations),
        last_s=moments[-1].at_s,
    )
