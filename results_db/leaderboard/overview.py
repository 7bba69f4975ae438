"""What pages show around a leaderboard: values of knobs with their counts, and points of plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from sqlalchemy import exists, func, select
from sqlalchemy.orm import Session

from results_db.database.store_base import StoreSection
from results_db.events.event_log import CampaignResults
from results_db.leaderboard.listing import Ids, listed, listed_ids
from results_db.leaderboard.ranked_layout import WHOLE, LeaderboardQuery
from results_db.leaderboard.ranking import (
    Ranking,
    first_layout,
    rows_of,
)
from results_db.models.standings import LeaderboardRow
from results_db.models.tables import MeasurementRow, Trial
from results_db.trials.filter import KNOB_FIELDS
from results_db.trials.filter_sql import knob_number

MAX_POINTS: Final = 2000
"""Most points of one plot: a browser draws so many in a tenth of a second."""

_IDS_AT_ONCE: Final = 1000
_WITH_RESULT: Final = ("COMPLETED", "INFEASIBLE", "FAILED")

_SAMPLE: Final = 200
"""Rows that are read first where the knobs of one value are sought."""

KnobValues = Mapping[str, Mapping[Any, int]]
"""By knob, each value that occurs, in order, with the number of layouts."""


class PlotPoint(NamedTuple):
    """A layout as plots show it."""

    trial_id: int
    """The first of its runs that count; of a layout that is not ranked, the trial."""
    number: int
    """The trial's number in its campaign."""
    state: str
    reason: str | None
    """Why the trial does not count; None unless INFEASIBLE or FAILED."""
    rank: int | None
    """From 1; None: the layout is not ranked."""
    value: float | None
    """The objective at the median step time of the runs; None: the layout is not ranked."""
    peak_memory_bytes: int | None
    """The largest peak of the first run; None: not measured."""
    shortened: bool
    """Whether every run was stopped early."""
    knobs: tuple[Any, ...]
    """The values of `KNOB_FIELDS`, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotPoints:
    """The points of a plot: all layouts of a campaign, or a sample."""

    points: Sequence[PlotPoint]
    """Ranked layouts, the best first, then trials whose layout is not ranked."""
    num_ranked: int
    """Number of ranked layouts in all."""
    num_unranked: int
    """Number of trials with a result whose layout is not ranked, in all; without cheap probes."""

    @property
    def num_left_out(self) -> int:
        """Number of layouts and trials that the sample leaves out."""
        return self.num_ranked + self.num_unranked - len(self.points)


class LeaderboardOverview(StoreSection):
    """The store's methods for what pages show around a leaderboard."""

    def knob_values(self, campaign_id: int, *knobs: str) -> KnobValues:
        """The values of some knobs among all ranked layouts, with the numbers of layouts.

        Numbers are ascending; words are in the order of the memory that they save. The result is
        cached until the campaign changes.

        Args:
            campaign_id: the campaign.
            knobs: of `KNOB_FIELDS`.
        """
        in_campaign = LeaderboardRow.campaign_id == campaign_id
        with self._db.read() as session:

            def count(name: str) -> Mapping[Any, int]:
                column = getattr(LeaderboardRow, name)
                query = select(column, func.count()).where(in_campaign).group_by(column)
                rows = rows_of(session, query.order_by(knob_number(name, column)))
                return {row[0]: row[1] for row in rows}

            return CampaignResults(self._cache, session, campaign_id).get(
                ("knob values", knobs), lambda: {name: count(name) for name in knobs}
            )

    def constant_knobs(
        self,
        campaign_id: int,
        objective: str | None = None,
        *,
        listing: LeaderboardQuery = WHOLE,
    ) -> Mapping[str, Any]:
        """The knobs that have one value in all listed layouts, with that value.

        The result is cached until the campaign changes.

        Args:
            campaign_id: the campaign.
            objective: the objective that ranks; None: the campaign's own.
            listing: which layouts are listed; of none, no knob is constant.

        Raises:
            CampaignNotFoundError: there is no such campaign.
            ObjectiveUnknownError: no layout is ranked by this name.
        """
        with self._db.read() as session:
            results = CampaignResults(self._cache, session, campaign_id)
            ranking = Ranking.read(session, campaign_id, objective, listing)
            asked = ("constant knobs", ranking.by.key, listing.unsorted)
            return results.get(asked, lambda: _constant_knobs(session, ranking))

    def plot_points(self, campaign_id: int, *, limit: int = MAX_POINTS) -> PlotPoints:
        """Layouts for plots: all of a campaign, or a sample that has the front and the best.

        The sample has up to a quarter of trials whose layout is not ranked (not runnable, failed,
        or against the constraints), evenly spaced over their ids. Of the ranked layouts it has the
        Pareto front (up to half of the places), the best (a quarter), and others evenly spaced over
        the ranks. Cancelled trials have no result and no point, and cheap probes have no point:
        they ran a part of a layout.

        Args:
            campaign_id: the campaign.
            limit: most points, at least 4.

        Raises:
            CampaignNotFoundError: there is no such campaign.
        """
        with self._db.read() as session:
            results = CampaignResults(self._cache, session, campaign_id)
            ranking = Ranking.read(session, campaign_id)
            return results.get(("points", limit), lambda: _plot_points(results, ranking, limit))


