"""Plots of the estimates: predicted against measured step time and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from layout_tuner.api.formatting import figure, memory, percent
from layout_tuner.api.plot_data.layout_points import PlotFacts, mark_traces
from layout_tuner.api.plot_data.plot_data import (
    MARKERS,
    MOST_ROWS,
    Bar,
    PlottedData,
    Spot,
    Trace,
    axis_range,
    bars,
    both_ends,
    line,
    points,
    round_ticks,
    rounded,
    rows_layout,
)
from layout_tuner.predictions.estimates.peak_memory import StageMemory
from layout_tuner.results_db.records import PredictedTrial
from layout_tuner.search_spaces.campaigns.fidelity import is_cheap
from layout_tuner.terminal.plurals import counted
from layout_tuner.units import GIB, NORMAL_95

MAX_STAGES: Final = 32
"""Pipeline stages whose memory is drawn; of more, the first and the last."""
_MTP: Final = "multi-token prediction (MTP)"


def estimated_time(
    facts: PlotFacts, trials: Sequence[PredictedTrial], *, show_all: bool = False
) -> PlottedData:
    """Predicted against measured step times in milliseconds, on equal logarithmic axes."""
    pairs = [
        _Pair(trial=trial, x=1e3 * trial.step_time_s, y=1e3 * trial.prediction.step_time_s)
        for trial in trials
        if trial.step_time_s
    ]
    if not pairs:
        return PlottedData(says=[_why_none(trials)])
    inside = sum(
        abs(math.log(pair.ratio)) <= NORMAL_95 * pair.trial.prediction.log_step_time_sd
        for pair in pairs
    )
    spread = math.exp(NORMAL_95 * median(pair.trial.prediction.log_step_time_sd for pair in pairs))
    axes = _EqualAxes.over(facts, pairs, show_all=show_all)
    return _estimated(
        facts,
        axes,
        pairs,
        what="step time",
        unit="ms",
        below=[_band(axes, spread)],
        says=[
            f"{percent(inside / len(pairs))} of the measured step times are within the 95 % "
            "interval of their own estimate; the band is the interval of the median trial, a factor "
            f"of {figure(spread)} on each side. Each estimate is the one from before the trial ran."
        ],
    )


def estimated_memory(
    facts: PlotFacts, trials: Sequence[PredictedTrial], *, show_all: bool = False
) -> PlottedData:
    """Predicted against measured peaks of memory in GiB, with the device's capacity."""
    pairs = [
        _Pair(
            trial=trial,
            x=trial.peak_memory_bytes / GIB,
            y=max(trial.prediction.peak_memory_bytes, 1) / GIB,
        )
        for trial in trials
        if trial.peak_memory_bytes
    ]
    capacity = facts.device_memory_bytes
    beyond = [
        _Pair(trial=trial, x=capacity / GIB, y=trial.prediction.peak_memory_bytes / GIB)
        for trial in trials
        if capacity and trial.state == "INFEASIBLE" and trial.prediction.peak_memory_bytes
    ]
    if not pairs and not beyond:
        return PlottedData(says=[_why_none(trials)])
    axes = _EqualAxes.over(facts, [*pairs, *beyond], show_all=show_all)
    below: list[Trace] = []
    says = []
    if capacity:
        style: dict[str, Any] = {"color": "--bad", "width": 1.5, "dash": "dash"}
        along, at = [axes.low, axes.high], [capacity / GIB] * 2
        below.append(line("capacity of a device", along, at, **style))
        below.append(line("capacity of a device", at, along, legend=False, **style))
        says.append(f"The dashed lines are the memory of a device, {memory(capacity)}.")
    if beyond:
        says.append(
            f"{len(beyond):,} trials ran out of memory: their peaks are not known, and they are "
            "drawn at the capacity."
        )
    spots = [
        pair.spot(f"trial {pair.trial.number}: out of memory, {figure(pair.y)} GiB estimated")
        for pair in beyond
    ]
    above = [*points("out of memory", spots, **MARKERS["infeasible"]), *_marked(facts, spots)]
    return _estimated(
        facts, axes, pairs, what="peak memory", unit="GiB", below=below, above=above, says=says
    )


