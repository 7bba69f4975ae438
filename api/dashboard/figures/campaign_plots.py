"""Reads a campaign's data for its plots from the store, and draws the figures by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from api.dashboard.figures import estimates, knobs, objectives
from api.dashboard.figures.figure import PlotFigure
from api.dashboard.figures.points import LayoutPoint, PlotFacts
from api.dashboard.figures.time_parts import MeasuredStep, TimeChart, time_chart
from results_db.leaderboard.overview import PlotPoint
from results_db.leaderboard.ranked_layout import LeaderboardQuery, RankedLayout
from results_db.records import Analysis, CampaignRecord, PredictedTrial
from results_db.store import Store
from results_db.trials.filter import KNOB_FIELDS, TrialFilter
from search_spaces.errors import SearchSpaceError
from search_spaces.spec.layout import KNOBS, Layout
from search_spaces.spec.model_shape import ModelShape
from search_spaces.spec.objectives import ALL_OBJECTIVES, MEMORY_HEADROOM, OBJECTIVES

FigureName = Literal[
    "history", "parallel", "slice", "two-knobs", "pareto", "estimated-time", "estimated-memory"
]
"""Figures that the script draws."""

if TYPE_CHECKING:
    KnobName = str
    ObjectiveName = str
else:
    # FastAPI reads the choices from these.
    KnobName = Literal[tuple(KNOBS)]
    ObjectiveName = Literal[ALL_OBJECTIVES]

MOST_BARS: Final = 12
"""Layouts whose time parts are drawn, besides the baseline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotChoices:
    """What a reader has chosen; it is in the URL."""

    show_all: bool = False
    """Whether axes include values that are far out."""
    x: str | None = None
    """The knob across in the plot of two knobs; None: the page chooses."""
    y: str | None = None
    across: str | None = None
    """The objective across in the plane of the front."""
    up: str | None = None
    knob: str | None = None
    """The knob of a slice."""

    def query(self, **changes: str | None) -> dict[str, str | None]:
        """The parameters of a page with these choices, of which some are changed."""
        chosen: dict[str, str | None] = {
            "show": "all" if self.show_all else None,
            "x": self.x,
            "y": self.y,
            "across": self.across,
            "up": self.up,
        }
        return chosen | changes


