"""The pipeline schedule drawn: which pass each stage runs when, from the trainer's own schedule."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final, NamedTuple

from markupsafe import Markup

from layout_tuner.api.plot_data.plot_data import both_ends
from layout_tuner.api.plots.svg import Plot, join, number, svg_tag, tag
from layout_tuner.predictions.estimates.step_shape import idle_slots
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.layouts.pipeline_layout import stage_layers
from layout_tuner.search_spaces.layouts.recomputation import ALL_LAYERS, RECOMPUTE_MODES
from layout_tuner.search_spaces.layouts.schedules import splits_backward
from layout_tuner.search_spaces.layouts.timed_schedule import (
    TimedPass,
    TimedSchedule,
    timed_schedule,
)
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.terminal.plurals import counted

MAX_STAGES: Final = 128
"""Model chunks (pp * vpp) up to which a schedule is drawn."""
MAX_ROWS: Final = 24
"""Pipeline ranks that are drawn; of more, the first and the last."""
MAX_UNITS: Final = 240.0
"""Length that is drawn whole, in forward passes of a chunk; of a longer schedule, both ends."""
_SHORTEST_END: Final = 45.0

_LEFT: Final = 74.0
_TOP: Final = 28.0
_ROW: Final = 20.0
_LENGTH: Final = 1100.0
_LONGEST_UNIT: Final = 44.0
_GAP: Final = 26.0
"""Width of the break in a long schedule."""
_LEGEND: Final = 300.0
_CHARACTER: Final = 6.6


class _Window(NamedTuple):
    """Both ends of a schedule on the axis of the plot; the middle may be left out."""

    schedule: TimedSchedule
    """With fewer micro-batches than the layout's, if it is long."""
    scale: float
    """Units of the plot for a forward pass."""
    until: float
    """End of the part at the start, in forward passes."""
    since: float
    """Start of the part at the end; the same as `until` if nothing is left out."""
    left_out: int
    """Micro-batches that the schedule lacks: their passes are in the middle."""

    @property
    def is_broken(self) -> bool:
        return self.since > self.until or self.left_out > 0

    @property
    def width(self) -> float:
        return self.x(self.schedule.length)

    def x(self, at: float) -> float:
        if at <= self.until:
            return at * self.scale
        return self.until * self.scale + _GAP + (at - self.since) * self.scale


class _Pace(NamedTuple):
    """Durations of the stages' passes, in forward passes of a mean stage."""

    units: tuple[float, ...]
    """The forward pass of each stage; empty: they are equal."""
    backward: float | tuple[float, ...]
    """The backward pass of all stages, or of each, over its forward pass."""
    mean: float
    """Passes of a micro-batch on a rank, in the mean."""
    slowest: float
    """The same on the slowest rank."""

    @classmethod
    def of(cls, layout: Layout, num_layers: int | None) -> _Pace:
        units, pp = _stage_units(layout), layout.pp
        backward: float | tuple[float, ...] = 3.0 if layout.recompute == "full" else 2.0
        if layout.recompute == "full" and layout.recompute_layers != ALL_LAYERS:
            backward = _backward_by_stage(layout, num_layers)
        if not units and not isinstance(backward, tuple):
            every = layout.vpp * (1.0 + backward)
            return cls(units, backward, every, every)
        stages = layout.pp * layout.vpp
        each = backward if isinstance(backward, tuple) else (backward,) * stages
        busy = [
            sum((units or (1.0,) * stages)[stage] * (1.0 + each[stage]) for stage in of_rank)
            for of_rank in map(layout.stages_of_rank, range(pp))
        ]
        return cls(units, backward, sum(busy) / pp, max(busy))


def _backward_by_stage(layout: Layout, num_layers: int | None) -> float | tuple[float, ...]:
    """Twice a forward pass, and one for the share of a stage's layers that recompute.

    Thrice where that share is not known: the model is not.
    """
    if num_layers is None and not layout.is_written_out:
        return 3.0
    again = set(layout.recomputing_layers(num_layers or 0) or ())
    stages = (
        layout.layers_of_stage(each, num_layers or 0) for each in range(layout.pp * layout.vpp)
    )
    backward = [2.0 + len(again.intersection(each)) / max(len(each), 1) for each in stages]
    return tuple(backward) if len(set(backward)) > 1 else backward[0]


def schedule_plot(
    layout: Layout,
    *,
    num_layers: int | None = None,
    compute_s: float | None = None,
    model: ModelShape | None = None,
) -> Plot | None:
    """The schedule of a layout; None: it has too many stages to be drawn.

    The measured compute time of a step is spread over the passes; without it, the axis counts
    forward passes. `num_layers`: those that ran, where they are known. `model`: whose kinds of
    layers a note names by stage.
    """
    if layout.pp * layout.vpp > MAX_STAGES:
        return None
    pace = _Pace.of(layout, num_layers)
    window = _window(layout, pace)
    rows = both_ends(layout.pp, MAX_ROWS)
    height = _TOP + len(rows) * _ROW + 30.0
    return Plot(
        svg=svg_tag(
            _LEFT + max(window.width, _LEGEND) + 4.0,
            height,
            tag("g", _legend(layout), *_drawn_rows(window, rows), class_="schedule"),
            _axis(layout, window, pace, compute_s, height - 24.0),
            says=f"{_name(layout)} schedule of {layout.pp} "
            f"stages and {layout.num_microbatches} micro-batches",
        ),
        notes=(
            *_notes(layout, window, pace, compute_s, num_layers),
            *(() if model is None else _kinds_of_stages(layout, model)),
        ),
    )