def _constant_knobs(session: Session, ranking: Ranking) -> Mapping[str, Any]:
    first = first_layout(session, ranking)
    if first is None:
        return {}
    conditions = listed(ranking, first)
    columns = {name: getattr(LeaderboardRow, name) for name in KNOB_FIELDS}
    # A few rows tell most knobs apart, so that only the others are read of all rows.
    some = rows_of(session, select(*columns.values()).where(*conditions).limit(_SAMPLE))
    constant = {
        name: values[0]
        for name, values in zip(columns, zip(*some, strict=True), strict=False)
        if len(set(values)) == 1
    }
    if len(some) < _SAMPLE:
        return constant
    numbers = [knob_number(name, columns[name]) for name in constant]
    ends = [end(number) for number in numbers for end in (func.min, func.max)]
    if not ends:
        return {}
    (found,) = rows_of(session, select(*ends).where(*conditions))
    differs = dict(zip(constant, zip(found[::2], found[1::2], strict=True), strict=True))
    return {name: value for name, value in constant.items() if len(set(differs[name])) == 1}


def _plot_points(results: CampaignResults, ranking: Ranking, limit: int) -> PlotPoints:
    session = results.session
    first = first_layout(session, ranking)
    ids = np.empty(0, np.int64) if first is None else listed_ids(results, ranking, first)
    unranked = _unranked_ids(session, ranking.campaign_id)
    most_unranked = min(len(unranked), max(limit // 4, limit - len(ids)))
    places = _sampled_places(session, ranking, ids, limit - most_unranked)
    points = _ranked_points(session, ranking, ids, places)
    sample = [unranked[place] for place in _evenly(len(unranked), most_unranked)]
    return PlotPoints(
        points=[*points, *_unranked_points(session, sample)],
        num_ranked=len(ids),
        num_unranked=len(unranked),
    )


def _sampled_places(session: Session, ranking: Ranking, ids: Ids, most: int) -> list[int]:
    """Places of ranked layouts that a plot shows, ascending."""
    if len(ids) <= most:
        return list(range(len(ids)))
    query = select(LeaderboardRow.trial_id).where(ranking.in_campaign, LeaderboardRow.on_front)
    front = [trial_id for (trial_id,) in rows_of(session, query)]
    (on_front,) = np.nonzero(np.isin(ids, front))
    chosen = np.union1d(on_front[: most // 2], np.arange(most // 4))
    others = np.setdiff1d(np.arange(len(ids)), chosen)
    some = others[_evenly(len(others), most - len(chosen))]
    places: list[int] = np.union1d(chosen, some).tolist()
    return places


def _evenly(number: int, most: int) -> list[int]:
    """At most so many of a number of places, evenly spaced, with both ends."""
    if number <= most:
        return list(range(number))
    spaced: list[int] = np.linspace(0, number - 1, most).round().astype(int).tolist()
    return spaced


def _unranked_ids(session: Session, campaign_id: int) -> list[int]:
    is_ranked = exists().where(
        LeaderboardRow.campaign_id == campaign_id, LeaderboardRow.layout_key == Trial.layout_key
    )
    query = (
        select(Trial.id)
        .where(
            Trial.campaign_id == campaign_id,
            Trial.state.in_(_WITH_RESULT),
            Trial.num_layers.is_(None),
            ~is_ranked,
        )
        .order_by(Trial.id)
    )
    return [trial_id for (trial_id,) in rows_of(session, query)]


def _ranked_points(
    session: Session, ranking: Ranking, ids: Ids, places: Sequence[int]
) -> list[PlotPoint]:
    query = select(
        LeaderboardRow.trial_id,
        Trial.number,
        Trial.state,
        Trial.reason,
        ranking.by.label("by"),
        LeaderboardRow.measured_peak_memory_bytes,
        LeaderboardRow.shortened,
        *(getattr(LeaderboardRow, name) for name in KNOB_FIELDS),
    ).join(Trial, Trial.id == LeaderboardRow.trial_id)
    found = {}
    wanted = ids[list(places)].tolist()
    for begin in range(0, len(wanted), _IDS_AT_ONCE):
        some = wanted[begin : begin + _IDS_AT_ONCE]
        rows = rows_of(session, query.where(LeaderboardRow.trial_id.in_(some)))
        found.update({row[0]: row for row in rows})
    points = []
    for place, trial_id in zip(places, wanted, strict=True):
        row = found[trial_id]
        points.append(PlotPoint._make((*row[:4], place + 1, *row[4:7], tuple(row[7:]))))
    return points


def _unranked_points(session: Session, trial_ids: Sequence[int]) -> list[PlotPoint]:
    query = select(
        Trial.id,
        Trial.number,
        Trial.state,
        Trial.reason,
        MeasurementRow.peak_memory_bytes,
        MeasurementRow.shortened,
        *(getattr(Trial, name) for name in KNOB_FIELDS),
    ).outerjoin(MeasurementRow, MeasurementRow.trial_id == Trial.id)
    points = []
    for begin in range(0, len(trial_ids), _IDS_AT_ONCE):
        some = trial_ids[begin : begin + _IDS_AT_ONCE]
        for row in rows_of(session, query.where(Trial.id.in_(some)).order_by(Trial.id)):
            measured = row[4], bool(row[5])
            points.append(PlotPoint._make((*row[:4], None, None, *measured, tuple(row[6:]))))
    return points
