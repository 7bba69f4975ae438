"""The leaderboard: the layouts that a campaign measured, ranked.

`results_db.leaderboard.table` keeps one row for each layout, and `results_db.leaderboard.pages`
selects pages of these rows. Here they become records or documents.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import Integer, String, bindparam, func, select
from sqlalchemy.orm import Session

from results_db.database.compiled_statement import DriverStatement
from results_db.database.store_base import StoreSection
from results_db.errors import campaign_not_found
from results_db.events.event_log import CampaignResults, page_version_of
from results_db.leaderboard.layout_documents import document_statements
from results_db.leaderboard.listing import counted_ranks
from results_db.leaderboard.pages import PageStatements, RankedPage, select_page
from results_db.leaderboard.ranked_layout import WHOLE, LeaderboardQuery, RankedLayout, Winner
from results_db.leaderboard.ranking import (
    RankedRow,
    Ranking,
    best_in_full,
    ranked_columns,
    rows_of,
    spreads_of,
    wins_one_of,
)
from results_db.leaderboard.table import (
    completed,
    ranked,
)
from results_db.models.standings import LeaderboardRow
from results_db.models.tables import Campaign, MeasurementRow, Trial
from results_db.records import CampaignRecord
from results_db.rows import WITH_MEASUREMENT, objectives_of, trial_record

_HEAD: Final = select(
    Campaign.id, Campaign.objective, Campaign.max_peak_memory_bytes, Campaign.spec
)
_HEAD_BY_ID: Final = DriverStatement(
    _HEAD.where(Campaign.id == bindparam("campaign", type_=Integer))
)
_HEAD_BY_NAME: Final = DriverStatement(
    _HEAD.where(Campaign.name == bindparam("campaign", type_=String))
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageOfLayouts:
    """A page of the leaderboard."""

    objective: str
    """The objective that ranks."""
    objectives: Sequence[str]
    """The objectives of the campaign, and of its Pareto front."""
    total: int
    """The number of layouts that are listed in all."""
    constrained: int
    """Completed trials that are not ranked because they break the campaign's constraints."""
    source: str | None
    """Where the measurements of an imported campaign come from; None: it ran here."""
    layouts: Sequence[dict[str, Any]]
    """Each as a document: its first trial with the measurement, its rank, value and interval."""


