"""Figures of the estimates: predicted against measured step time and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from api.dashboard.figures.figure import (
    MOST_ROWS,
    PlotFigure,
    Trace,
    axis_range,
    marked,
    points,
    rounded,
    safe,
)
from api.dashboard.figures.points import PlotFacts
from api.service.formatting import figure, memory, percent
from results_db.records import PredictedTrial

GIB: Final = 1 << 30
_NORMAL_95: Final = 1.96
"""Standard deviations on each side that hold 95 % of a normal distribution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    trial: PredictedTrial
    measured: float
    estimated: float

    @property
    def ratio(self) -> float:
        return self.estimated / self.measured


def estimated_time(
    facts: PlotFacts, trials: Sequence[PredictedTrial], *, show_all: bool = False
) -> PlotFigure:
    """Predicted against measured step times in milliseconds, on equal logarithmic axes."""
    pairs = [
        _Pair(
            trial=trial,
            measured=1e3 * trial.step_time_s,
            estimated=1e3 * trial.prediction.step_time_s,
        )
        for trial in trials
        if trial.step_time_s
    ]
    if not pairs:
        return PlotFigure(says=[_why_none(trials)])
    inside = sum(
        abs(math.log(pair.ratio)) <= _NORMAL_95 * pair.trial.prediction.log_step_time_sd
        for pair in pairs
    )
    spread = math.exp(_NORMAL_95 * median(pair.trial.prediction.log_step_time_sd for pair in pairs))
    plot = _EqualAxes(facts=facts, pairs=pairs, show_all=show_all, unit="ms", words=_ms)
    low, high = plot.ends
    band: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "95 % of estimates",
            "x": [low, high, high, low],
            "y": [low * spread, high * spread, high / spread, low / spread],
            "fill": "toself",
            "fillcolor": "--run-tint",
            "line": {"width": 0},
            "hoverinfo": "skip",
        }
    ]
    return PlotFigure(
        traces=[*band, *plot.traces("measured")],
        layout=plot.layout("step time"),
        says=[
            *_ratio_words(pairs, "step time"),
            f"{percent(inside / len(pairs))} of the measured step times are within the 95 % "
            "interval of their own estimate; the band is the interval of the median trial, a factor "
            f"of {figure(spread)} on each side. Each estimate is the one from before the trial ran.",
            *plot.hidden_words(),
        ],
        headings=plot.headings("step time"),
        rows=plot.rows(),
        hides=plot.hides,
    )


def estimated_memory(
    facts: PlotFacts, trials: Sequence[PredictedTrial], *, show_all: bool = False
) -> PlotFigure:
    """Predicted against measured peaks of memory in GiB, with the device's capacity."""
    pairs = [
        _Pair(
            trial=trial,
            measured=trial.peak_memory_bytes / GIB,
            estimated=max(trial.prediction.peak_memory_bytes, 1) / GIB,
        )
        for trial in trials
        if trial.peak_memory_bytes
    ]
    capacity = facts.device_memory_bytes
    beyond = [
        _Pair(
            trial=trial, measured=capacity / GIB, estimated=trial.prediction.peak_memory_bytes / GIB
        )
        for trial in trials
        if capacity and trial.state == "INFEASIBLE" and trial.prediction.peak_memory_bytes
    ]
    if not pairs and not beyond:
        return PlotFigure(says=[_why_none(trials)])
    plot = _EqualAxes(
        facts=facts, pairs=[*pairs, *beyond], show_all=show_all, unit="GiB", words=_gib
    )
    low, high = plot.ends
    says = _ratio_words(pairs, "peak memory")
    traces = plot.traces("measured", skip=beyond)
    if capacity:
        line = {"color": "--bad", "width": 1.5, "dash": "dash"}
        ends = [low, high], [capacity / GIB] * 2
        for x, y in (ends, ends[::-1]):
            traces.insert(0, _line("capacity of a device", x, y, line, legend=x is ends[0]))
        says.append(f"The dashed lines are the memory of a device, {memory(capacity)}.")
    if beyond:
        says.append(
            f"{len(beyond):,} trials ran out of memory: their peaks are not known, and they are "
            "drawn at the capacity."
        )
        traces += points(
            "out of memory",
            [rounded(pair.measured) for pair in beyond],
            [rounded(pair.estimated) for pair in beyond],
            [
                f"trial {p.trial.number}: out of memory, {_gib(p.estimated)} estimated"
                for p in beyond
            ],
            [pair.trial.trial_id for pair in beyond],
            symbol="x",
            color="--bad",
        )
    return PlotFigure(
        traces=traces,
        layout=plot.layout("peak memory"),
        says=[*says, *plot.hidden_words()],
        headings=plot.headings("peak memory"),
        rows=plot.rows(skip=beyond),
        hides=plot.hides,
    )


