"""The points of plots of a campaign: its ranked layouts, and trials that are not ranked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from layout_tuner.results_db.leaderboard.leaderboard_memo import LeaderboardSection
from layout_tuner.results_db.leaderboard.rank_layouts import Leaderboard, MeasuredLayout
from layout_tuner.results_db.models.tables import MeasurementRow, Trial
from layout_tuner.results_db.rows import in_parts, record_of
from layout_tuner.results_db.trials.filter_sql import IS_DISTURBED
from layout_tuner.search_spaces.layouts.job_settings import NO_SETTINGS, JobSettings
from layout_tuner.search_spaces.layouts.layout import KNOBS, Layout

MAX_POINTS: Final = 2000
"""Most points of one plot: a browser draws so many in a tenth of a second."""

_WITH_RESULT: Final = ("COMPLETED", "INFEASIBLE", "FAILED")


PointKind = Literal["measured", "stopped early", "not ranked"]
"""not ranked: it has no result, it shared devices, or it breaks the campaign's constraints."""


@dataclass(frozen=True, kw_only=True)
class PlotPoint:
    """A layout that was tried, as plots show it; the first of its runs that count stands for it."""

    trial_id: int
    number: int
    """The trial's number in its campaign."""
    state: str
    reason: str | None
    """Why the trial does not count; None unless INFEASIBLE or FAILED."""
    rank: int | None = None
    """From 1; None: the layout is not ranked, or its rank is not asked for."""
    value: float | None
    """The objective at the median step time of the runs; None: the layout is not ranked."""
    peak_memory_bytes: int | None = None
    """The largest peak of the first run; None: not measured."""
    shortened: bool = False
    """Whether every run was stopped early."""
    knobs: Mapping[str, Any]
    job: JobSettings = NO_SETTINGS

    @property
    def kind(self) -> PointKind:
        if self.value is None:
            return "not ranked"
        return "stopped early" if self.shortened else "measured"

    @cached_property
    def layout_key(self) -> str:
        return Layout(**self.knobs, job=self.job).key


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotPoints:
    """The points of a plot: all layouts of a campaign, or a sample."""

    points: Sequence[PlotPoint]
    """Ranked layouts, the best first, then trials whose layout is not ranked."""
    num_ranked: int
    num_unranked: int
    """Number of trials with a result whose layout is not ranked, in all; without cheap probes."""

    @property
    def num_left_out(self) -> int:
        """Number of layouts and trials that the sample leaves out."""
        return self.num_ranked + self.num_unranked - len(self.points)


class PlotData(LeaderboardSection):
    """The store's methods for points of plots."""

    def disturbed_ids(self, campaign_id: int) -> set[int]:
        query = select(MeasurementRow.trial_id).where(
            MeasurementRow.campaign_id == campaign_id, IS_DISTURBED
        )
        with self._db.read() as session:
            return set(session.scalars(query))

    def points(self, campaign_id: int, *, limit: int = MAX_POINTS) -> PlotPoints:
        """Layouts for plots: all of a campaign, or a sample that has the front and the best.

        The sample has up to a quarter of trials whose layout is not ranked (not runnable, failed,
        or against the constraints), evenly spaced over their ids. Of the ranked layouts it has the
        Pareto front (up to half of the places), the best (a quarter), and others evenly spaced over
        the ranks. Cancelled trials have no result and no point, and cheap probes have no point:
        they ran a part of a layout. The limit is at least 4.
        """
        with self._db.read() as session:
            board = self._board(session, campaign_id)
            unranked = _unranked_ids(session, campaign_id, board)
            most_unranked = min(len(unranked), max(limit // 4, limit - len(board.layouts)))
            places = _sampled_places(board, limit - most_unranked)
            sample = [unranked[place] for place in _evenly(len(unranked), most_unranked)]
            return PlotPoints(
                points=[
                    *(_ranked_point(board.layouts[place]) for place in places),
                    *_unranked_points(session, sample),
                ],
                num_ranked=len(board.layouts),
                num_unranked=len(unranked),
            )


def _sampled_places(board: Leaderboard, most: int) -> list[int]:
    """Places of ranked layouts that a plot shows, ascending."""
    number = len(board.layouts)
    if number <= most:
        return list(range(number))
    on_front = [place for place, each in enumerate(board.layouts) if each.trial_id in board.front]
    chosen = {*on_front[: most // 2], *range(most // 4)}
    others = [place for place in range(number) if place not in chosen]
    spaced = (others[place] for place in _evenly(len(others), most - len(chosen)))
    return sorted(chosen.union(spaced))


def _evenly(number: int, most: int) -> list[int]:
    """At most so many of a number of places, evenly spaced, with both ends."""
    if number <= most:
        return list(range(number))
    spaced: list[int] = np.linspace(0, number - 1, most).round().astype(int).tolist()
    return spaced


def _ranked_point(layout: MeasuredLayout) -> PlotPoint:
    first = layout.first
    return record_of(
        PlotPoint,
        first,
        trial_id=first.id,
        state="COMPLETED",
        reason=None,
        rank=layout.rank,
        value=layout.value,
        knobs=_knobs_of(first),
    )


def _unranked_ids(session: Session, campaign_id: int, board: Leaderboard) -> list[int]:
    """Trials with a result whose layouts are not ranked."""
    ranked = {each.first.layout_key for each in board.layouts}
    query = (
        select(Trial.id, Trial.layout_key)
        .where(
            Trial.campaign_id == campaign_id,
            Trial.state.in_(_WITH_RESULT),
            Trial.num_layers.is_(None),
        )
        .order_by(Trial.id)
    )
    return [id_ for id_, layout_key in session.execute(query) if layout_key not in ranked]


def _unranked_points(session: Session, trial_ids: Sequence[int]) -> list[PlotPoint]:
    query = select(
        Trial.id.label("trial_id"),
        Trial.number,
        Trial.state,
        Trial.reason,
        MeasurementRow.peak_memory_bytes,
        MeasurementRow.shortened,
        Trial.job,
        *(getattr(Trial, name) for name in KNOBS),
    ).outerjoin(MeasurementRow, MeasurementRow.trial_id == Trial.id)
    return [
        record_of(
            PlotPoint,
            row,
            rank=None,
            value=None,
            shortened=bool(row.shortened),
            knobs=_knobs_of(row),
        )
        for some in in_parts(trial_ids)
        for row in session.execute(query.where(Trial.id.in_(some)).order_by(Trial.id))
    ]


def _knobs_of(row: Any) -> dict[str, Any]:
    """The values of all knobs by name; SQLite returns switches as numbers."""
    values = {name: getattr(row, name) for name in KNOBS}
    return values | {name: bool(values[name]) for name, knob in KNOBS.items() if knob.is_switch}
