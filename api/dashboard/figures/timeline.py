"""The timeline of an allocation: the attempts of a campaign's trials as bars against time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from api.service.formatting import state_words
from results_db.campaigns.charts import TimelineAttempt

WIDTH: Final = 900
"""Width of the drawing, in its own units."""
LABEL: Final = 190
"""Width of the labels at the left."""
MOST_LANES: Final = 60
"""Most rows of a timeline."""
LANE: Final = 22.0
_TICK_SECONDS: Final = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400),
    *(172800, 604800, 1209600, 2592000),
)
_MIN_WORDS_WIDTH: Final = 6.6
"""Width of a character in a bar."""


class AttemptBar(NamedTuple):
    """An attempt in the timeline."""

    attempt: TimelineAttempt
    kind: str
    """completed, failed, infeasible, cancelled, lost or running: its colour."""
    words: str
    """Its state, with the reason."""
    mark: str
    """winner, baseline or empty."""
    x: float
    width: float
    y: float
    label: str
    """What fits into the bar."""


class TimelineLane(NamedTuple):
    """A row of the timeline; a worker that runs several probes at once has several."""

    label: str
    """The worker, in its first row."""
    y: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineChart:
    """Attempts against time."""

    bars: Sequence[AttemptBar]
    lanes: Sequence[TimelineLane]
    ticks: Sequence[tuple[float, datetime]]
    height: float
    begin: datetime
    end: datetime
    num_beyond: int
    """Attempts that found no row."""


def timeline_chart(
    attempts: Sequence[TimelineAttempt], now: datetime, marks: Mapping[int, str]
) -> TimelineChart | None:
    """The bars of attempts; None without any.

    Args:
        attempts: in any order.
        now: where bars of running attempts end.
        marks: "winner" or "baseline" by the ids of trials.
    """
    if not attempts:
        return None
    begin = min(attempt.started_at for attempt in attempts)
    running = any(attempt.ended_at is None for attempt in attempts)
    last = max(attempt.ended_at or now for attempt in attempts)
    end = max(last, now if running else last, begin + timedelta(seconds=1))
    scale = (WIDTH - LABEL - 10) / (end - begin).total_seconds()
    lanes, placed, beyond = _lanes(attempts, end)
    bars = []
    for attempt, lane in placed:
        x = LABEL + (attempt.started_at - begin).total_seconds() * scale
        seconds = ((attempt.ended_at or end) - attempt.started_at).total_seconds()
        width = max(seconds * scale, 1.5)
        kind, words = _kind(attempt)
        mark = marks.get(attempt.trial_id, "")
        # A bar with its number alone has completed; the others have a word or a shape.
        short = str(attempt.number) if kind in ("completed", "running") else ""
        texts = (f"{attempt.number} {words}", short, "")
        label = next(t for t in texts if not t or len(t) * _MIN_WORDS_WIDTH + 6 <= width)
        bars.append(AttemptBar(attempt, kind, words, mark, x, width, lanes[lane].y, label))
    return TimelineChart(
        bars=bars,
        lanes=lanes,
        ticks=_time_ticks(begin, end, scale),
        height=34 + len(lanes) * LANE,
        begin=begin,
        end=end,
        num_beyond=beyond,
    )


def _lanes(
    attempts: Sequence[TimelineAttempt], end: datetime
) -> tuple[list[TimelineLane], list[tuple[TimelineAttempt, int]], int]:
    """Rows of workers, each attempt with its row, and the number of attempts without one."""
    free: dict[str, list[datetime]] = {}
    found: list[tuple[TimelineAttempt, str, int]] = []
    for attempt in sorted(attempts, key=lambda each: (each.started_at, each.trial_id)):
        ends = free.setdefault(attempt.worker_id, [])
        row = next((i for i, at in enumerate(ends) if at <= attempt.started_at), len(ends))
        if row == len(ends):
            ends.append(attempt.started_at)
        ends[row] = attempt.ended_at or end
        found.append((attempt, attempt.worker_id, row))
    first: dict[str, int] = {}
    lanes: list[TimelineLane] = []
    names = {attempt.worker_id: attempt.worker_name for attempt in attempts}
    for worker, ends in free.items():
        first[worker] = len(lanes)
        for row in range(len(ends)):
            lanes.append(TimelineLane(names[worker] if row == 0 else "", 28 + len(lanes) * LANE))
    placed = [
        (attempt, first[worker] + row)
        for attempt, worker, row in found
        if first[worker] + row < MOST_LANES
    ]
    return lanes[:MOST_LANES], placed, len(found) - len(placed)


def _kind(attempt: TimelineAttempt) -> tuple[str, str]:
    """The colour of an attempt, and its state in words."""
    if attempt.ending is None:
        return "running", "RUNNING"
    if attempt.ending in ("lost", "returned"):
        return "lost", attempt.ending.upper()
    if attempt.ending == "superseded":
        return "lost", "SUPERSEDED"
    return attempt.state.lower(), state_words(attempt.state, attempt.reason)


def _time_ticks(begin: datetime, end: datetime, scale: float) -> list[tuple[float, datetime]]:
    """At most seven round moments between two."""
    seconds = (end - begin).total_seconds()
    step = next((each for each in _TICK_SECONDS if seconds / each <= 7), _TICK_SECONDS[-1])
    first = -(-begin.timestamp() // step) * step
    ticks = []
    at = first
    while at <= end.timestamp():
        ticks.append(
            (LABEL + (at - begin.timestamp()) * scale, datetime.fromtimestamp(at, begin.tzinfo))
        )
        at += step
    return ticks
