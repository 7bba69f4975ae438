"""Baselines of campaigns: how they were measured, and what other layouts gain over them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.orm import Session

from results_db.database.store_base import StoreSection
from results_db.leaderboard.ranking import (
    NUM_RANKED,
    RankedRow,
    ranked_columns,
    rows_of,
    spreads_of,
    wins_one_of,
)
from results_db.models.standings import LeaderboardRow
from results_db.models.tables import MeasurementRow, Trial
from results_db.records import BaselineRead, CampaignRecord, GainRead
from results_db.rows import baseline_of
from search_spaces.errors import SearchSpaceError
from search_spaces.spec.layout import Layout
from search_spaces.spec.objectives import OBJECTIVE_FIGURES, measured_objective
from search_spaces.spec.space import SearchSpace
from search_spaces.statistics.confidence import Estimate, ratio_factor

Run = Any
"""A trial of a baseline, with the figures of its measurement; they are None without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Valued:
    """The objective of a layout."""

    trial_id: int
    trial_number: int
    value: float
    estimate: Estimate | None
    """Its step time with its error; None: unknown."""

    def gain_over(self, baseline: _Valued) -> GainRead:
        """The value over that of the baseline."""
        ratio, factor = self.value / baseline.value, None
        if self.trial_id == baseline.trial_id:
            factor = 1.0
        elif self.estimate is not None and baseline.estimate is not None:
            factor = ratio_factor(self.estimate, baseline.estimate)
        return GainRead(
            ratio=ratio,
            ratio_low=None if factor is None else ratio / factor,
            ratio_high=None if factor is None else ratio * factor,
            trial_number=self.trial_number,
        )


class Baselines(StoreSection):
    """The store's methods for baselines."""

    def baselines(self, campaigns: Sequence[CampaignRecord]) -> dict[int, BaselineRead]:
        """The baselines of campaigns and what the winners gain, by the ids of those with one."""
        layouts = _layouts(campaigns)
        if not layouts:
            return {}
        with self._db.read() as session:
            ranked, winners = _ranked(session, layouts, wins_one_of(layouts))
            runs = _runs(session, layouts)
        return {
            campaign.id: _baseline_read(
                campaign,
                layouts[campaign.id],
                runs[campaign.id],
                ranked.get(campaign.id),
                winners.get(campaign.id),
            )
            for campaign in campaigns
            if campaign.id in layouts
        }

    def gain_over_baseline(self, campaign: CampaignRecord, layout_key: str) -> GainRead | None:
        """What a layout gains over the campaign's baseline; None where either is not ranked."""
        layouts = _layouts([campaign])
        if not layouts:
            return None
        with self._db.read() as session:
            of_layout = _is_layout(campaign.id, layout_key)
            ranked, others = _ranked(session, layouts, of_layout)
        if campaign.id not in ranked or campaign.id not in others:
            return None
        return others[campaign.id].gain_over(ranked[campaign.id])


def _layouts(campaigns: Sequence[CampaignRecord]) -> dict[int, Layout]:
    found = {campaign.id: baseline_of(campaign.spec) for campaign in campaigns}
    return {id_: layout for id_, layout in found.items() if layout is not None}


def _is_layout(campaign_id: int, layout_key: str) -> ColumnElement[bool]:
    return and_(LeaderboardRow.campaign_id == campaign_id, LeaderboardRow.layout_key == layout_key)


def _ranked(
    session: Session, layouts: Mapping[int, Layout], others: ColumnElement[bool]
) -> tuple[dict[int, _Valued], dict[int, _Valued]]:
    """The baselines that are ranked, and others, both by campaign.

    Args:
        session: a transaction.
        layouts: the baselines by campaign.
        others: selects at most one row of each campaign.
    """
    is_baseline = or_(*(_is_layout(id_, layout.key) for id_, layout in layouts.items()))
    query = (
        select(
            *ranked_columns(LeaderboardRow.value),
            LeaderboardRow.campaign_id,
            Trial.number,
            is_baseline.label("is_baseline"),
            others.label("is_other"),
        )
        .join(Trial, Trial.id == LeaderboardRow.trial_id)
        .where(or_(is_baseline, others))
    )
    rows = rows_of(session, query)
    # `is_other` is NULL, and not false, where a campaign has no winner. The leader of a campaign is
    # the other layout, where there is one.
    in_order = sorted(rows, key=lambda row: bool(row.is_other))
    leaders = {row.campaign_id: row.trial_id for row in in_order}
    spreads = spreads_of(session, leaders)
    found: tuple[dict[int, _Valued], dict[int, _Valued]] = {}, {}
    for row in rows:
        ranked = RankedRow._make(row[:NUM_RANKED])
        valued = _Valued(
            trial_id=row.trial_id,
            trial_number=row.number,
            value=ranked.value,
            estimate=ranked.estimate(spreads.get(row.campaign_id)),
        )
        for by_campaign, belongs in zip(found, (row.is_baseline, row.is_other), strict=True):
            if belongs:
                by_campaign[row.campaign_id] = valued
    return found


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
    for row in rows_of(session, query):
        found[row.campaign_id].append(row)
    return found


def _baseline_read(
    campaign: CampaignRecord,
    layout: Layout,
    runs: Sequence[Run],
    ranked: _Valued | None,
    winner: _Valued | None,
) -> BaselineRead:
    shown = _shown(runs, ranked)
    valued = ranked if ranked is not None else _unranked(campaign, shown)
    gain = None
    # Ranks that shared devices are slow for that reason, and are not compared.
    if valued is not None and winner is not None and not (shown and shown.oversubscribed):
        gain = winner.gain_over(valued)
    factor = None if valued is None or valued.estimate is None else valued.estimate.factor
    value = None if valued is None else valued.value
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


def _shown(runs: Sequence[Run], ranked: _Valued | None) -> Run | None:
    """The first run that is ranked, else the newest that completed, else the newest."""
    if ranked is not None:
        return next((run for run in runs if run.id == ranked.trial_id), None)
    completed = [run for run in runs if run.state == "COMPLETED"]
    return (completed or runs or [None])[-1]


def _unranked(campaign: CampaignRecord, run: Run | None) -> _Valued | None:
    """The measured objective of a run that completed and is not ranked."""
    if run is None or run.state != "COMPLETED":
        return None
    value = measured_objective(campaign.objective, run, num_nodes=run.num_nodes)
    if value is None:
        return None
    return _Valued(trial_id=run.id, trial_number=run.number, value=value, estimate=None)


def _is_outside(spec: Mapping[str, Any], layout: Layout) -> bool:
    """Whether a baseline is outside of the space of a campaign's description."""
    try:
        space = SearchSpace.from_mapping(spec["space"])
    except SearchSpaceError:
        return True  # No layout is known to be inside of a space that cannot be read.
    return not space.holds(layout, spec["cluster"]["devices_per_node"])