def memory_by_stage(
    measured: Sequence[int],
    estimated: Sequence[StageMemory],
    *,
    capacity_bytes: int | None,
    top_bytes: float | None = None,
) -> PlottedData:
    """Peak memory of each pipeline stage in GiB, measured and estimated, with the capacity.

    What multi-token prediction adds to an estimate is a line that ends at it.

    Args:
        measured: bytes by stage; empty: not measured.
        estimated: by stage; empty: there is no estimate.
        capacity_bytes: memory of a device; None: not known.
        top_bytes: the end of the scale, for several plots on one; None: the largest number.
    """
    num_stages = max(len(measured), len(estimated))
    stages = both_ends(num_stages, MAX_STAGES)
    names: list[str] = []
    peaks: list[Bar] = []
    marks: list[Spot] = []
    depths: list[Trace] = []
    for row, stage in enumerate(stages):
        words = []
        if stage < len(measured):
            words.append(f"{memory(measured[stage])} measured")
            peaks.append(Bar(row, 0, measured[stage] / GIB, words[-1], 0))
        if stage < len(estimated):
            peak, mtp = estimated[stage].total_bytes, estimated[stage].mtp_bytes
            words.append(f"{memory(int(peak))} estimated")
            marks.append(Spot(peak / GIB, row, words[-1], 0))
            if mtp:
                ends = (peak - mtp) / GIB, peak / GIB
                depths.append(line(_MTP, ends, (row, row), color="--ink", width=3))
        names.append(f"stage {stage}: {', '.join(words)}")
    capacity: list[Trace] = []
    if capacity_bytes:
        name, at = f"capacity {memory(capacity_bytes)}", [capacity_bytes / GIB] * 2
        capacity = [line(name, at, (-0.5, len(names) - 0.5), color="--bad", width=1.5, dash="dash")]
    notes = ["Bars are measured peaks, triangles the uncalibrated estimates."]
    if not measured:
        notes = ["Nothing was measured: the triangles are the uncalibrated estimates."]
    elif not estimated:
        notes = ["The bars are the measured peaks; what the trainer keeps is not known."]
    if depths:
        added = memory(int(max(each.mtp_bytes for each in estimated)))
        notes.append(f"The line left of a triangle is what {_MTP} adds to it: {added}.")
    if num_stages > MAX_STAGES:
        notes.append(f"Drawn are the first and the last {MAX_STAGES // 2} of {num_stages} stages.")
    peaks_bytes = (*measured, *(stage.total_bytes for stage in estimated))
    top = top_bytes or max(*peaks_bytes, capacity_bytes or 0, 1)
    return PlottedData(
        traces=[
            *bars("measured", peaks, color="--part1"),
            *capacity,
            *depths,
            *points("estimated", marks, symbol="triangle-down", size=10, color="--ink"),
        ],
        layout=rows_layout("peak memory, GiB", 1.04 * top / GIB, names),
        says=notes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    """A trial with its measured (x) and its estimated value (y), in one unit."""

    trial: PredictedTrial
    x: float
    y: float

    @property
    def ratio(self) -> float:
        return self.y / self.x

    def spot(self, text: str) -> Spot:
        return Spot(self.x, self.y, text, self.trial.trial_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class _EqualAxes:
    """The ends of two logarithmic axes, and how many pairs lie beyond them."""

    low: float
    high: float
    num_beyond: int

    @classmethod
    def over(cls, facts: PlotFacts, pairs: Sequence[_Pair], *, show_all: bool) -> _EqualAxes:
        marks = {point.trial_id for point in facts.marks.values()}
        logs = {pair.trial.trial_id: (math.log10(pair.x), math.log10(pair.y)) for pair in pairs}
        ends = axis_range(
            [value for both in logs.values() for value in both],
            always=[value for id_, both in logs.items() if id_ in marks for value in both],
            show_all=show_all,
        )
        beyond = sum(min(both) < ends.low or max(both) > ends.high for both in logs.values())
        return cls(low=10**ends.low, high=10**ends.high, num_beyond=beyond)

    def axis(self, title: str) -> dict[str, Any]:
        """Plotly's axis, with numbers that are round on a logarithmic scale."""
        low, high = math.log10(self.low), math.log10(self.high)
        digits = (1, 2, 5) if high - low > 1 else (1, 1.5, 2, 3, 4, 5, 6, 8)
        powers = range(math.floor(low), math.ceil(high) + 1)
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        shown = [tick for tick in ticks if self.low <= tick <= self.high]
        if len(shown) < 2:  # a narrow axis
            shown = round_ticks(self.low, self.high)
        return {
            "type": "log",
            "range": [round(low, 5), round(high, 5)],
            "tickmode": "array",
            "tickvals": [rounded(tick) for tick in shown],
            "ticktext": [figure(tick) for tick in shown],
            "title": {"text": title},
        }


def _band(axes: _EqualAxes, spread: float) -> Trace:
    """The part of the plane within a factor of the diagonal."""
    low, high = axes.low, axes.high
    near, far = min(low * spread, high), max(high / spread, low)
    xs, ys = (low, far, high, high, near, low), (near, high, high, far, low, low)
    band = line("95 % of estimates", xs, ys, width=0)
    return {**band, "fill": "toself", "fillcolor": "--run-tint"}


def _estimated(
    facts: PlotFacts,
    axes: _EqualAxes,
    pairs: Sequence[_Pair],
    *,
    what: str,
    unit: str,
    below: Sequence[Trace],
    says: Sequence[str],
    above: Sequence[Trace] = (),
) -> PlottedData:
    """The pairs with the diagonal and the marks, between what is drawn below and above them."""
    spots = [
        pair.spot(
            f"trial {pair.trial.number}: {figure(pair.x)} {unit} measured, {figure(pair.y)} {unit} "
            f"estimated\n{pair.trial.layout_key}"
        )
        for pair in pairs
    ]
    ends = axes.low, axes.high
    furthest = sorted(pairs, key=lambda pair: -abs(math.log(pair.ratio)))
    return PlottedData(
        traces=[
            *below,
            line("estimate = measurement", ends, ends, color="--soft", width=1.5, dash="dot"),
            *points("measured", spots, **MARKERS["measured"], opacity=0.7),
            *_marked(facts, spots),
            *above,
        ],
        layout={
            "xaxis": axes.axis(f"measured {what}, {unit}"),
            "yaxis": axes.axis(f"estimated {what}, {unit}"),
        },
        says=list(_words(pairs, axes, what, unit, says)),
        row_ids=[pair.trial.trial_id for pair in furthest[:MOST_ROWS]],
        headings=(">trial", f">measured {what}", ">estimated", ">estimate / measurement", "layout"),
        rows=[
            (
                str(pair.trial.number),
                f"{figure(pair.x)} {unit}",
                f"{figure(pair.y)} {unit}",
                f"{pair.ratio:.2f}",
                pair.trial.layout_key,
            )
            for pair in furthest[:MOST_ROWS]
        ],
        hides=axes.num_beyond > 0,
    )


def _marked(facts: PlotFacts, spots: Sequence[Spot]) -> list[Trace]:
    of_trial = {spot.trial_id: spot for spot in spots}
    return mark_traces(
        {
            name: of_trial[point.trial_id]
            for name, point in facts.marks.items()
            if point.trial_id in of_trial
        }
    )


def _words(
    pairs: Sequence[_Pair], axes: _EqualAxes, what: str, unit: str, says: Sequence[str]
) -> Iterator[str]:
    """The sentences of the caption, `says` among them."""
    if pairs:
        middle = median(pair.ratio for pair in pairs)
        off = median(abs(math.log(pair.ratio)) for pair in pairs)
        yield (
            f"Over {len(pairs):,} trials, the estimated {what} is {middle:.2f} times the measured "
            f"one in the median; half of the estimates are within a factor of {math.exp(off):.2f}."
        )
    yield from says
    if number := sum(is_cheap(pair.trial.layout_key) for pair in pairs):
        yield f"{counted(number, 'cheap probe')}: estimated and measured is the part that ran."
    if axes.num_beyond:
        trials = "1 trial lies" if axes.num_beyond == 1 else f"{axes.num_beyond:,} trials lie"
        ends = f"{figure(axes.low)} {unit} to {figure(axes.high)} {unit}"
        yield f"{trials} beyond the axes, which go from {ends}."


def _why_none(trials: Sequence[PredictedTrial]) -> str:
    if not trials:
        return (
            "No estimates are stored for this campaign: its strategy predicts nothing, its "
            "measurements were imported, or it ran before estimates were kept."
        )
    return "No trial with an estimate has been measured yet."
