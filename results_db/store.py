"""The store: everything that the service and the driver read and write, in one object."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from functools import partial
from typing import Self

from layout_tuner.results_db.access import visibility as visibility  # its conditions are set here
from layout_tuner.results_db.access.browser_sessions import SignIns
from layout_tuner.results_db.access.owners_and_groups import Owners
from layout_tuner.results_db.access.quotas import Quotas
from layout_tuner.results_db.access.shares import Shares
from layout_tuner.results_db.access.tokens import Access
from layout_tuner.results_db.access.webhooks import Webhooks
from layout_tuner.results_db.actor import SYSTEM, Actor
from layout_tuner.results_db.allocations.allocations import Allocations
from layout_tuner.results_db.allocations.leases import Leases
from layout_tuner.results_db.allocations.workers import Workers
from layout_tuner.results_db.campaigns.campaigns import Campaigns
from layout_tuner.results_db.campaigns.driver_lease import DriverLeases, fenced
from layout_tuner.results_db.campaigns.history_and_timeline import CampaignHistory
from layout_tuner.results_db.campaigns.imported_tables import Imports
from layout_tuner.results_db.campaigns.models_and_clusters import Descriptions
from layout_tuner.results_db.campaigns.plans import Plans
from layout_tuner.results_db.campaigns.reports import Reports
from layout_tuner.results_db.database.change_mark import ChangeMark
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.database.database import Database
from layout_tuner.results_db.database.store_base import Clock, DatabaseClock, StoreSection
from layout_tuner.results_db.database.url import postgresql_url
from layout_tuner.results_db.events.event_log import EventLog
from layout_tuner.results_db.events.live_state import LiveStates
from layout_tuner.results_db.leaderboard.baselines import Baselines
from layout_tuner.results_db.leaderboard.leaderboard import Leaderboards
from layout_tuner.results_db.leaderboard.leaderboard_memo import LeaderboardMemo
from layout_tuner.results_db.leaderboard.plot_points import PlotData
from layout_tuner.results_db.migrations import migrate
from layout_tuner.results_db.retention import Pruning
from layout_tuner.results_db.service_stats import Statistics
from layout_tuner.results_db.trials.outcomes import Outcomes
from layout_tuner.results_db.trials.pages import TrialPages
from layout_tuner.results_db.trials.trials import Trials
from layout_tuner.results_db.usage import Usage


class Store:
    """The database behind one object; safe to share between threads.

    It has one section for each kind of thing: `store.trials.add(...)`. Every method of a section
    is one transaction. What it returns is a frozen record of `results_db.records`.
    """

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        """Connects to a database that has been upgraded to this version's schema.

        Without a clock, it has that of the machine for SQLite, and of the server for PostgreSQL.

        Raises:
            DatabaseUrlInvalidError: the URL is invalid, or of an unsupported kind.
            DatabaseUnavailableError: it does not answer, or refuses the connection.
        """
        database = Database(url)
        self._database_clock = None
        if clock is None and database.is_shared:
            clock = self._database_clock = DatabaseClock(database)
        self._db = database
        self._clock = clock or partial(datetime.now, UTC)
        self._actor = SYSTEM
        parts = (database, self._clock)
        self.campaigns = Campaigns(*parts)
        self.imports = Imports(*parts)
        self.plans = Plans(*parts)
        self.catalogue = Descriptions(*parts)
        self.reports = Reports(*parts)
        self.trials = Trials(*parts)
        self.trial_pages = TrialPages(*parts)
        self.leases = Leases(*parts)
        memo = LeaderboardMemo()
        self.leaderboard = Leaderboards(*parts, memo)
        self.outcomes = Outcomes(*parts, self.leaderboard.write_to_beat)
        self.plot_data = PlotData(*parts, memo)
        self.history = CampaignHistory(*parts, memo)
        self.baselines = Baselines(*parts, memo)
        self.usage = Usage(*parts)
        self.workers = Workers(*parts)
        self.allocations = Allocations(*parts)
        self.driver = DriverLeases(*parts)
        self.events = EventLog(*parts)
        self.live = LiveStates(*parts)
        self.access = Access(*parts)
        self.owners = Owners(*parts)
        self.shares = Shares(*parts)
        self.quotas = Quotas(*parts)
        self.sign_ins = SignIns(*parts)
        self.webhooks = Webhooks(*parts)
        self.retention = Pruning(*parts)
        self.statistics = Statistics(*parts)

    def by(self, actor: Actor) -> Self:
        """The same store for an actor: changes are recorded for it, and it sees what it may."""
        return self._copy(self._db.seen_by(None if actor.sees_all else actor.owner), actor)

    def seen_by(self, owner: str) -> Self:
        """The same store, in which queries find what an owner may see as a member, not as admin."""
        return self._copy(self._db.seen_by(owner), self._actor)

    @property
    def eyes_of(self) -> str | None:
        """The owner whose visible campaigns it finds; None: all campaigns."""
        return next(iter(self._db.owners), None)

    def as_member(self) -> Self:
        """The same store in the eyes of the actor's owner as a member: administrators see more."""
        return self.seen_by(self._actor.owner)

    def as_driver(self, fence: int) -> Self:
        """The same store, whose writes raise `DriverLeaseLostError` after a takeover."""
        return self._copy(fenced(self._db, fence), self._actor)

    def _copy(self, database: Database, actor: Actor) -> Self:
        """The same store on another view of the database and for an actor."""
        other = copy.copy(self)
        other._db, other._actor = database, actor
        for name, section in vars(self).items():
            if isinstance(section, StoreSection):
                setattr(other, name, section.bound_to(database, actor))
        return other

    @classmethod
    def open(
        cls, data_dir: DataDir, *, database: str | None = None, clock: Clock | None = None
    ) -> Self:
        """Creates the data directory if needed, upgrades the database, and opens it.

        Without the URL of a PostgreSQL, it is the SQLite database of the data directory.

        Raises:
            DataDirInvalidError: the directory cannot be created or written to.
            DatabaseUrlInvalidError: the URL is not one of PostgreSQL.
            DatabaseUnavailableError: it is not a database, cannot be opened, or refuses the
                connection.
            SchemaNewerError: a version that this one does not know wrote it; nothing was changed.
        """
        data_dir.create()
        if database is not None:
            return cls.connect(postgresql_url(database), clock=clock)
        with data_dir.lock("migration", wait_s=60.0):
            data_dir.create_database()
            return cls.connect(data_dir.database_url, clock=clock)

    @classmethod
    def connect(cls, url: str, *, clock: Clock | None = None) -> Self:
        """Upgrades the database at a URL and opens it.

        Raises:
            SchemaNewerError: a version that this one does not know wrote it; nothing was changed.
            ResultsDbError: those of `Store`.
        """
        migrate.upgrade(url)
        store = cls(url, clock=clock)
        store._db.log_outages()
        return store

    @property
    def is_shared(self) -> bool:
        """Whether processes on other machines may use the same database."""
        return self._db.is_shared

    def change_mark(self) -> ChangeMark | None:
        """Detects changes of the database by any process; None: unavailable on PostgreSQL."""
        return ChangeMark.of(self._db)

    def now(self) -> datetime:
        """The time of the clock for leases and heartbeats."""
        return self._clock()

    def agree_on_time(self) -> None:
        """Sets the clock by the server, if any; DatabaseUnavailableError if it does not answer."""
        if self._database_clock is not None:
            self._database_clock.ask()

    def close(self) -> None:
        self._db.close()
