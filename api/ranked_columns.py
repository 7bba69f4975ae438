"""The columns of ranked layouts: the terminal, pages, reports, CSV and a trial's figures show some.

Each of these is a loop over the names that it shows. The values are at the median step time of all
runs of a layout. A trial that is not ranked has the metrics of its own measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
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
from layout_tuner.search_spaces.layouts.job_settings import JOB_PREFIX
from layout_tuner.search_spaces.layouts.layout import KNOBS
from layout_tuner.search_spaces.objectives import MEMORY_HEADROOM, OBJECTIVES, measured_objective

if TYPE_CHECKING:
    from layout_tuner.api.schemas.campaigns_and_trials import RankedTrial, TrialOfLayout
    from layout_tuner.results_db.leaderboard.leaderboard_records import RankedLayout
    from layout_tuner.results_db.records import TrialRecord
    from layout_tuner.search_spaces.jobs.job_knob import JobKnob

    Shown = RankedLayout | RankedTrial | TrialRecord | TrialOfLayout
    """A ranked layout of the store or the API; for knobs and metrics also any trial."""


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


def device_peak_words(shown: Iterable[Shown]) -> str:
    """The peaks that the MFU and HFU of some rows are shares of; empty: none is known."""
    found = {
        (measured.peak_source, measured.peak_tflops_per_device)
        for each in shown
        if (measured := each.measurement) is not None and measured.peak_tflops_per_device
    }
    return ", ".join(f"{figure(tflops)} TFLOP/s ({source})" for source, tflops in sorted(found))


def _column(name: str, heading: str, **stated: Any) -> RankedColumn:
    """A column; its value is by default what is named like it."""
    default: dict[str, Any] = {"label": heading, "value": attrgetter(name)}
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
    yield _column("also", "also", value=_also, is_number=False)
    yield _column("num_devices", "", label="devices", value=attrgetter("layout.num_devices"))


def job_columns(knobs: Mapping[str, JobKnob]) -> dict[str, RankedColumn]:
    """Columns of job knobs by the names that filters and sort keys have for them."""
    return {
        JOB_PREFIX + name: _column(
            JOB_PREFIX + name,
            name,
            value=lambda shown, knob=knob: knob.value_of(shown.layout.job),
            text=word_of,
            is_number=knob.kind == "count",
        )
        for name, knob in knobs.items()
    }


def _also(shown: Shown) -> str:
    return ", ".join(filter(None, (other_knobs(shown.layout), variant(shown))))


def variant(shown: Shown) -> str:
    """What distinguishes a row of an imported table from others of its layout; empty: nothing."""
    trial: Any = getattr(shown, "trial", shown)
    from layout_tuner.search_spaces.tables.variants import variant_words  # slow: numpy

    return variant_words(trial.layout_key)


def _metric(name: str, shown: Shown) -> float | None:
    """A figure of the measurement; rates are scaled to the median step time."""
    measured = shown.measurement
    if measured is None:
        return None
    step_time_s: float = getattr(shown, "step_time_s", measured.step_time_s)
    if name == "step_time_s":
        return step_time_s
    found: float | None = (
        measured_objective(name, measured, num_nodes=shown.layout.num_nodes)
        if name in OBJECTIVES
        else getattr(measured, name)
    )
    if found is None or name == "peak_memory_bytes":
        return found
    return found * (measured.step_time_s / step_time_s)


def _seconds(value: float) -> str:
    return f"{figure(value)} s"


def _ends(interval: tuple[float, float]) -> str:
    return " to ".join(map(figure, interval))


_OF_METRICS: Final[Mapping[str, Mapping[str, Any]]] = {
    "step_time_s": {"heading": "step", "label": "step time", "text": _seconds},
    "peak_memory_bytes": {"heading": "memory", "label": "peak memory", "text": memory},
    "mfu": {"heading": "MFU", "text": percent},
    "hfu": {"heading": "HFU", "text": percent},
}
"""How some metrics differ from a number under the words of its unit."""


def _metric_column(name: str) -> RankedColumn:
    stated: dict[str, Any] = {"heading": unit(name), "text": figure, **_OF_METRICS.get(name, {})}
    return _column(name, value=partial(_metric, name), **stated)


_OF_MARKS: Final[Mapping[str, Any]] = {
    "text": lambda holds: "*" if holds else "",
    "is_number": False,
}
_LOW_TO_HIGH: Final = ("step_time_low_s", "step_time_high_s")

_COLUMNS: Final = (
    _column("rank", "rank", text="{:,}".format),
    _column("number", "trial"),
    *_layout_columns(),
    *map(_metric_column, METRICS),
    _column(
        MEMORY_HEADROOM,
        unit(MEMORY_HEADROOM),
        value=lambda each: each.objectives[MEMORY_HEADROOM],
        text=percent,
    ),
    _column("interval", "95 % interval", value=attrgetter("value_low", "value_high"), text=_ends),
    _column(
        "half_interval",
        "95 %",
        value=attrgetter("value", "value_low", "value_high"),
        text=lambda ends: half_interval(*ends),
    ),
    _column("step_time_interval", "step time, 95 %", value=attrgetter(*_LOW_TO_HIGH), text=_ends),
    *(_column(name, unit(name), text=_seconds) for name in _LOW_TO_HIGH),
    _column("num_runs", "runs"),
    _column(
        "runs",
        "runs",
        value=attrgetter("num_runs", "disturbed"),
        text=lambda runs: f"{runs[0]}{', disturbed' if runs[1] else ''}",
    ),
    _column("tied_with_first", "tied", **_OF_MARKS),
    _column("shortened", "stopped early", **_OF_MARKS),
    _column("on_front", "front", **_OF_MARKS),
    _column("is_baseline", "baseline", **_OF_MARKS),
    _column("disturbed", "disturbed", **_OF_MARKS),
)

COLUMNS: Final[Mapping[str, RankedColumn]] = {column.name: column for column in _COLUMNS}
"""Every column by name. Knobs and metrics have the names of filters and orders."""

LAYOUT: Final = tuple(column.name for column in _layout_columns() if column.heading)
"""The columns of a layout in the terminal's tables."""
