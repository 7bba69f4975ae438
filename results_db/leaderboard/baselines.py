"""Baselines of campaigns: how they were measured, and what other layouts gain over them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import and_, or_, select
from sqlalchemy.orm import Session

from results_db.leaderboard.leaderboard_memo import LeaderboardSection
from results_db.leaderboard.measured_runs import timed_iterations
from results_db.leaderboard.rank_layouts import Leaderboard, MeasuredLayout, TimedIterations
from results_db.models.tables import MeasurementRow, Trial
from results_db.records import BaselineRead, CampaignRecord, GainRead
from results_db.rows import baseline_of
from search_spaces.errors import SearchSpaceError
from search_spaces.spec.layout import Layout
from search_spaces.spec.objectives import OBJECTIVE_FIGURES, measured_objective
from search_spaces.spec.space import SearchSpace
from search_spaces.statistics.confidence import ratio_factor

Run = Any
"""A trial of a baseline, with the figures of its measurement; they are None without one."""


class Baselines(LeaderboardSection):
    """The store's methods for baselines."""

    def of_campaigns(self, campaigns: Sequence[CampaignRecord]) -> dict[int, BaselineRead]:
        """The baselines of campaigns and what the winners gain, by the ids of those with one."""
        layouts = _layouts(campaigns)
        if not layouts:
            return {}
        with self._db.read() as session:
            boards = self._boards(session, layouts)
            runs = _runs(session, layouts)
            ranked = {id_: board.find(layouts[id_].key) for id_, board in boards.items()}
            compared = [*ranked.values(), *(board.winner for board in boards.values())]
            timed = timed_iterations(
                session, [run.id for each in compared if each is not None for run in each.runs]
            )
        return {
            campaign.id: _baseline_read(
                campaign,
                layouts[campaign.id],
                runs[campaign.id],
                boards[campaign.id],
                ranked[campaign.id],
                timed,
            )
            for campaign in campaigns
            if campaign.id in boards
        }

    def gain(self, campaign: CampaignRecord, layout_key: str) -> GainRead | None:
        """What a layout gains over the campaign's baseline; None where either is not ranked."""
        layout = baseline_of(campaign.spec)
        if layout is None:
            return None
        with self._db.read() as session:
            board = self._board(session, campaign.id)
            baseline, other = board.find(layout.key), board.find(layout_key)
            if baseline is None or other is None:
                return None
            ids = [run.id for each in (baseline, other) for run in each.runs]
            return _gain(board, other, baseline, timed_iterations(session, ids))


def _layouts(campaigns: Sequence[CampaignRecord]) -> dict[int, Layout]:
    found = {campaign.id: baseline_of(campaign.spec) for campaign in campaigns}
    return {id_: layout for id_, layout in found.items() if layout is not None}


def _gain(
    board: Leaderboard, layout: MeasuredLayout, baseline: MeasuredLayout, timed: TimedIterations
) -> GainRead:
    """The value of a layout over that of the baseline."""
    ratio, factor = layout.value / baseline.value, None
    if layout is baseline:
        factor = 1.0
    else:
        one, other = (each.estimate(timed, board.spread) for each in (layout, baseline))
        if one is not None and other is not None:
            factor = ratio_factor(one, other)
    return _gain_read(ratio, factor, layout)


def _gain_read(ratio: float, factor: float | None, layout: MeasuredLayout) -> GainRead:
    return GainRead(
        ratio=ratio,
        ratio_low=None if factor is None else ratio / factor,
        ratio_high=None if factor is None else ratio * factor,
        trial_number=layout.first.number,
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
    timed: TimedIterations,
) -> BaselineRead:
    shown, winner = _shown(runs, ranked), board.winner
    value, factor, gain = None, None, None
    if ranked is not None:
        value, estimate = ranked.value, ranked.estimate(timed, board.spread)
        factor = None if estimate is None else estimate.factor
        gain = None if winner is None else _gain(board, winner, ranked, timed)
    elif shown is not None and shown.state == "COMPLETED":
        value = measured_objective(campaign.objective, shown, num_nodes=shown.num_nodes)
        # Ranks that shared devices are slow for that reason, and are not compared.
        if value is not None and winner is not None and not shown.oversubscribed:
            gain = _gain_read(winner.value / value, None, winner)
    return BaselineRead(
        layout=layout,
        layout_key=layout.key,
        outside_space=_is_outside(campaign.spec, layout),
        trial_id=None if shown is None else shown.id,
        trial_number=None if shown is None else shown.number,
        state=None if shown is None else shown.state,
        reason=None if shown is None else shown.reason,
        message="" if shown is None else shown.message,
        is_ranked=ranked is not None,
        value=value,
        value_low=None if value is None or factor is None else value / factor,
        value_high=None if value is None or factor is None else value * factor,
        gain=gain,
    )


def _shown(runs: Sequence[Run], ranked: MeasuredLayout | None) -> Run | None:
    """The first run that is ranked, else the newest that completed, else the newest."""
    if ranked is not None:
        return next((run for run in runs if run.id == ranked.trial_id), None)
    completed = [run for run in runs if run.state == "COMPLETED"]
    return (completed or runs or [None])[-1]


def _is_outside(spec: Mapping[str, Any], layout: Layout) -> bool:
    """Whether a baseline is outside of the space of a campaign's description."""
    try:
        space = SearchSpace.from_mapping(spec["space"])
    except SearchSpaceError:
        return True  # No layout is known to be inside of a space that cannot be read.
    return not space.holds(layout, spec["cluster"]["devices_per_node"])