class Leaderboard(StoreSection):
    """The store's methods for leaderboards."""

    def ranked_layouts(
        self,
        campaign_id: int,
        objective: str,
        *,
        listing: LeaderboardQuery = WHOLE,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[RankedLayout]:
        """The layouts that the campaign measured, the best first; of equal ones, the earlier one.

        Repeats of a layout are pooled. Measurements are not ranked if they are oversubscribed
        (their ranks shared devices) or break the campaign's constraints. A layout that was stopped
        early is first only if none was measured in full.

        Args:
            campaign_id: the campaign.
            objective: the objective that ranks.
            listing: which layouts are listed.
            limit: most layouts to return.
            offset: number of listed layouts to skip.

        Raises:
            ObjectiveUnknownError: no layout is ranked by this name.
        """
        with self._db.read() as session:
            own = session.scalar(select(Campaign.objective).where(Campaign.id == campaign_id))
            ranking = Ranking.of(campaign_id, objective, own=own, listing=listing)
            page = select_page(
                CampaignResults(self._cache, session, campaign_id),
                _record_statements(ranking.by.key),
                ranking,
                limit=limit,
                offset=offset,
            )
            return _ranked_layouts(session, campaign_id, page, range(len(page.rows)))

    def page_of_layouts(
        self,
        campaign: int | str,
        objective: str | None = None,
        *,
        check_version: Callable[[str], object] | None = None,
        listing: LeaderboardQuery = WHOLE,
        limit: int,
        offset: int = 0,
    ) -> PageOfLayouts:
        """The same layouts as `ranked_layouts`, as documents, with what a page shows above them.

        Args:
            campaign: id or name of the campaign.
            objective: the objective that ranks; None: the campaign's own.
            check_version: called with the version of the campaign's pages before the page is read;
                it may raise to skip reading the page.
            listing: which layouts are listed.
            limit: most layouts to return.
            offset: number of listed layouts to skip.

        Raises:
            CampaignNotFoundError: there is no such campaign.
            ObjectiveUnknownError: no layout is ranked by this name.
        """
        by_id = isinstance(campaign, int)
        with self._db.read() as session:
            heads = (_HEAD_BY_ID if by_id else _HEAD_BY_NAME).rows(session, campaign=campaign)
            if not heads:
                raise campaign_not_found(campaign)
            ((campaign_id, own, max_peak_memory_bytes, spec),) = heads
            version = None
            if check_version is not None:
                version = page_version_of(session, campaign_id)
                check_version(version)
            results = CampaignResults(self._cache, session, campaign_id, version)
            by = objective or own
            ranking = Ranking.of(campaign_id, by, own=own, listing=listing)
            objectives = objectives_of(spec)
            cheapest = () if listing.within_percent is None else ("tokens_per_node_hour",)
            shown = tuple(dict.fromkeys((*objectives, by, *cheapest)))
            statements = document_statements(ranking.by.key, shown)
            page = select_page(results, statements.page, ranking, limit=limit, offset=offset)
            total, source = statements.total_and_source(results, ranking, page)
            memory_bytes = spec.get("cluster", {}).get("device_memory_bytes")
            return PageOfLayouts(
                objective=by,
                objectives=objectives,
                total=total,
                constrained=_count_constrained(session, campaign_id, max_peak_memory_bytes),
                source=source,
                layouts=statements.documents(session, page, memory_bytes),
            )

    def rank_of(self, campaign_id: int, trial_id: int, objective: str | None = None) -> int | None:
        """The rank of a trial's layout on the whole leaderboard, from 1.

        Args:
            campaign_id: the campaign.
            trial_id: any trial of the layout, also a repeat.
            objective: the objective that ranks; None: the campaign's own.

        Returns:
            None: the layout is not ranked, or the campaign has no such trial.

        Raises:
            CampaignNotFoundError: there is no such campaign.
            ObjectiveUnknownError: no layout is ranked by this name.
        """
        key = select(Trial.layout_key).where(Trial.id == trial_id, Trial.campaign_id == campaign_id)
        with self._db.read() as session:
            ranking = Ranking.read(session, campaign_id, objective)
            query = select(*ranked_columns(ranking.by)).where(
                ranking.in_campaign, LeaderboardRow.layout_key == key.scalar_subquery()
            )
            found, best = rows_of(session, query), best_in_full(session, ranking)
            if not found or best is None:
                return None
            (rank,) = counted_ranks(session, ranking, best[0], [RankedRow._make(found[0])])
            return rank

    def tied_layouts(self, campaign_id: int, objective: str, *, among: int) -> list[RankedLayout]:
        """The first layout, and those that cannot be told apart from it.

        Args:
            campaign_id: the campaign.
            objective: the objective that ranks.
            among: layouts that are looked at, the best first.

        Raises:
            CampaignNotFoundError: there is no such campaign.
            ObjectiveUnknownError: no layout is ranked by this name.
        """
        with self._db.read() as session:
            ranking = Ranking.read(session, campaign_id, objective)
            results = CampaignResults(self._cache, session, campaign_id)
            page = select_page(results, _record_statements(ranking.by.key), ranking, limit=among)
            places = [place for place, is_tied in enumerate(page.ties) if is_tied or not place]
            return _ranked_layouts(session, campaign_id, page, places)

    def winner(self, campaign_id: int, objective: str) -> RankedLayout | None:
        """The best layout that was measured in full; None while there is none."""
        for layout in self.ranked_layouts(campaign_id, objective, limit=1):
            return None if layout.shortened else layout
        return None

    def winners(self, campaign_ids: Collection[int]) -> dict[int, Winner]:
        """The winners of campaigns by their own objectives, by the ids of those that have one."""
        query = (
            select(
                LeaderboardRow.campaign_id,
                LeaderboardRow.value,
                Trial.number,
                LeaderboardRow.layout_key,
            )
            .join(Trial, Trial.id == LeaderboardRow.trial_id)
            .where(wins_one_of(campaign_ids))
        )
        with self._db.read() as session:
            return {
                id_: Winner(value=value, trial_number=number, layout_key=key)
                for id_, value, number, key in session.execute(query)
            }

    def values_to_beat(self, campaign_ids: Collection[int]) -> dict[int, float]:
        """The low end of the interval of each winner's objective, by the campaign's id."""
        if not campaign_ids:
            return {}
        query = select(*ranked_columns(LeaderboardRow.value), LeaderboardRow.campaign_id)
        with self._db.read() as session:
            winners = {
                row.campaign_id: RankedRow._make(row[:-1])
                for row in rows_of(session, query.where(wins_one_of(campaign_ids)))
            }
            spreads = spreads_of(session, {id_: row.trial_id for id_, row in winners.items()})
        values = {}
        for campaign_id, row in winners.items():
            estimate = row.estimate(spreads.get(campaign_id))
            values[campaign_id] = row.value if estimate is None else row.value / estimate.factor
        return values

    def fronts_to_beat(
        self, campaign_ids: Collection[int]
    ) -> dict[int, list[tuple[float | None, ...]]]:
        """The objectives of the layouts on each campaign's Pareto front, by the campaign's id.

        They are in the order of the campaign's description; None: not measured.
        """
        fronts: dict[int, list[tuple[float | None, ...]]] = {}
        if campaign_ids:
            weighed = (LeaderboardRow.weighed_1, LeaderboardRow.weighed_2, LeaderboardRow.weighed_3)
            query = select(LeaderboardRow.campaign_id, *weighed).where(
                LeaderboardRow.campaign_id.in_(campaign_ids), LeaderboardRow.on_front
            )
            with self._db.read() as session:
                for campaign_id, *values in rows_of(session, query):
                    fronts.setdefault(campaign_id, []).append(tuple(values))
        return fronts

    def count_constrained(self, campaign_id: int) -> int:
        """The number of completed trials that break the campaign's constraints."""
        bound = select(Campaign.max_peak_memory_bytes).where(Campaign.id == campaign_id)
        with self._db.read() as session:
            return _count_constrained(session, campaign_id, session.scalar(bound))

    def front(self, campaign: CampaignRecord) -> frozenset[int]:
        """The Pareto front over the campaign's objectives, as ids of trials.

        A layout with several runs appears with the id of the first run that counts, its rates at
        the median step time and the median of its memory. Runs that were stopped early count only
        where no layout was measured in full.
        """
        query = select(LeaderboardRow.trial_id).where(
            LeaderboardRow.campaign_id == campaign.id, LeaderboardRow.on_front
        )
        with self._db.read() as session:
            return frozenset(session.scalars(query))


@lru_cache(maxsize=100)
def _record_statements(by: str) -> PageStatements:
    """The statements of pages that become records; the last column is the layout's key."""
    query = (
        select(*ranked_columns(getattr(LeaderboardRow, by)), LeaderboardRow.layout_key)
        .join(Trial, Trial.id == LeaderboardRow.trial_id)
        .join(MeasurementRow, MeasurementRow.trial_id == LeaderboardRow.trial_id)
    )
    return PageStatements.of(by, query)


def _ranked_layouts(
    session: Session, campaign_id: int, page: RankedPage, places: Sequence[int]
) -> list[RankedLayout]:
    """The records of some layouts of a page, which was selected with `_record_statements`."""
    rows = [page.rows[place] for place in places]
    query = select(Trial).where(Trial.id.in_([row.trial_id for row in rows]))
    found = session.scalars(query.options(WITH_MEASUREMENT)) if rows else ()
    trials = {trial.id: trial_record(trial) for trial in found}
    runs = _runs(session, campaign_id, rows, [page.selected[place][-1] for place in places])
    layouts = []
    for place, row in zip(places, rows, strict=True):
        factor = page.factors[place]
        layouts.append(
            RankedLayout(
                trial=trials[row.trial_id],
                rank=page.ranks[place],
                value=row.value,
                low=None if factor is None else row.value / factor,
                high=None if factor is None else row.value * factor,
                step_time_s=row.step_time_s,
                step_time_low_s=None if factor is None else row.step_time_s / factor,
                step_time_high_s=None if factor is None else row.step_time_s * factor,
                trial_ids=runs[row.trial_id],
                shortened=row.shortened,
                is_tied=page.ties[place],
            )
        )
    return layouts


def _count_constrained(
    session: Session, campaign_id: int, max_peak_memory_bytes: int | None
) -> int:
    if max_peak_memory_bytes is None:
        return 0
    query = (
        select(func.count())
        .select_from(MeasurementRow)
        .join(Trial, Trial.id == MeasurementRow.trial_id)
        .where(completed(campaign_id), MeasurementRow.peak_memory_bytes > max_peak_memory_bytes)
    )
    return session.scalar(query) or 0


def _runs(
    session: Session, campaign_id: int, rows: Sequence[RankedRow], layout_keys: Sequence[str]
) -> Mapping[int, tuple[int, ...]]:
    """The runs of each layout that count, by the first of them."""
    pairs = list(zip(rows, layout_keys, strict=True))
    repeated = {key: row for row, key in pairs if row.num_runs > 1}
    found: defaultdict[str, list[int]] = defaultdict(list)
    if repeated:
        query = (
            select(Trial.id, Trial.layout_key, MeasurementRow.shortened)
            .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
            .where(Trial.campaign_id == campaign_id, Trial.layout_key.in_(repeated))
            .where(ranked(campaign_id))
            .order_by(Trial.id)
        )
        for trial_id, key, shortened in session.execute(query):
            if shortened == repeated[key].shortened:
                found[key].append(trial_id)
    return {row.trial_id: tuple(found[key]) or (row.trial_id,) for row, key in pairs}