@dataclass(frozen=True, kw_only=True)
class CampaignPlots:
    """The plots of a campaign; data are read when a plot needs them."""

    store: Store
    campaign: CampaignRecord
    choices: PlotChoices

    def draw(self, name: FigureName, knob: str | None = None) -> PlotFigure:
        """A figure; `knob` is that of a slice."""
        facts, show_all = self.facts, self.choices.show_all
        if name == "history":
            return objectives.history(
                facts, self.store.best_so_far(self.campaign.id), show_all=show_all
            )
        if name == "parallel":
            return knobs.parallel(facts, show_all=show_all)
        if name == "slice":
            knob = knob or next(iter(facts.varying), "tp")
            cells = self.store.knob_cells(self.campaign.id, knob)
            return knobs.slice_of(facts, knob, cells, show_all=show_all)
        if name == "two-knobs":
            pair = self.pair
            return knobs.two_knobs(facts, *pair, self.store.knob_cells(self.campaign.id, *pair))
        if name == "pareto":
            return objectives.pareto(facts, *self.plane, show_all=show_all)
        if name == "estimated-time":
            return estimates.estimated_time(facts, self.estimated, show_all=show_all)
        return estimates.estimated_memory(facts, self.estimated, show_all=show_all)

    @cached_property
    def facts(self) -> PlotFacts:
        """The layouts, with the winner and the baseline."""
        spec = self.campaign.spec
        found = self.store.plot_points(self.campaign.id)
        points = [_layout_point(point) for point in found.points]
        marks = {}
        baseline = self._baseline(points)
        if baseline is not None:
            marks["baseline"] = baseline
        for point, layout in zip(found.points, points, strict=True):
            if point.rank == 1 and not point.shortened:
                marks["winner"] = layout
        return PlotFacts(
            objective=self.campaign.objective,
            points=points,
            num_layouts=found.num_ranked + found.num_unranked,
            marks=marks,
            model=_model_of(spec),
            device_memory_bytes=spec["cluster"].get("device_memory_bytes"),
        )

    @cached_property
    def baseline_knobs(self) -> Mapping[str, Any] | None:
        """The knobs of the campaign's baseline; None: it has none."""
        described = self.campaign.spec.get("baseline")
        if described is None:
            return None
        try:
            return Layout.from_mapping(described).to_mapping()
        except SearchSpaceError:
            return None

    def _baseline(self, points: Sequence[LayoutPoint]) -> LayoutPoint | None:
        if self.baseline_knobs is None:
            return None
        for point in points:
            if point.knobs == self.baseline_knobs:
                return point
        # A sample may lack it.
        ranked = self._ranked_baseline
        return None if ranked is None else _ranked_point(ranked)

    @cached_property
    def _ranked_baseline(self) -> RankedLayout | None:
        if self.baseline_knobs is None:
            return None
        wanted = TrialFilter(**{name: (value,) for name, value in self.baseline_knobs.items()})
        found = self.store.ranked_layouts(
            self.campaign.id,
            self.campaign.objective,
            listing=LeaderboardQuery(wanted=wanted),
            limit=1,
        )
        return found[0] if found else None

    @cached_property
    def analysis(self) -> Analysis | None:
        """The importance of knobs; None while there is none."""
        return self.store.analysis(self.campaign.id)

    @property
    def plane(self) -> tuple[str, str]:
        """The objectives across and up of the front."""
        own = self.campaign.objectives
        up = self.choices.up or own[0]
        others = [*own[1:], MEMORY_HEADROOM, *OBJECTIVES]
        across = next(name for name in others if name != up)
        return self.choices.across or across, up

    @property
    def pair(self) -> tuple[str, str]:
        """The knobs across and up: the chosen ones, else the most important ones that vary."""
        important = () if self.analysis is None else tuple(self.analysis.importances)
        likely = [*(name for name in important if name in self.facts.varying), *self.facts.varying]
        likely += [name for name in KNOBS if name not in likely]
        x = self.choices.x or next(name for name in likely if name != self.choices.y)
        return x, self.choices.y or next(name for name in likely if name != x)

    @cached_property
    def estimated(self) -> list[PredictedTrial]:
        """What was predicted of the newest trials, with what they measured."""
        return self.store.predictions(self.campaign.id)

    def time_parts(self) -> TimeChart:
        """The time parts of the best layouts and of the baseline, the best first."""
        best = self.store.ranked_layouts(self.campaign.id, self.campaign.objective, limit=MOST_BARS)
        baseline = self._ranked_baseline
        if baseline is not None and baseline.trial.id not in {each.trial.id for each in best}:
            best.append(baseline)
        estimated = {each.trial_id: each.prediction.step_time_s for each in self.estimated}
        marks = {point.trial_id: name for name, point in self.facts.marks.items()}
        return time_chart(
            [
                MeasuredStep(
                    rank=each.rank,
                    trial_id=each.trial.id,
                    number=each.trial.number,
                    mark=marks.get(each.trial.id, ""),
                    layout_key=each.trial.layout_key,
                    step_time_s=each.trial.measurement.step_time_s,
                    breakdown=each.trial.measurement.breakdown,
                    estimated_s=estimated.get(each.trial.id),
                )
                for each in best
                if each.trial.measurement is not None
                and each.trial.measurement.breakdown is not None
            ]
        )


def _layout_point(point: PlotPoint) -> LayoutPoint:
    named = dict(zip(KNOB_FIELDS, point.knobs, strict=True))
    return LayoutPoint(
        trial_id=point.trial_id,
        number=point.number,
        state=point.state,
        reason=point.reason,
        # SQLite returns switches as numbers.
        knobs={n: bool(named[n]) if knob.is_switch else named[n] for n, knob in KNOBS.items()},
        value=point.value,
        peak_memory_bytes=point.peak_memory_bytes,
        shortened=point.shortened,
    )


def _ranked_point(ranked: RankedLayout) -> LayoutPoint:
    measured = ranked.trial.measurement
    return LayoutPoint(
        trial_id=ranked.trial.id,
        number=ranked.trial.number,
        state=ranked.trial.state,
        reason=ranked.trial.reason,
        knobs=ranked.trial.layout.to_mapping(),
        value=ranked.value,
        peak_memory_bytes=None if measured is None else measured.peak_memory_bytes,
        shortened=ranked.shortened,
    )


def _model_of(spec: Mapping[str, Any]) -> ModelShape | None:
    try:
        return ModelShape.from_mapping(spec["model"])
    except SearchSpaceError:
        return None
