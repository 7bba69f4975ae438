"""Plots of step times: their parts by layout, and the iterations of one probe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from layout_tuner.api.formatting import figure, percent
from layout_tuner.api.plot_data.plot_data import (
    MARKS,
    Bar,
    PlottedData,
    Spot,
    Trace,
    bars,
    line,
    points,
    rows_layout,
)
from layout_tuner.protocol.measurement import SELDOM_PARTS, Iteration
from layout_tuner.results_db.leaderboard.leaderboard_records import RankedLayout

PARTS: Final[Mapping[str, str]] = {
    "compute_s": "compute",
    "tp_s": "tensor parallel",
    "pp_s": "pipeline",
    "dp_s": "data parallel",
    "optimizer_s": "optimizer",
    "unexplained_s": "unexplained",
    "cp_s": "context parallel",
    "ep_s": "expert parallel",
}
"""The parts of a step in their fixed order, with their names; the n-th has the colour `--partn`."""


class _Step(NamedTuple):
    """The step of a layout, in milliseconds."""

    label: str
    trial_id: int
    layout_key: str
    measured: float
    estimated: float | None
    parts: Sequence[float]
    """In the order of `PARTS`; they add up to the measured step."""

    @property
    def end(self) -> float:
        """The largest time that is drawn of it."""
        return max(self.measured, self.estimated or 0.0, sum(max(p, 0.0) for p in self.parts))


def time_parts(
    found: Sequence[RankedLayout], *, marks: Mapping[int, str], estimated_s: Mapping[int, float]
) -> PlottedData:
    """The parts of a step of layouts, as stacked bars on one scale in milliseconds.

    Layouts come from top to bottom; those without a breakdown are left out. `marks` has winner or
    baseline, and `estimated_s` estimated step times, by the ids of trials.
    """
    steps = list(_steps(found, marks, estimated_s))
    if not steps:
        return PlottedData(
            says=[
                "No ranked layout has the parts of its step time: none was measured yet, or the "
                "measurements were imported."
            ]
        )
    shown = [
        place
        for place, part in enumerate(PARTS)
        if part not in SELDOM_PARTS or any(step.parts[place] for step in steps)
    ]
    names = list(PARTS.values())
    says = [
        "The best layouts, the best first, and the baseline, on one scale. The line at each bar is "
        "the measured step time. The hatched part is unexplained; where the measured parts add up "
        "to more than the step, it goes back to the left."
    ]
    if any(step.estimated is not None for step in steps):
        says.append("Triangles are the estimates from before the trials ran.")
    return PlottedData(
        traces=[*_parts(steps, shown), *_ends(steps)],
        layout=rows_layout(
            "time of a step, ms",
            1.04 * max(step.end for step in steps),
            [step.label for step in steps],
        ),
        says=says,
        row_ids=[step.trial_id for step in steps],
        headings=("layout", ">step", ">compute", *(f">{names[place]}" for place in shown), "key"),
        rows=[
            (
                step.label,
                _ms(step.measured),
                percent(step.parts[0] / step.measured),
                *(_ms(step.parts[place]) for place in shown),
                step.layout_key,
            )
            for step in steps
        ],
    )


def _steps(
    found: Sequence[RankedLayout], marks: Mapping[int, str], estimated_s: Mapping[int, float]
) -> Iterator[_Step]:
    for ranked in found:
        trial, measured = ranked.trial, ranked.trial.measurement
        if measured is None or measured.breakdown is None:
            continue
        mark = marks.get(trial.id)
        label = f"{ranked.rank}. trial {trial.number}"
        estimated = estimated_s.get(trial.id)
        yield _Step(
            label=f"{label} {MARKS[mark][0]} {mark}" if mark else label,
            trial_id=trial.id,
            layout_key=trial.layout_key,
            measured=1e3 * measured.step_time_s,
            estimated=None if estimated is None else 1e3 * estimated,
            parts=[1e3 * getattr(measured.breakdown, part) for part in PARTS],
        )


def _parts(steps: Sequence[_Step], shown: Sequence[int]) -> Iterator[Trace]:
    """The bars of one part after the other."""
    names = list(PARTS.values())
    for place in shown:
        name = names[place]
        hatched = {"pattern": {"shape": "/"}} if name == "unexplained" else {}
        found = []
        for row, step in enumerate(steps):
            length = step.parts[place]
            text = f"{name}: {_ms(length)} ({percent(length / step.measured)})"
            found.append(Bar(row, sum(step.parts[:place]), length, text, step.trial_id))
        yield from bars(name, found, color=f"--part{place + 1}", **hatched)


def _ends(steps: Sequence[_Step]) -> list[Trace]:
    """Where the measured and the estimated steps end."""
    measured = [
        Spot(each.measured, row, f"step: {_ms(each.measured)}\n{each.layout_key}", each.trial_id)
        for row, each in enumerate(steps)
    ]
    estimated = [
        Spot(each.estimated, row, f"estimated step: {_ms(each.estimated)}", each.trial_id)
        for row, each in enumerate(steps)
        if each.estimated is not None
    ]
    edge = {"width": 2, "color": "--ink"}
    marker = {"symbol": "triangle-down", "size": 10, "color": "--ink"}
    return [
        *points("measured step", measured, symbol="line-ns", size=15, line=edge),
        *points("estimated step", estimated, **marker),
    ]


def _ms(value: float) -> str:
    return f"{figure(value)} ms"


def iterations(found: Sequence[Iteration], median_s: float | None) -> PlottedData:
    """The step times of a probe's iterations in order; `median_s` is drawn as a line."""
    times = [each.step_time_s for each in found]
    low, high = min(times), max(times)
    margin = 0.06 * (high - low) or 0.1 * high
    first, last = found[0].index - 0.5, found[-1].index + 0.5
    style = {
        "timed": ("timed", {"symbol": "circle", "color": "--part6"}),
        "warmup": ("warm-up, not counted", {"symbol": "circle-open", "color": "--part6"}),
    }
    traces: list[Trace] = []
    if median_s is not None:
        ends = (median_s, median_s)
        traces = [line("median", (first, last), ends, color="--good", width=1.5, dash="dash")]
    for kind, (name, marker) in style.items():
        spots = [
            Spot(
                each.index,
                each.step_time_s,
                f"iteration {each.index} ({each.kind}): {each.step_time_s:.4g} s",
                0,
            )
            for each in found
            if each.kind == kind
        ]
        traces += points(name, spots, **marker)
    return PlottedData(
        traces=traces,
        layout={
            "xaxis": {"title": {"text": "iteration"}, "range": [first, last]},
            "yaxis": {"title": {"text": "step time, s"}, "range": [low - margin, high + margin]},
        },
    )
