"""Reads a campaign from the store, and makes the data of its plots, by their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Final, Literal

from pydantic import BaseModel

from layout_tuner.api.http.query_parameters import SortKeyOf
from layout_tuner.api.plot_data import estimates, knobs, objectives
from layout_tuner.api.plot_data.layout_points import PlotFacts
from layout_tuner.api.plot_data.plot_data import PlottedData, mark_disturbed
from layout_tuner.api.plot_data.step_times import time_parts
from layout_tuner.api.plot_data.timeline import timeline
from layout_tuner.results_db.campaigns.history_and_timeline import MAX_TIMELINE
from layout_tuner.results_db.leaderboard.leaderboard_records import KnobCell, RankedLayout
from layout_tuner.results_db.leaderboard.plot_points import PlotPoint
from layout_tuner.results_db.records import Analysis, CampaignRecord, PredictedTrial
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.job_settings import JOB_PREFIX
from layout_tuner.search_spaces.layouts.layout import KNOBS
from layout_tuner.search_spaces.objectives import MEMORY_HEADROOM, OBJECTIVES, AnyObjective

PlotName = Literal[
    "history",
    "parallel",
    "slice",
    "two-knobs",
    "pareto",
    "estimated-time",
    "estimated-memory",
    "time-parts",
    "timeline",
]
"""The plots of a campaign."""

NEWEST_ATTEMPTS: Final = 200
"""Attempts of a timeline unless a reader asks for all; more are hard to tell apart."""
MOST_BARS: Final = 12
"""Layouts whose time parts are drawn, besides the baseline."""


_KnobName = Annotated[str, SortKeyOf(tuple(KNOBS))]


class PlotChoices(BaseModel):
    """The reader's choices, which are in the URL. None: the page's own choice."""

    show: Literal["all"] | None = None
    """all: axes include values that are far out, timelines all attempts."""
    x: _KnobName | None = None
    """The knob across in the plot of two knobs."""
    y: _KnobName | None = None
    across: AnyObjective | None = None
    """The objective across in the plane of the front."""
    up: AnyObjective | None = None
    knob: _KnobName | None = None
    """The knob of a slice."""

    @property
    def show_all(self) -> bool:
        """Whether nothing is left out."""
        return self.show == "all"


@dataclass(frozen=True, kw_only=True)
class CampaignPlots:
    """The plots of a campaign; data are read when a plot needs them."""

    store: Store
    campaign: CampaignRecord
    choices: PlotChoices

    def data_of(self, name: PlotName, knob: str | None = None) -> PlottedData:
        """The data of a plot, with disturbed trials marked; `knob` is that of a slice."""
        data = mark_disturbed(self._data_of(name, knob), self.disturbed)
        if (simulated := self.campaign.simulated) is None:
            return data
        real = ", but for its axis: it has the real time" if name == "timeline" else ""
        return replace(data, says=[*data.says, f"All of it is {simulated.words}{real}."])

    @cached_property
    def disturbed(self) -> set[int]:
        return self.store.plot_data.disturbed_ids(self.campaign.id)

    def _data_of(self, name: PlotName, knob: str | None) -> PlottedData:
        facts, show_all = self.facts, self.choices.show_all
        if name == "history":
            best = self.store.history.best_so_far(self.campaign.id)
            return objectives.history(facts, best, show_all=show_all)
        if name == "parallel":
            return knobs.parallel(facts, show_all=show_all)
        if name == "slice":
            knob = knob or next(iter(facts.varying), "tp")
            cells = self._cells(knob)
            return knobs.slice_of(facts, knob, cells, show_all=show_all)
        if name == "two-knobs":
            return knobs.two_knobs(facts, *self.pair, self._cells(*self.pair))
        if name == "pareto":
            return objectives.pareto(facts, *self.plane, show_all=show_all)
        if name == "estimated-time":
            return estimates.estimated_time(facts, self.estimated, show_all=show_all)
        if name == "estimated-memory":
            return estimates.estimated_memory(facts, self.estimated, show_all=show_all)
        if name == "time-parts":
            return self._time_parts()
        limit = MAX_TIMELINE if show_all else NEWEST_ATTEMPTS
        found = self.store.history.timeline(self.campaign.id, limit=limit)
        return timeline(found, self.store.now(), facts.mark_of)

    def _cells(self, *names: str) -> list[KnobCell]:
        knobs = self.campaign.stored.shown_knobs
        return self.store.leaderboard.knob_cells(self.campaign.id, *names, knobs=knobs)

    @cached_property
    def facts(self) -> PlotFacts:
        """The layouts, with the winner and the baseline."""
        found = self.store.plot_data.points(self.campaign.id)
        baseline = self._baseline(found.points)
        marks = {} if baseline is None else {"baseline": baseline}
        # Ranked layouts come first, the best of them at the front.
        if found.points and found.points[0].rank == 1 and not found.points[0].shortened:
            marks["winner"] = found.points[0]
        return PlotFacts(
            objective=self.campaign.objective,
            points=found.points,
            num_layouts=found.num_ranked + found.num_unranked,
            marks=marks,
            model=self.campaign.stored.model,
            device_memory_bytes=self.campaign.stored.device_memory_bytes,
            num_cheap=self.store.trials.ended_probes(self.campaign.id, cheap=True).number,
            job_knobs=self.campaign.stored.shown_knobs,
        )

    def _baseline(self, points: Sequence[PlotPoint]) -> PlotPoint | None:
        layout = self.campaign.stored.baseline
        if layout is None:
            return None
        knobs = layout.without_job.to_mapping(every_knob=True)
        for point in points:
            if (point.knobs, point.job) == (knobs, layout.job):
                return point
        # A sample may lack it.
        ranked = self.ranked_baseline
        if ranked is None or ranked.trial.measurement is None:
            return None
        return PlotPoint(
            trial_id=ranked.trial.id,
            number=ranked.trial.number,
            state=ranked.trial.state,
            reason=ranked.trial.reason,
            knobs=knobs,
            job=layout.job,
            value=ranked.value,
            peak_memory_bytes=ranked.trial.measurement.peak_memory_bytes,
            shortened=ranked.shortened,
        )

    @cached_property
    def ranked_baseline(self) -> RankedLayout | None:
        """The baseline on the leaderboard; None: there is none, or it is not ranked."""
        layout = self.campaign.stored.baseline
        if layout is None:
            return None
        return self.store.leaderboard.ranked_layout(self.campaign, layout)

    @cached_property
    def analysis(self) -> Analysis | None:
        """The importance of knobs; None while there is none."""
        return self.store.reports.analysis(self.campaign.id)

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
        important = tuple(name if name in KNOBS else JOB_PREFIX + name for name in important)
        likely = [*(name for name in important if name in self.facts.varying), *self.facts.varying]
        likely += self.facts.knobs
        x = self.choices.x or next(name for name in likely if name != self.choices.y)
        return x, self.choices.y or next(name for name in likely if name != x)

    @cached_property
    def estimated(self) -> list[PredictedTrial]:
        return self.store.trials.predictions(self.campaign.id)

    def _time_parts(self) -> PlottedData:
        campaign = self.campaign
        best = self.store.leaderboard.ranked_layouts(
            campaign.id, campaign.objective, limit=MOST_BARS
        )
        baseline = self.ranked_baseline
        if baseline is not None and baseline.trial.id not in {each.trial.id for each in best}:
            best.append(baseline)
        return time_parts(
            best,
            marks=self.facts.mark_of,
            estimated_s={each.trial_id: each.prediction.step_time_s for each in self.estimated},
        )
