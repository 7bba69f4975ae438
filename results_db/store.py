"""The store: everything that the service and the driver read and write, in one object."""

from __future__ import annotations

from datetime import datetime
from typing import Self

from sqlalchemy import text

from results_db import migrate
from results_db.allocations import Allocations
from results_db.analyses import Analyses
from results_db.audit import Audit
from results_db.campaign_changes import CampaignChanges
from results_db.campaign_mark import CampaignMarks
from results_db.campaigns import Campaigns
from results_db.data_dir import DataDir
from results_db.database_clock import DatabaseClock
from results_db.database_url import postgresql_url
from results_db.descriptions import Descriptions
from results_db.driver_lease import DriverLeases
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
from results_db.retention import Pruning
from results_db.session import Database
from results_db.standing_repair import StandingRepair
from results_db.sweeps import Sweeps
from results_db.tokens import Tokens
from results_db.trial_changes import TrialChanges
from results_db.trial_pages import TrialPages
from results_db.trials import Trials
from results_db.vitals import Vitals
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
    DriverLeases,
    Sweeps,
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
    CampaignMarks,
    Pruning,
    Vitals,
    Tokens,
    Ownership,
    Audit,
):
    """The database behind one object; safe to share between threads.

    Every method is one transaction. What it returns is a frozen record of `results_db.records`.
    """

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        """Connects to a database that has been upgraded to this version's schema.

        Args:
            url: its address.
            clock: None: the machine's where the database is a file, the server's where others share it.

        Raises:
            DatabaseUrlInvalidError: it is no address of a database that we know.
            DatabaseUnavailableError: it does not answer, or refuses us.
        """
        database = Database(url)
        self._database_clock = None
        if clock is None and database.is_shared:
            clock = self._database_clock = DatabaseClock(database)
        super().__init__(database, clock or utc_now)

    @classmethod
    def open(
        cls, data_dir: DataDir, *, database: str | None = None, clock: Clock | None = None
    ) -> Self:
        """Creates what is missing of a data directory, upgrades the database, and opens it.

        Args:
            data_dir: where the database lies, unless another is named.
            database: URL of a PostgreSQL; None: the SQLite of the data directory.
            clock: None: as the database's kind has it.

        Raises:
            DataDirInvalidError: the directory cannot be created or written to.
            DatabaseUrlInvalidError: the URL is no address of a PostgreSQL.
            DatabaseUnavailableError: the database is none, cannot be opened, or refuses us.
            SchemaNewerError: a newer version wrote the database; nothing was changed.
        """
        data_dir.create()
        if database is not None:
            return cls.connect(postgresql_url(database), clock=clock)
        with data_dir.lock("migration", wait_s=60.0):
            data_dir.create_database()
            migrate.upgrade(data_dir.database_url)
        return cls(data_dir.database_url, clock=clock)

    @classmethod
    def connect(cls, url: str, *, clock: Clock | None = None) -> Self:
        """Upgrades the database at a URL and opens it.

        Raises:
            DatabaseUrlInvalidError: it is no address of a database that we know.
            DatabaseUnavailableError: it does not answer, or refuses us.
            SchemaNewerError: a newer version wrote the database; nothing was changed.
        """
        migrate.upgrade(url)
        return cls(url, clock=clock)

    @property
    def is_shared(self) -> bool:
        """Whether other processes than this one may serve the same database."""
        return self._db.is_shared

    def now(self) -> datetime:
        """The time that leases and beats are written in."""
        return self._clock()

    def agree_on_time(self) -> None:
        """Sets the clock by the database's server, where there is one.

        Raises:
            DatabaseUnavailableError: it does not answer.
        """
        if self._database_clock is not None:
            self._database_clock.ask()

    def ping(self) -> None:
        """Raises the database's own error when it does not answer."""
        with self._db.read() as session:
            session.execute(text("SELECT 1"))

    def close(self) -> None:
        """Closes every connection."""
        self._db.close()
