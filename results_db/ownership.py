"""Whose something is: the name in which it was made."""

from __future__ import annotations

from sqlalchemy import select

from results_db.models import Campaign, Trial
from results_db.part import StorePart
from results_db.service_tables import UserCluster, UserModel


class Ownership(StorePart):
    """The part of the store that knows whose things are; each answer is None where there is no such thing."""

    def owner_of_campaign(self, campaign_id: int) -> str | None:
        """Who submitted a campaign; empty where it is from before anybody was asked."""
        query = select(Campaign.created_by).where(Campaign.id == campaign_id)
        with self._db.read() as session:
            return session.scalar(query)

    def owner_of_campaign_named(self, name: str) -> str | None:
        """The same, by its name."""
        query = select(Campaign.created_by).where(Campaign.name == name)
        with self._db.read() as session:
            return session.scalar(query)

    def owner_of_trial(self, trial_id: int) -> str | None:
        """Who submitted a trial's campaign."""
        query = select(Campaign.created_by).join(Trial).where(Trial.id == trial_id)
        with self._db.read() as session:
            return session.scalar(query)

    def owner_of_model(self, name: str) -> str | None:
        """Whose model of the users' own it is."""
        query = select(UserModel.created_by).where(UserModel.name == name)
        with self._db.read() as session:
            return session.scalar(query)

    def owner_of_cluster(self, name: str) -> str | None:
        """Whose cluster of the users' own it is."""
        query = select(UserCluster.created_by).where(UserCluster.name == name)
        with self._db.read() as session:
            return session.scalar(query)
