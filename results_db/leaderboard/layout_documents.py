"""A layout of the leaderboard as a document: which columns are selected for it, and where they go.

A page has some 7,000 figures. One statement selects them all, in the order of the documents that they
end in; neither rows of the ORM nor records are made of them on the way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Final, Self

from sqlalchemy import Select, select

from results_db.models import BreakdownRow, MeasurementRow, Trial
from results_db.places import PLACE, First, Place, estimate_of, is_tied
from results_db.rows import COST_COLUMNS, PLAIN_MEASUREMENT_FIELDS
from results_db.standing_tables import StandingRow
from search_spaces.layout import LAYOUT_FIELDS
from search_spaces.objectives import MEMORY_HEADROOM, memory_headroom
from search_spaces.outcome import Breakdown

_TRIAL: Final = (
    "id",
    "number",
    "campaign_id",
    "layout_key",
    "num_devices",
    "global_batch_size",
    "state",
    "reason",
    "message",
    "node",
    "attempt",
    "lost_attempts",
    "iterations_done",
    "repeat_of",
    "node_seconds",
    "created_at",
    "started_at",
    "ended_at",
)
_COST: Final = tuple(COST_COLUMNS)
_BREAKDOWN: Final = tuple(field.name for field in fields(Breakdown))
_MEASUREMENT: Final = (
    *PLAIN_MEASUREMENT_FIELDS,
    "peak_memory_bytes_by_stage",
    "peak_reserved_bytes_by_stage",
    "breakdown",
)
_DOCUMENT: Final = (
    *_TRIAL,
    "layout",
    "cost",
    "measurement",
    "objectives",
    "on_front",
    "value",
    "value_low",
    "value_high",
    "step_time_s",
    "num_runs",
    "shortened",
    "tied_with_first",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """What the pipeline stages of trials held, in their order, by the trials' ids."""

    peaks: Mapping[int, list[int]]
    """Largest peaks of their ranks."""
    held: Mapping[int, list[int]]
    """What their allocators held, of those that have any."""

    @classmethod
    def of(cls, rows: Iterable[Place]) -> Self:
        """Sorts rows of a trial's id, a peak, and what was held."""
        peaks: defaultdict[int, list[int]] = defaultdict(list)
        held: defaultdict[int, list[int]] = defaultdict(list)
        for trial_id, peak, held_there in rows:
            peaks[trial_id].append(peak)
            if held_there is not None:
                held[trial_id].append(held_there)
        return cls(peaks=peaks, held=held)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutShape:
    """Which columns of a row make which part of a document."""

    weighed: tuple[str, ...]
    """Objectives that are rates."""
    parts: Mapping[str, slice]

    def documents(
        self,
        rows: Sequence[Place],
        first: First,
        stages: Stages,
        device_memory_bytes: int | None,
    ) -> list[dict[str, Any]]:
        """Layouts as documents, put together by columns.

        Args:
            rows: of `layouts_query`, one a layout; one at least.
            first: the first of the leaderboard.
            stages: of their first trials.
            device_memory_bytes: of the campaign's cluster; None: its description does not say.
        """
        columns = list(zip(*rows, strict=True))
        parts = {name: columns[where] for name, where in self.parts.items()}
        values, _, num_runs, shortened, step_times_s, *_, on_front = parts["place"]
        lows, highs, ties = _sureness(rows, first)
        made = zip(
            *parts["trial"],
            _dicts(LAYOUT_FIELDS, parts["layout"]),
            _dicts((*_COST, "total"), [*parts["cost"], map(_sum_of_four, *parts["cost"])]),
            _measurements(parts, stages),
            self._objectives(parts, device_memory_bytes),
            on_front,
            values,
            lows,
            highs,
            step_times_s,
            num_runs,
            shortened,
            ties,
            strict=True,
        )
        return [dict(zip(_DOCUMENT, each, strict=True)) for each in made]

    def _objectives(
        self, parts: Mapping[str, Sequence[Column]], device_memory_bytes: int | None
    ) -> Iterator[dict[str, Any]]:
        columns: list[Iterable[Any]] = list(parts["objectives"])
        if MEMORY_HEADROOM in self.weighed:
            peaks = parts["measurement"][_PEAK]
            columns[self.weighed.index(MEMORY_HEADROOM)] = [
                memory_headroom(peak, device_memory_bytes) for peak in peaks
            ]
        return _dicts(self.weighed, columns)


Column = Sequence[Any]
_PEAK: Final = PLAIN_MEASUREMENT_FIELDS.index("peak_memory_bytes")


def _dicts(names: Sequence[str], columns: Iterable[Iterable[Any]]) -> Iterator[dict[str, Any]]:
    return (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))


def _sum_of_four(one: float, two: float, three: float, four: float) -> float:
    return one + two + three + four


def _measurements(
    parts: Mapping[str, Sequence[Column]], stages: Stages
) -> Iterator[dict[str, Any]]:
    trial_ids = parts["trial"][0]
    breakdowns = (
        None if each["compute_s"] is None else each
        for each in _dicts(_BREAKDOWN, parts["breakdown"])
    )
    peaks = (stages.peaks[id_] for id_ in trial_ids)
    held = (stages.held[id_] for id_ in trial_ids)
    return _dicts(_MEASUREMENT, [*parts["measurement"], peaks, held, breakdowns])


def _sureness(
    rows: Sequence[Place], first: First
) -> tuple[list[float | None], list[float | None], list[bool]]:
    """Both ends of the interval of each layout, and whether it may be as good as the first."""
    lows: list[float | None] = []
    highs: list[float | None] = []
    ties = []
    for row in rows:
        value, estimate = row[0], estimate_of(row, first.spread)
        factor = None if estimate is None else estimate.factor
        lows.append(None if factor is None else value / factor)
        highs.append(None if factor is None else value * factor)
        ties.append(is_tied(value, estimate, first))
    return lows, highs, ties


@lru_cache(maxsize=1000)
def layouts_query(
    by: str, objectives: tuple[str, ...]
) -> tuple[Select[*tuple[Any, ...]], LayoutShape]:
    """A row a layout, and where in it everything is."""
    parts = {
        "place": [getattr(StandingRow, by).label("by"), *PLACE, StandingRow.on_front],
        "objectives": [
            getattr(StandingRow, "value" if name == MEMORY_HEADROOM else name).label(f"of_{name}")
            for name in objectives
        ],
        "trial": [getattr(Trial, name).label(f"of_trial_{name}") for name in _TRIAL],
        "layout": [getattr(Trial, name).label(f"layout_{name}") for name in LAYOUT_FIELDS],
        "cost": [getattr(Trial, COST_COLUMNS[name]).label(f"cost_{name}") for name in _COST],
        "measurement": [
            getattr(MeasurementRow, name).label(f"measured_{name}")
            for name in PLAIN_MEASUREMENT_FIELDS
        ],
        "breakdown": [getattr(BreakdownRow, name).label(f"part_{name}") for name in _BREAKDOWN],
    }
    slices, begin = {}, 0
    for name, columns in parts.items():
        slices[name] = slice(begin, begin + len(columns))
        begin += len(columns)
    query = (
        select(*(column for columns in parts.values() for column in columns))
        .select_from(StandingRow)
        .join(Trial, Trial.id == StandingRow.trial_id)
        .join(MeasurementRow, MeasurementRow.trial_id == StandingRow.trial_id)
        .outerjoin(BreakdownRow, BreakdownRow.trial_id == StandingRow.trial_id)
    )
    return query, LayoutShape(weighed=objectives, parts=slices)