def bubble(layout: Layout, num_layers: int | None = None) -> float:
    """The idle share of the modelled schedule.

    For 1F1B and GPipe it is (pp - 1) / (vpp * m + pp - 1), equation 1 of arXiv:2104.04473 as a
    share of the whole step. Of stages that are written out, or of which some layers recompute, it
    is that of their times.
    """
    if layout.is_written_out or layout.recompute_layers != ALL_LAYERS:
        return _bubble_of_stages(layout, _Pace.of(layout, num_layers))
    idle = float(idle_slots(LayoutColumns.of(layout)))
    return idle / (layout.num_microbatches + idle)


def _name(layout: Layout) -> str:
    return "interleaved" if layout.vpp > 1 and not layout.is_v_shaped else layout.schedule


def _stage_units(layout: Layout) -> tuple[float, ...]:
    """Layers of each stage over those of a mean one; empty: the stages are drawn as equal."""
    layers = stage_layers(layout.pipeline_layout) if layout.is_written_out else ()
    return tuple(each * len(layers) / sum(layers) for each in layers)


def _bubble_of_stages(layout: Layout, pace: _Pace) -> float:
    few = min(layout.num_microbatches, 4 * layout.pp)
    timed = timed_schedule(
        pp=layout.pp,
        vpp=layout.vpp,
        num_microbatches=few,
        backward_units=pace.backward,
        schedule=layout.schedule,
        stage_units=pace.units,
    )
    length = timed.length + (layout.num_microbatches - few) * pace.slowest
    return 1.0 - layout.num_microbatches * pace.mean / length


def _window(layout: Layout, pace: _Pace) -> _Window:
    pp, vpp, num_microbatches = layout.pp, layout.vpp, layout.num_microbatches
    drawn = min(num_microbatches, enough_microbatches(pp, vpp, pace.mean / vpp - 1.0))
    schedule = timed_schedule(
        pp=pp,
        vpp=vpp,
        num_microbatches=drawn,
        backward_units=pace.backward,
        schedule=layout.schedule,
        stage_units=pace.units,
    )
    left_out = num_microbatches - drawn
    if schedule.length <= MAX_UNITS and not left_out:
        scale = min(_LENGTH / schedule.length, _LONGEST_UNIT)
        return _Window(schedule, scale, schedule.length, schedule.length, left_out)
    end = end_units(pp)
    return _Window(schedule, (_LENGTH - _GAP) / (2 * end), end, schedule.length - end, left_out)


def end_units(pp: int) -> float:
    """Length of each end of a long schedule that is drawn, in forward passes.

    It holds the start of the last stage and the return of its gradients, up to a limit.
    """
    return min(max(3.0 * pp + 12.0, _SHORTEST_END), MAX_UNITS / 2)


def enough_microbatches(pp: int, vpp: int, backward_units: float) -> int:
    """Micro-batches with which a schedule has the ends of any longer one.

    In the middle a schedule repeats itself. Interleaved schedules have groups of pp micro-batches.
    """
    needed = int(MAX_UNITS / (vpp * (1.0 + backward_units))) + pp
    return needed + -needed % pp


def _legend(layout: Layout) -> Markup:
    kinds = [("forward0", "forward"), ("backward0", "backward")]
    if splits_backward(layout.schedule):
        kinds.append(("weights0", "weight gradients"))
    drawn = []
    for place, (kind, words) in enumerate(kinds):
        x = _LEFT + place * 80.0
        drawn.append(tag("path", d=f"M{number(x)} 9h12", class_=kind))
        drawn.append(tag("text", words, x=x + 17.0, y=13.0, class_="start"))
    return join(*drawn)


def _drawn_rows(window: _Window, rows: Sequence[int]) -> Iterator[Markup]:
    # A pass is a thick line: that takes half of the bytes of a rectangle.
    paths: defaultdict[str, list[str]] = defaultdict(list)
    texts: defaultdict[str, list[Markup]] = defaultdict(list)
    for row, rank in enumerate(rows):
        y = _TOP + row * _ROW + _ROW / 2
        paths["idle"].extend(
            f"M{number(_LEFT + window.x(start))} {number(y)}"
            f"h{number(window.x(end) - window.x(start))}"
            for start, end in ((0.0, window.until), (window.since, window.schedule.length))
            if end > start
        )
        yield tag("text", f"stage {rank}", x=_LEFT - 8.0, y=y + 4.0, class_="end")
        for each in window.schedule.ranks[rank]:
            start, end = _clipped(each, window)
            if end <= start:
                continue
            x, length = _LEFT + window.x(start), (end - start) * window.scale
            kind = f"{each.kind}{each.chunk % 2}"
            paths[kind].append(f"M{number(x)} {number(y)}h{number(max(length - 0.7, 0.3))}")
            shown = each.microbatch + (window.left_out if start >= window.since else 0)
            if length >= max(13.0, _CHARACTER * len(str(shown)) + 2.0):
                texts[kind].append(tag("text", shown, x=x + length / 2, y=y + 4.0))
    for kind, places in sorted(paths.items(), key=lambda item: item[0] != "idle"):
        yield tag("path", d="".join(places), class_=kind)
    for kind, numbers in texts.items():
        yield tag("g", *numbers, class_=f"on-{kind}")


