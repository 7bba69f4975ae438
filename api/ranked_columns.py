"""The columns of ranked layouts: the terminal, pages, reports, CSV and a trial's figures show some.

Each of these is a loop over the names that it shows. The values are at the median step time of all
runs of a layout. A trial that is not ranked has the metrics of its own measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from layout_tuner.api.formatting import (
    figure,
    half_interval,
    memory,
    other_knobs,
    percent,
    unit,
    zero,
)
from layout_tuner.documents.reading import word_of
from layout_tuner.protocol.metrics import METRICS
from layout_tuner.search_spaces.layouts.layout import KNOBS
from layout_tuner.search_spaces.objectives import MEMORY_HEADROOM, OBJECTIVES, measured_objective

if TYPE_CHECKING:
    from layout_tuner.api.schemas.campaigns_and_trials import RankedTrial, TrialOfLayout
    from layout_tuner.results_db.leaderboard.leaderboard_records import RankedLayout
    from layout_tuner.results_db.records import TrialRecord

    Shown = RankedLayout | RankedTrial | TrialRecord | TrialOfLayout
    """A ranked layout of the store or of the API, or for metrics and knobs any trial of theirs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedColumn:
    """A column of ranked layouts."""

    name: str
    heading: str
    """Its name above a column of a terminal; empty: terminals have no such column."""
    label: str
    """Its name where there is more room."""
    value: Callable[[Any], Any]
    """Its value of what is shown (see `Shown`); None: not measured."""
    text: Callable[[Any], str] = str
    """A value that is not None, in words."""
    is_number: bool = True

    def cell(self, shown: Shown) -> str:
        """The text of its value."""
        value = self.value(shown)
        return "-" if value is None else self.text(value)


def headings(names: Iterable[str]) -> tuple[str, ...]:
    """The headings of columns of the terminal's tables (see `print_table`)."""
    columns = (COLUMNS[name] for name in names)
    return tuple(f">{each.heading}" if each.is_number else each.heading for each in columns)


def cells(names: Iterable[str], shown: Shown) -> tuple[str, ...]:
    return tuple(COLUMNS[name].cell(shown) for name in names)


def _column(name: str, heading: str, **stated: Any) -> RankedColumn:
    """A column; its value is by default what is named like it."""
    default = {"label": heading, "value": attrgetter(name)}
    return RankedColumn(name=name, heading=heading, **default | stated)


def _layout_columns() -> Iterator[RankedColumn]:
    """The knobs, and what follows from them, in the canonical order."""
    for name, knob in KNOBS.items():
        is_stage = name == "zero_stage"  # terminals show it with the number of copies
        yield _column(
            name,
            "" if is_stage else knob.heading,
            label=knob.heading or knob.word,
            value=attrgetter(f"layout.{name}"),
            text=word_of,
            is_number=knob.is_number,
        )
        if is_stage:
            yield _column("zero", knob.heading, value=lambda each: zero(each.layout))
        if name == "num_microbatches":
            yield _column(
                "global_batch_size", "batch", value=attrgetter("layout.global_batch_size")
            )
    yield _column("also", "also", value=lambda each: other_knobs(each.layout), is_number=False)
    yield _column("num_devices", "", label="devices", value=attrgetter("layout.num_devices"))


def _step_time_s(shown: Shown) -> float | None:
    measured = shown.measurement
    return getattr(shown, "step_time_s", None if measured is None else measured.step_time_s)


def _rate(name: str) -> Callable[[Shown], float | None]:
    """A figure of the measurement that goes as the speed: it is scaled to the median step time."""

    def value(shown: Shown) -> float | None:
        measured = shown.measurement
        if measured is None:
            return None
        found: float | None = (
            measured_objective(name, measured, num_nodes=shown.layout.num_nodes)
            if name in OBJECTIVES
            else getattr(measured, name)
        )
        step_time_s = _step_time_s(shown)
        assert step_time_s is not None, "it was measured"
        return None if found is None else found * (measured.step_time_s / step_time_s)

    return value


def _peak_memory_bytes(shown: Shown) -> int | None:
    return None if shown.measurement is None else shown.measurement.peak_memory_bytes


def _seconds(value: float) -> str:
    return f"{figure(value)} s"


def _metric_columns() -> Iterator[RankedColumn]:
    shares = {"mfu": "MFU", "hfu": "HFU"}
    for name in METRICS:
        if name == "step_time_s":
            yield _column(name, "step", label="step time", value=_step_time_s, text=_seconds)
        elif name == "peak_memory_bytes":
            yield _column(
                name, "memory", label="peak memory", value=_peak_memory_bytes, text=memory
            )
        elif name in shares:
            yield _column(name, shares[name], value=_rate(name), text=percent)
        else:
            yield _column(name, unit(name), value=_rate(name), text=figure)


def _ends(interval: tuple[float, float]) -> str:
    return " to ".join(map(figure, interval))


def _mark(name: str, heading: str) -> RankedColumn:
    return _column(name, heading, text=lambda holds: "*" if holds else "", is_number=False)


_COLUMNS: Final = (
    _column("rank", "rank", text="{:,}".format),
    _column("number", "trial"),
    *_layout_columns(),
    *_metric_columns(),
    _column(
        MEMORY_HEADROOM,
        unit(MEMORY_HEADROOM),
        value=lambda each: each.objectives[MEMORY_HEADROOM],
        text=percent,
    ),
    _column(
        "interval",
        "95 % interval",
        value=lambda each: (each.value_low, each.value_high),
        text=_ends,
    ),
    _column(
        "half_interval",
        "95 %",
        value=lambda each: (each.value, each.value_low, each.value_high),
        text=lambda ends: half_interval(*ends),
    ),
    _column(
        "step_time_interval",
        "step time, 95 %",
        value=lambda each: (each.step_time_low_s, each.step_time_high_s),
        text=_ends,
    ),
    *(_column(f"step_time_{end}_s", f"step time, {end}", text=_seconds) for end in ("low", "high")),
    _column("num_runs", "runs"),
    _column(
        "runs",
        "runs",
        value=lambda each: (each.num_runs, each.disturbed),
        text=lambda runs: f"{runs[0]}{', disturbed' if runs[1] else ''}",
    ),
    _mark("tied_with_first", "tied"),
    _mark("shortened", "stopped early"),
    _mark("on_front", "front"),
    _mark("is_baseline", "baseline"),
    _mark("disturbed", "disturbed"),
)

COLUMNS: Final[Mapping[str, RankedColumn]] = {column.name: column for column in _COLUMNS}
"""Every column by name. Knobs and metrics have the names of filters and orders."""

LAYOUT: Final = tuple(column.name for column in _layout_columns() if column.heading)
"""The columns of a layout in the terminal's tables."""
