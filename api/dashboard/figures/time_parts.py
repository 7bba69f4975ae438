"""Drawings that are rendered on the server: time parts by layout, the timeline, importances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from api.dashboard.figures.figure import round_ticks
from api.service.formatting import figure, percent, state_words
from results_db.campaigns.charts import TimelineAttempt
from search_spaces.protocol.outcome import Breakdown

PARTS: Final[Mapping[str, str]] = {
    "compute_s": "compute",
    "tp_s": "tensor parallel",
    "pp_s": "pipeline",
    "dp_s": "data parallel",
    "optimizer_s": "optimizer",
    "unexplained_s": "unexplained",
}
"""The parts of a step in their fixed order, with their names."""

WIDTH: Final = 900
"""Width of the drawings, in their own units."""
LABEL: Final = 190
"""Width of the labels at the left."""
NUMBERS: Final = 130
"""Width of the numbers at the right."""


class Box(NamedTuple):
    """A part of a bar."""

    part: int
    """Its number from 1, which is its colour."""
    x: float
    width: float
    says: str
    negative: bool = False
    """Whether it goes to the left: the measured parts add up to more than the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeBar:
    """The parts of one layout's step."""

    label: str
    mark: str
    """winner, baseline or empty."""
    trial_id: int
    layout_key: str
    y: float
    boxes: Sequence[Box]
    step_x: float
    """Where the measured step ends."""
    estimate_x: float | None
    """Where the estimated step ends; None: there is no estimate."""
    total: str
    seconds: Sequence[str]
    """The parts as text, in the order of `PARTS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """The measured step of a layout."""

    rank: int | None
    trial_id: int
    number: int
    mark: str
    layout_key: str
    step_time_s: float
    breakdown: Breakdown
    estimated_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeChart:
    """Time parts of layouts, as stacked bars on one scale."""

    bars: Sequence[TimeBar]
    ticks: Sequence[tuple[float, str]]
    height: float


_BAR_STEP: Final = 34.0
_BAR_TOP: Final = 30.0


def time_chart(steps: Sequence[MeasuredStep]) -> TimeChart:
    """Bars of the steps, in the order given."""
    longest = max(
        (
            max(step.step_time_s, step.estimated_s or 0.0, _positive_sum(step.breakdown))
            for step in steps
        ),
        default=1.0,
    )
    scale = (WIDTH - LABEL - NUMBERS) / longest
    bars = [_bar(step, _BAR_TOP + row * _BAR_STEP, scale) for row, step in enumerate(steps)]
    return TimeChart(
        bars=bars,
        ticks=[(LABEL + at * scale, _ms(at)) for at in round_ticks(0.0, longest)],
        height=_BAR_TOP + len(bars) * _BAR_STEP + 8,
    )


def _bar(step: MeasuredStep, y: float, scale: float) -> TimeBar:
    boxes, x = [], float(LABEL)
    for place, (name, words) in enumerate(PARTS.items(), 1):
        seconds = getattr(step.breakdown, name)
        width = abs(seconds) * scale
        says = f"{words}: {_ms(seconds)} ({percent(seconds / step.step_time_s)})"
        if seconds < 0:
            boxes.append(Box(place, x - width, width, says, negative=True))
        elif seconds > 0:
            boxes.append(Box(place, x, width, says))
            x += width
    step_x = LABEL + step.step_time_s * scale
    estimate_x = None if step.estimated_s is None else LABEL + step.estimated_s * scale
    rank = "" if step.rank is None else f"{step.rank}. "
    return TimeBar(
        label=f"{rank}trial {step.number}",
        mark=step.mark,
        trial_id=step.trial_id,
        layout_key=step.layout_key,
        y=y,
        boxes=boxes,
        step_x=step_x,
        estimate_x=estimate_x,
        total=f"{_ms(step.step_time_s)}, {percent(step.breakdown.compute_s / step.step_time_s)}",
        seconds=[_ms(getattr(step.breakdown, name)) for name in PARTS],
    )


def _positive_sum(breakdown: Breakdown) -> float:
    return float(sum(max(getattr(breakdown, name), 0.0) for name in PARTS))


def _ms(seconds: float) -> str:
    return f"{figure(1e3 * seconds)} ms"


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
