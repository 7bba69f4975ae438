"""Baselines of campaigns: how they were measured, and what other layouts gain over them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import and_, or_, select
from sqlalchemy.orm import Session

from layout_tuner.predictions.statistics.confidence import reach_of_ratio
from layout_tuner.results_db.leaderboard.intervals import Intervals
from layout_tuner.results_db.leaderboard.leaderboard_memo import LeaderboardSection
from layout_tuner.results_db.leaderboard.leaderboard_records import BaselineRead, GainRead
from layout_tuner.results_db.leaderboard.rank_layouts import Leaderboard, MeasuredLayout
from layout_tuner.results_db.models.tables import MeasurementRow, Trial
from layout_tuner.results_db.records import CampaignRecord
from layout_tuner.search_spaces.campaigns.stored_campaign import Damaged
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.objectives import OBJECTIVE_FIGURES, measured_objective

Run = Any
"""A trial of a baseline, with the figures of its measurement; they are None without one."""


class Baselines(LeaderboardSection):
    """The store's methods for baselines."""

    def of_campaigns(self, campaigns: Sequence[CampaignRecord]) -> dict[int, BaselineRead]:
        """The baselines of campaigns and the gains of the winners, by ids of campaigns with one."""
        layouts = _layouts(campaigns)
        if not layouts:
            return {}
        with self._db.read() as session:
            boards = self._boards(session, layouts)
            runs = _runs(session, layouts)
            ranked = {id_: board.find(layouts[id_].key) for id_, board in boards.items()}
            intervals = {
                id_: Intervals.read(session, id_, boards[id_], [found])
                for id_, found in ranked.items()
                if found is not None
            }
        return {
            campaign.id: _baseline_read(
                campaign,
                layouts[campaign.id],
                runs[campaign.id],
                boards[campaign.id],
                ranked[campaign.id],
                intervals.get(campaign.id),
            )
            for campaign in campaigns
            if campaign.id in boards
        }

    def gain(self, campaign: CampaignRecord, layout_key: str) -> GainRead | None:
        """The gain of a layout over the campaign's baseline; None where either is not ranked."""
        layout = campaign.stored.baseline
        if layout is None:
            return None
        with self._db.read() as session:
            board = self._board(session, campaign.id)
            baseline, other = board.find(layout.key), board.find(layout_key)
            if baseline is None or other is None:
                return None
            intervals = Intervals.read(session, campaign.id, board, [baseline, other])
            return _gain(intervals, other, baseline)


def _layouts(campaigns: Sequence[CampaignRecord]) -> dict[int, Layout]:
    found = {campaign.id: campaign.stored.baseline for campaign in campaigns}
    return {id_: layout for id_, layout in found.items() if layout is not None}


def _gain(intervals: Intervals, layout: MeasuredLayout, baseline: MeasuredLayout) -> GainRead:
    """The value of a layout over that of the baseline."""
    ratio, number = layout.value / baseline.value, layout.first.number
    if layout is baseline:
        return GainRead(ratio=ratio, ratio_low=ratio, ratio_high=ratio, trial_number=number)
    one, other = map(intervals.estimate, (layout, baseline))
    middle, reach = one.log - other.log, reach_of_ratio(one, other)
    return GainRead(
        ratio=ratio,
        ratio_low=min(math.exp(middle - reach), ratio),
        ratio_high=max(math.exp(middle + reach), ratio),
        trial_number=number,
    )


def _runs(session: Session, layouts: Mapping[int, Layout]) -> Mapping[int, Sequence[Run]]:
    """The trials of baselines by campaign, the oldest first."""
    query = (
        select(
            Trial.id,
            Trial.campaign_id,
            Trial.number,
            Trial.num_nodes,
            Trial.state,
            Trial.reason,
            Trial.message,
            MeasurementRow.oversubscribed,
            *(getattr(MeasurementRow, name) for name in OBJECTIVE_FIGURES),
        )
        .outerjoin(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .where(
            or_(
                *(
                    and_(Trial.campaign_id == id_, Trial.layout_key == layout.key)
                    for id_, layout in layouts.items()
                )
            )
        )
        .order_by(Trial.id)
    )
    found: defaultdict[int, list[Run]] = defaultdict(list)
    for row in session.execute(query):
        found[row.campaign_id].append(row)
    return found


def _baseline_read(
    campaign: CampaignRecord,
    layout: Layout,
    runs: Sequence[Run],
    board: Leaderboard,
    ranked: MeasuredLayout | None,
    intervals: Intervals | None,
) -> BaselineRead:
    shown, winner = _shown(runs, ranked), board.winner
    value, gain, low, high = None, None, None, None
    if ranked is not None and intervals is not None:
        value, (low, high) = ranked.value, intervals.ends(ranked)
        gain = None if winner is None else _gain(intervals, winner, ranked)
    elif shown is not None and shown.state == "COMPLETED":
        value = measured_objective(campaign.objective, shown, num_nodes=shown.num_nodes)
        # Ranks that shared devices are slow for that reason, and are not compared.
        if value is not None and winner is not None and not shown.oversubscribed:
            gain = GainRead(
                ratio=winner.value / value,
                ratio_low=None,
                ratio_high=None,
                trial_number=winner.first.number,
            )
    return BaselineRead(
        layout=layout,
        layout_key=layout.key,
        outside_space=_is_outside(campaign, layout),
        trial_id=None if shown is None else shown.id,
        trial_number=None if shown is None else shown.number,
        state=None if shown is None else shown.state,
        reason=None if shown is None else shown.reason,
        message="" if shown is None else shown.message,
        is_ranked=ranked is not None,
        value=value,
        value_low=low,
        value_high=high,
        disturbed=ranked is not None and ranked.disturbed,
        gain=gain,
    )


def _shown(runs: Sequence[Run], ranked: MeasuredLayout | None) -> Run | None:
    """The first run that is ranked, else the newest that completed, else the newest."""
    if ranked is not None:
        return next((run for run in runs if run.id == ranked.trial_id), None)
    completed = [run for run in runs if run.state == "COMPLETED"]
    return (completed or runs or [None])[-1]


def _is_outside(campaign: CampaignRecord, layout: Layout) -> bool:
    """Whether a baseline is outside of the space of its campaign."""
    spec = campaign.stored.read
    if isinstance(spec, Damaged):
        return True  # No layout is known to be inside of a space that cannot be read.
    return not spec.has_job(layout)