@dataclass(frozen=True, kw_only=True)
class _EqualAxes:
    """Pairs in the plane of measured and estimated values, with the diagonal."""

    facts: PlotFacts
    pairs: Sequence[_Pair]
    show_all: bool
    unit: str
    words: Callable[[float], str]

    @property
    def _range(self) -> tuple[float, float, int]:
        """Logarithms of the ends of both axes, and how many pairs lie beyond."""
        logs = [(math.log10(pair.measured), math.log10(pair.estimated)) for pair in self.pairs]
        ids = {point.trial_id for point in self.facts.marks.values()}
        always = [
            value
            for pair, both in zip(self.pairs, logs, strict=True)
            for value in both
            if pair.trial.trial_id in ids
        ]
        found = axis_range(
            [value for both in logs for value in both], always=always, show_all=self.show_all
        )
        beyond = sum(not all(found.low <= value <= found.high for value in both) for both in logs)
        return found.low, found.high, beyond

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of both axes."""
        low, high, _ = self._range
        return rounded(10**low), rounded(10**high)

    @property
    def hides(self) -> bool:
        """Whether pairs lie beyond the axes."""
        return self._range[2] > 0

    def hidden_words(self) -> list[str]:
        """The sentence on pairs beyond the axes."""
        beyond = self._range[2]
        low, high = self.ends
        if not beyond:
            return []
        trials = "1 trial lies" if beyond == 1 else f"{beyond:,} trials lie"
        return [f"{trials} beyond the axes, which go from {self.words(low)} to {self.words(high)}."]

    def traces(self, name: str, *, skip: Sequence[_Pair] = ()) -> list[Trace]:
        """The diagonal, the pairs, and the marks."""
        low, high = self.ends
        dotted = {"color": "--soft", "width": 1.5, "dash": "dot"}
        found: list[Trace] = [_line("estimate = measurement", [low, high], [low, high], dotted)]
        shown = [pair for pair in self.pairs if pair not in skip]
        found += points(
            name,
            [rounded(pair.measured) for pair in shown],
            [rounded(pair.estimated) for pair in shown],
            [self._text(pair) for pair in shown],
            [pair.trial.trial_id for pair in shown],
            symbol="circle",
            color="--mark",
            opacity=0.7,
        )
        for mark, point in self.facts.marks.items():
            for pair in shown:
                if pair.trial.trial_id == point.trial_id:
                    x, y = [rounded(pair.measured)], [rounded(pair.estimated)]
                    found += marked(mark, x, y, [self._text(pair)], [point.trial_id])
        return found

    def _text(self, pair: _Pair) -> str:
        return (
            f"trial {pair.trial.number}: {self.words(pair.measured)} measured, "
            f"{self.words(pair.estimated)} estimated<br>{safe(pair.trial.layout_key)}"
        )

    def layout(self, what: str) -> dict[str, Any]:
        """Equal logarithmic axes."""
        low, high, _ = self._range
        powers = range(math.floor(low), math.ceil(high) + 1)
        digits = (1, 2, 5) if high - low > 1 else (1, 1.5, 2, 3, 4, 5, 6, 8)
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        shown = [tick for tick in ticks if low <= math.log10(tick) <= high]
        axis = {
            "type": "log",
            "range": [round(low, 5), round(high, 5)],
            "tickmode": "array",
            "tickvals": [rounded(tick) for tick in shown],
            "ticktext": [figure(tick) for tick in shown],
        }
        return {
            "xaxis": {**axis, "title": {"text": f"measured {what}, {self.unit}"}},
            "yaxis": {**axis, "title": {"text": f"estimated {what}, {self.unit}"}},
        }

    def headings(self, what: str) -> tuple[str, ...]:
        """Of the table."""
        return ">trial", f">measured {what}", ">estimated", ">estimate / measurement", "layout"

    def rows(self, *, skip: Sequence[_Pair] = ()) -> list[tuple[str, ...]]:
        """The pairs, those first whose estimate is the furthest from the measurement."""
        shown = [pair for pair in self.pairs if pair not in skip]
        furthest = sorted(shown, key=lambda pair: -abs(math.log(pair.ratio)))
        return [
            (
                str(pair.trial.number),
                self.words(pair.measured),
                self.words(pair.estimated),
                f"{pair.ratio:.2f}",
                pair.trial.layout_key,
            )
            for pair in furthest[:MOST_ROWS]
        ]


def _line(
    name: str,
    xs: Sequence[float],
    ys: Sequence[float],
    line: dict[str, Any],
    *,
    legend: bool = True,
) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(xs),
        "y": list(ys),
        "line": line,
        "hoverinfo": "skip",
        "showlegend": legend,
    }


def _ratio_words(pairs: Sequence[_Pair], what: str) -> list[str]:
    if not pairs:
        return []
    middle = median(pair.ratio for pair in pairs)
    off = median(abs(math.log(pair.ratio)) for pair in pairs)
    return [
        f"Over {len(pairs):,} trials, the estimated {what} is {middle:.2f} times the measured one in "
        f"the median; half of the estimates are within a factor of {math.exp(off):.2f}."
    ]


def _why_none(trials: Sequence[PredictedTrial]) -> str:
    if not trials:
        return (
            "No estimates are stored for this campaign: its strategy predicts nothing, its "
            "measurements were imported, or it ran before estimates were kept."
        )
    return "No trial with an estimate has been measured yet."


def _ms(value: float) -> str:
    return f"{figure(value)} ms"


def _gib(value: float) -> str:
    return f"{figure(value)} GiB"
