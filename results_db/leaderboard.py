"""The leaderboard: the layouts that a campaign measured, ranked. It is read, not computed.

`results_db.standing_upkeep` keeps a row a layout; what depends on the whole campaign (who is first, how
far runs lie apart) is found from a few of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Row, func, select
from sqlalchemy.orm import Session

from results_db.models import Campaign, MeasurementRow, Trial
from results_db.part import StorePart
from results_db.places import (
    PLACE,
    First,
    Ranking,
    estimate_of,
    is_tied,
    listed,
    own_objective,
    rows_of,
    spreads_of,
)
from results_db.records import CampaignRecord, TrialRecord
from results_db.rows import WITH_MEASUREMENT, trial_record
from results_db.standing import WHOLE, Listing, Standing, Winner
from results_db.standing_tables import StandingRow
from results_db.standing_upkeep import completed, ranked
from search_spaces.pooling import Spread

_BEST: Final = (
    select(StandingRow.trial_id)
    .where(StandingRow.campaign_id == Campaign.id, StandingRow.shortened.is_(False))
    .order_by(StandingRow.value.desc(), StandingRow.trial_id)
    .limit(1)
    .correlate(Campaign)
    .scalar_subquery()
)
"""The trial that wins a campaign by its own objective."""


class Leaderboard(StorePart):
    """The leaderboard's part of the store."""

    def leaderboard(
        self,
        campaign_id: int,
        objective: str,
        *,
        listing: Listing = WHOLE,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[TrialRecord]:
        """The first trial of each layout of `standings`, in that order."""
        found = self.standings(campaign_id, objective, listing=listing, limit=limit, offset=offset)
        return [standing.trial for standing in found]

    def standings(
        self,
        campaign_id: int,
        objective: str,
        *,
        listing: Listing = WHOLE,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[Standing]:
        """The layouts that the campaign measured, the best first; of equals, the earlier one.

        Repeats of a layout count together. Oversubscribed measurements are never ranked: their ranks
        shared devices. Nor are those that break the campaign's constraints. One that was stopped early
        is never the first while any was measured in full.

        Args:
            campaign_id: of the campaign.
            objective: what to rank by.
            listing: which of them are listed.
            limit: most layouts to return.
            offset: how many of those listed to pass over.

        Raises:
            ObjectiveUnknownError: nothing is ranked by this name.
        """
        with self._db.read() as session:
            own = own_objective(session, campaign_id)
            ranking = Ranking.of(campaign_id, objective, own=own, listing=listing)
            columns = (
                select(ranking.by.label("by"), *PLACE, StandingRow.layout_key)
                .join(Trial, Trial.id == StandingRow.trial_id)
                .join(MeasurementRow, MeasurementRow.trial_id == StandingRow.trial_id)
            )
            places, first = listed(session, ranking, columns, limit=limit, offset=offset)
            if first is None:
                return []
            trials = _trials(session, [place.trial_id for place in places])
            runs = _runs(session, campaign_id, places)
            return [
                _standing(place, trials[place.trial_id], runs[place.trial_id], first)
                for place in places
            ]

    def winner(self, campaign_id: int, objective: str) -> Standing | None:
        """The best layout that was measured in full; None while there is none."""
        for standing in self.standings(campaign_id, objective, limit=1):
            return None if standing.shortened else standing
        return None

    def winners(self, campaign_ids: Collection[int]) -> dict[int, Winner]:
        """The winners of campaigns by their own objectives, by the ids of those that have one."""
        query = (
            select(StandingRow.campaign_id, StandingRow.value, Trial.number, StandingRow.layout_key)
            .join(Trial, Trial.id == StandingRow.trial_id)
            .where(StandingRow.trial_id.in_(select(_BEST).where(Campaign.id.in_(campaign_ids))))
        )
        with self._db.read() as session:
            return {
                id_: Winner(value=value, trial_number=number, layout_key=key)
                for id_, value, number, key in session.execute(query)
            }

    def value_to_beat(self, campaign_id: int) -> float | None:
        """The low end of the interval of the winner's own objective; None while there is none."""
        return self.values_to_beat([campaign_id]).get(campaign_id)

    def values_to_beat(self, campaign_ids: Collection[int]) -> dict[int, float]:
        """The same of several campaigns, of those that have a winner."""
        if not campaign_ids:
            return {}
        query = select(StandingRow.value.label("by"), *PLACE, StandingRow.campaign_id).where(
            StandingRow.trial_id.in_(select(_BEST).where(Campaign.id.in_(campaign_ids)))
        )
        with self._db.read() as session:
            winners = rows_of(session, query)
            spreads = spreads_of(session, {row.campaign_id: row.trial_id for row in winners})
        return {
            winner.campaign_id: _low_end(winner, spreads.get(winner.campaign_id))
            for winner in winners
        }

    def count_ranked(self, campaign_id: int) -> int:
        """How many layouts the campaign's leaderboard has."""
        query = select(func.count()).where(StandingRow.campaign_id == campaign_id)
        with self._db.read() as session:
            return session.scalar(query) or 0

    def count_constrained(self, campaign_id: int) -> int:
        """How many completed trials are not ranked since they break the campaign's constraints."""
        bound = select(Campaign.max_peak_memory_bytes).where(Campaign.id == campaign_id)
        with self._db.read() as session:
            return constrained(session, campaign_id, session.scalar(bound))

    def front(self, campaign: CampaignRecord) -> frozenset[int]:
        """Ids of the ranked trials that no other beats, over all objectives of the campaign.

        A layout that was measured several times stands with its rates at the median step time, as in
        `standings`, and the median of its memory, by the id of the first of its runs that count: none that
        was stopped early does, while any was measured in full.
        """
        query = select(StandingRow.trial_id).where(
            StandingRow.campaign_id == campaign.id, StandingRow.on_front
        )
        with self._db.read() as session:
            return frozenset(session.scalars(query))


def _low_end(winner: Row[*tuple[Any, ...]], spread: Spread | None) -> float:
    estimate = estimate_of(winner, spread)
    return float(winner.by if estimate is None else winner.by / estimate.factor)


def constrained(session: Session, campaign_id: int, max_peak_memory_bytes: int | None) -> int:
    """How many completed trials of a campaign have a larger peak than is ranked."""
    if max_peak_memory_bytes is None:
        return 0
    query = (
        select(func.count())
        .select_from(MeasurementRow)
        .join(Trial, Trial.id == MeasurementRow.trial_id)
        .where(completed(campaign_id), MeasurementRow.peak_memory_bytes > max_peak_memory_bytes)
    )
    return session.scalar(query) or 0


def _standing(
    place: Row[*tuple[Any, ...]], trial: TrialRecord, trial_ids: tuple[int, ...], first: First
) -> Standing:
    value, seconds = place.by, place.step_time_s
    estimate = estimate_of(place, first.spread)
    factor = None if estimate is None else estimate.factor
    return Standing(
        trial=trial,
        value=value,
        low=None if factor is None else value / factor,
        high=None if factor is None else value * factor,
        step_time_s=seconds,
        step_time_low_s=None if factor is None else seconds / factor,
        step_time_high_s=None if factor is None else seconds * factor,
        trial_ids=trial_ids,
        shortened=place.shortened,
        is_tied=is_tied(value, estimate, first),
    )


def _trials(session: Session, trial_ids: Sequence[int]) -> Mapping[int, TrialRecord]:
    query = select(Trial).where(Trial.id.in_(trial_ids))
    rows = session.scalars(query.options(WITH_MEASUREMENT))
    return {row.id: trial_record(row) for row in rows}


def _runs(
    session: Session, campaign_id: int, places: Sequence[Row[*tuple[Any, ...]]]
) -> Mapping[int, tuple[int, ...]]:
    """The runs that count, by the first of them."""
    repeated = {place.layout_key: place for place in places if place.num_runs > 1}
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
    return {place.trial_id: tuple(found[place.layout_key]) or (place.trial_id,) for place in places}
