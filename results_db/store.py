"""The store: everything that the service and the driver read and write, in one object."""

from __future__ import annotations

from typing import Self

from sqlalchemy import text

from results_db import migrate
from results_db.allocations import Allocations
from results_db.analyses import Analyses
from results_db.audit import Audit
from results_db.campaign_changes import CampaignChanges
from results_db.campaigns import Campaigns
from results_db.data_dir import DataDir
from results_db.descriptions import Descriptions
from results_db.event_log import EventLog
from results_db.idempotency import Idempotency
from results_db.imports import Imports
from results_db.knowledge import Knowledge
from results_db.leaderboard import Leaderboard
from results_db.leaderboard_page import LeaderboardPages
from results_db.leases import Leases
from results_db.nodes import Nodes
from results_db.outcomes import Outcomes
from results_db.ownership import Ownership
from results_db.part import Clock, utc_now
from results_db.reports import Reports
from results_db.session import Database
from results_db.standing_repair import StandingRepair
from results_db.tokens import Tokens
from results_db.trial_changes import TrialChanges
from results_db.trial_pages import TrialPages
from results_db.trials import Trials
from results_db.workers import Workers


class Store(
    Campaigns,
    CampaignChanges,
    Idempotency,
    Descriptions,
    Reports,
    Trials,
    TrialPages,
    TrialChanges,
    Workers,
    Allocations,
    Nodes,
    Leases,
    Outcomes,
    Leaderboard,
    LeaderboardPages,
    StandingRepair,
    Analyses,
    Knowledge,
    Imports,
    EventLog,
    Tokens,
    Ownership,
    Audit,
):
    """The database behind one object; safe to share between threads.

    Every method is one transaction. What it returns is a frozen record of `results_db.records`.
    """

    def __init__(self, url: str, *, clock: Clock = utc_now) -> None:
        """Connects to a database that has been upgraded to this version's schema."""
        super().__init__(Database(url), clock)

    @classmethod
    def open(cls, data_dir: DataDir, *, clock: Clock = utc_now) -> Self:
        """Creates what is missing of a data directory, upgrades its database, and opens it.

        Raises:
            DataDirInvalidError: the directory cannot be created or written to.
            DatabaseUnavailableError: its database is none, or cannot be opened.
            SchemaNewerError: a newer version wrote the database; nothing was changed.
        """
        data_dir.create()
        with data_dir.lock("migration", wait_s=60.0):
            data_dir.create_database()
            migrate.upgrade(data_dir.database_url)
        return cls(data_dir.database_url, clock=clock)

    @classmethod
    def connect(cls, url: str, *, clock: Clock = utc_now) -> Self:
        """Upgrades the database at a URL, a PostgreSQL, and opens it.

        Raises:
            DatabaseUrlInvalidError: it is no address of a PostgreSQL.
            DatabaseUnavailableError: it does not answer, or refuses us.
            SchemaNewerError: a newer version wrote the database; nothing was changed.
        """
        migrate.upgrade(url)
        return cls(url, clock=clock)

    def ping(self) -> None:
        """Raises the database's own error when it does not answer."""
        with self._db.read() as session:
            session.execute(text("SELECT 1"))

    def close(self) -> None:
        """Closes every connection."""
        self._db.close()
