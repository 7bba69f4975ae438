"""What pages show of campaigns besides their records: counts and choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import func, select

from results_db.campaigns.campaigns import conditions
from results_db.campaigns.filter import CampaignFilter
from results_db.database.store_base import StoreSection
from results_db.models.tables import Attempt, Campaign, Trial
from results_db.records import CampaignState
from search_spaces.protocol.states import AttemptPhase


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningPhase:
    """What the open attempt of a trial does."""

    phase: AttemptPhase | None
    """None: its worker reported none."""
    waiting_because: str
    """Why it waits for devices; empty: it does not."""


class Overviews(StoreSection):
    """The store's methods for pages about campaigns."""

    def count_campaigns(self, chosen: CampaignFilter) -> int:
        query = select(func.count()).select_from(Campaign).where(*conditions(chosen))
        return self._scalar(query) or 0

    def campaign_choices(self) -> Mapping[str, Mapping[str, int]]:
        """The values that campaigns have, with their numbers of campaigns, by column.

        The columns are state, model_name, cluster_name and created_by; values are sorted.
        """
        columns = (Campaign.state, Campaign.model_name, Campaign.cluster_name, Campaign.created_by)
        with self._db.read() as session:
            return {
                column.key: {
                    row[0]: row[1]
                    for row in session.execute(
                        select(column, func.count()).group_by(column).order_by(column)
                    )
                }
                for column in columns
            }

    def campaigns_from(self, name: str) -> list[tuple[str, CampaignState]]:
        """Names and states of the campaigns that start from a campaign, the newest first."""
        query = select(Campaign.name, Campaign.state, Campaign.spec).order_by(Campaign.id.desc())
        with self._db.read() as session:
            return [
                (other, state)
                for other, state, spec in session.execute(query)
                if name in spec.get("start_from", ())
            ]

    def running_phases(self, campaign_id: int) -> dict[int, RunningPhase]:
        """What the running trials of a campaign do, by their ids."""
        query = (
            select(Attempt.trial_id, Attempt.phase, Attempt.waiting_because)
            .join(Trial, Trial.id == Attempt.trial_id)
            .where(
                Trial.campaign_id == campaign_id, Trial.state == "RUNNING", Attempt.ending.is_(None)
            )
        )
        with self._db.read() as session:
            return {
                trial_id: RunningPhase(phase=phase, waiting_because=why or "")  # type: ignore[arg-type]
                for trial_id, phase, why in session.execute(query)
            }