def _clipped(each: TimedPass, window: _Window) -> tuple[float, float]:
    """The part of a pass that is drawn; its end is not after its start if nothing is."""
    if each.end <= window.until or each.start >= window.since:
        return each.start, each.end
    if each.start < window.until:
        return each.start, window.until
    return max(each.start, window.since), each.end


def _axis(
    layout: Layout, window: _Window, pace: _Pace, compute_s: float | None, y: float
) -> Markup:
    length = window.schedule.length + window.left_out * pace.slowest
    end = f"{length:,.0f} passes"
    if compute_s is not None:
        num_passes = layout.num_microbatches * pace.mean
        end = f"{length * (compute_s / num_passes):.4g} s"
    middle = None
    if window.is_broken:
        x = _LEFT + window.until * window.scale + _GAP / 2
        middle = tag("text", "...", x=x, y=_TOP - 6.0, class_="middle")
    return join(
        tag("line", x1=_LEFT, x2=_LEFT + window.width, y1=y, y2=y, class_="axis"),
        tag("text", "0", x=_LEFT, y=y + 15.0),
        tag("text", end, x=_LEFT + window.width, y=y + 15.0, class_="end"),
        middle,
    )


def _notes(
    layout: Layout,
    window: _Window,
    pace: _Pace,
    compute_s: float | None,
    num_layers: int | None,
) -> Iterator[str]:
    times = "thrice" if pace.backward == 3.0 else "twice"
    why = ", since it recomputes the activations" if pace.backward == 3.0 else ""
    if pace.backward not in (2.0, 3.0):
        why = ", and longer by a forward pass of the layers that recompute"
    paler = "; every other model chunk has another shade" if layout.vpp > 1 else ""
    late = (
        " and its weight gradients together take" if splits_backward(layout.schedule) else " takes"
    )
    yield (
        f"A row is a pipeline stage, a number a micro-batch{paler}. A backward pass{late} {times} "
        f"as long as a forward pass{why}, and transfers take no time."
    )
    if layout.recompute not in RECOMPUTE_MODES:
        yield f"Backward passes are longer by the recomputation of {layout.recompute}: not drawn."
    if compute_s is not None:
        yield f"The measured compute time, {compute_s:.4g} s a step, is spread over the passes."
    formula = "(pp - 1) / (vpp * micro-batches + pp - 1)"
    if splits_backward(layout.schedule):
        formula = f"with schedule=1f1b {bubble(replace(layout, schedule='1f1b'), num_layers):.1%}"
    if layout.is_written_out:
        formula = "a pass takes as long as its stage has layers"
    elif isinstance(pace.backward, tuple):
        formula = "more layers recompute in some stages than in others"
    idle = bubble(layout, num_layers)
    yield f"In this model a stage is idle for {idle:.1%} of the step: {formula}."
    if window.is_broken:
        yield (
            f"The schedule is long: its start and its end are drawn, and the middle, which repeats "
            f"itself, is left out ({layout.num_microbatches:,} micro-batches in all)."
        )
    if layout.pp > MAX_ROWS:
        yield f"Drawn are the first and the last {MAX_ROWS // 2} of {layout.pp} stages."


def _kinds_of_stages(layout: Layout, model: ModelShape) -> Iterator[str]:
    """The layers of each stage, of a model that has several kinds of them; equal ones together."""
    kinds = model.kind_of_layers
    if len(set(kinds)) == 1 and not model.num_mtp_layers:
        return
    said = []
    for rank in range(layout.pp):
        stages = layout.stages_of_rank(rank)
        here = [layer for stage in stages for layer in layout.layers_of_stage(stage, len(kinds))]
        parts = [f"{number} {kind}" for kind, number in Counter(kinds[i] for i in here).items()]
        if model.num_mtp_layers and layout.pp * layout.vpp - 1 in stages:
            parts.append(counted(model.num_mtp_layers, "depth") + " of multi-token prediction")
        said.append(", ".join(parts) or "none")
    runs = [[*same] for _, same in groupby(range(layout.pp), said.__getitem__)]
    names = (f"{run[0]}{f' to {run[-1]}' * (len(run) > 1)}: {said[run[0]]}" for run in runs)
    yield f"Layers by stage: {'; '.join(names)}."
