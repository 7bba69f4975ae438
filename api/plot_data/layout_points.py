"""What plot data is made from: a campaign's layouts as points, its winner and its baseline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from layout_tuner.api.formatting import state_words
from layout_tuner.api.plot_data.plot_data import Spot, Trace, marked, objective_words
from layout_tuner.results_db.leaderboard.plot_points import PlotPoint
from layout_tuner.search_spaces.jobs.job_knob import JobKnob, as_layout_knob
from layout_tuner.search_spaces.layouts.job_settings import JOB_PREFIX
from layout_tuner.search_spaces.layouts.knobs import Knob
from layout_tuner.search_spaces.layouts.layout import DEGREES, KNOBS, Layout
from layout_tuner.search_spaces.layouts.recomputation import ALL_LAYERS
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.objectives import MEMORY_HEADROOM, memory_headroom
from layout_tuner.terminal.plurals import counted
from layout_tuner.units import SECONDS_PER_HOUR


@dataclass(frozen=True, kw_only=True)
class PlotFacts:
    """A campaign's layouts, for its plots."""

    objective: str
    """The objective that ranks."""
    points: Sequence[PlotPoint]
    """All layouts that were tried, or a sample."""
    num_layouts: int
    """Number of layouts that were tried in all."""
    marks: Mapping[str, PlotPoint]
    """The baseline and the winner, as far as there are any, by their names in `MARKS`."""
    model: ModelShape | None = None
    """None: its description is not complete."""
    device_memory_bytes: int | None = None
    num_cheap: int = 0
    """Cheap probes that have ended; they are no points."""
    job_knobs: Mapping[str, JobKnob] = field(default_factory=dict)
    """The job knobs that are shown, by name."""

    @cached_property
    def knobs(self) -> Mapping[str, Knob]:
        """All knobs by the names that plots have for them."""
        return {
            **KNOBS,
            **{
                (name := JOB_PREFIX + knob.name): as_layout_knob(name, knob)
                for knob in self.job_knobs.values()
            },
        }

    def value_of(self, name: str, point: PlotPoint) -> Any:
        """The value of a knob of a layout or its job; None: there is none."""
        if name in KNOBS:
            return point.knobs[name]
        return self.job_knobs[name.removeprefix(JOB_PREFIX)].value_of(point.job)

    @property
    def cheap_words(self) -> list[str]:
        """That cheap probes are left out; empty: there are none."""
        if not self.num_cheap:
            return []
        return [f"{counted(self.num_cheap, 'cheap probe')} of parts of layouts: not drawn."]

    @property
    def num_left_out(self) -> int:
        return self.num_layouts - len(self.points)

    @cached_property
    def ranked(self) -> list[PlotPoint]:
        return [point for point in self.points if point.value is not None]

    @cached_property
    def values(self) -> list[float]:
        """The objective of the layouts on the leaderboard."""
        return [point.value for point in self.ranked if point.value is not None]

    @cached_property
    def varying(self) -> dict[str, list[Any]]:
        """The knobs that differ between layouts, each with its values in their order."""
        every = [*self.points, *self.marks.values()]
        found = {
            name: in_order(knob, (self.value_of(name, point) for point in every))
            for name, knob in self.knobs.items()
        }
        return {name: values for name, values in found.items() if len(values) > 1}

    @property
    def mark_of(self) -> Mapping[int, str]:
        """The names of the marks by the ids of their trials; winner for a baseline that won."""
        return {point.trial_id: name for name, point in self.marks.items()}

    @property
    def marked_values(self) -> list[float]:
        """The values of the winner and the baseline."""
        return [point.value for point in self.marks.values() if point.value is not None]

    def spot(self, point: PlotPoint, x: Any, y: Any, *more: str) -> Spot:
        """A layout at its place in a plot, with lines that its text has besides."""
        if point.value is None:
            found = f"{state_words(point.state, point.reason)}, not ranked"
        else:
            found = objective_words(self.objective, point.value)
            found += " (stopped early)" if point.shortened else ""
        text = "\n".join((f"trial {point.number}: {found}", point.layout_key, *more))
        return Spot(x, y, text, point.trial_id)

    def value(self, point: PlotPoint, objective: str) -> float | None:
        """Any objective of a ranked layout; None where it is not known.

        All objectives but the free memory are proportional to 1 / step time, so that they follow
        from the one that ranks.
        """
        if point.value is None or objective == self.objective:
            return point.value
        if objective == MEMORY_HEADROOM:
            return memory_headroom(point.peak_memory_bytes, self.device_memory_bytes)
        of_other, of_own = self._factor(point, objective), self._factor(point, self.objective)
        return None if not of_other or not of_own else point.value * of_other / of_own

    def _factor(self, point: PlotPoint, objective: str) -> float | None:
        """An objective over tokens a second (`search_spaces.objectives`)."""
        knobs = point.knobs
        num_devices = prod(knobs[name] for name in DEGREES)
        if objective == "tokens_per_s":
            return 1.0
        if objective == "tokens_per_node_hour":
            return SECONDS_PER_HOUR / float(knobs["num_nodes"])
        if objective == "tokens_per_s_per_device":
            return 1.0 / float(num_devices)
        if self.model is None:
            return None
        if objective == "model_tflops_per_device":
            return self.model.model_flops_per_token / 1e12 / float(num_devices)
        layers = None
        if knobs["recompute_layers"] != ALL_LAYERS:
            layers = Layout(**knobs).recomputing_layers(self.model.num_layers)
        flops = self.model.hardware_flops_per_token(knobs["recompute"], layers)
        return flops / 1e12 / float(num_devices)


def mark_traces(spots: Mapping[str, Spot]) -> list[Trace]:
    """The baseline and the winner at their places, by their names."""
    return [trace for name, spot in spots.items() for trace in marked(name, spot)]


def in_order(knob: Knob, values: Iterable[Any]) -> list[Any]:
    """Different values of a knob: numbers ascending, words in their legal order, None first."""
    found = set(values)
    if knob.is_switch:
        # SQLite returns switches as numbers.
        found = {value if value is None else bool(value) for value in found}
    return sorted(found, key=lambda value: -1 if value is None else knob.code(value))


def knob_text(value: Any) -> str:
    """A knob's value; switches are on or off, and a job without a value has "-"."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "-" if value is None else str(value)
