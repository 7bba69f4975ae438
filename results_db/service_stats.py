"""Statistics of the service for monitoring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, func, select, text
from sqlalchemy.orm import Session

from layout_tuner.results_db.allocations.workers import campaigns_of_kind, workers_of_kind
from layout_tuner.results_db.campaigns.driver_lease import DriverLeases
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.migrations import migrate
from layout_tuner.results_db.models.service_tables import (
    EventRow,
    NodeQuarantine,
    PastUse,
    WorkerRow,
    is_there,
)
from layout_tuner.results_db.models.tables import Campaign, Trial
from layout_tuner.results_db.records import CAMPAIGN_STATES
from layout_tuner.results_db.rows import COST_COLUMNS
from layout_tuner.results_db.service_records import USAGE_PARTS
from layout_tuner.trainers.simulator import SIMULATOR_PREFIX


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceStats:
    """The state of the database in numbers."""

    campaigns: Mapping[str, int]
    """By state, including zeros."""
    open_trials: Mapping[str, int]
    """PENDING and RUNNING; ended trials are counted when they end."""
    workers: Mapping[str, int]
    """Live workers that measure, by cluster."""
    quarantined_nodes: int
    node_seconds: Mapping[str, float]
    """The cost of all measured campaigns, by part."""
    owner_node_seconds: Counter[str]
    """The same by owner, with deleted campaigns."""
    unnumbered_events: int
    """Committed events without a number, which clients do not see yet."""
    num_bytes: int
    driver_seen_at: datetime | None


_REVISION: Final = text("SELECT version_num FROM alembic_version")

_QUARANTINED: Final = (
    select(NodeQuarantine.cluster, NodeQuarantine.node)
    .where(NodeQuarantine.released_at.is_(None))
    .where(NodeQuarantine.scope.not_in(select(WorkerRow.id)))
    .distinct()
)
"""Nodes in quarantine, without simulated ones."""


class Statistics(StoreSection):
    """The store's methods for monitoring."""

    def service_stats(self) -> ServiceStats:
        """Statistics that take milliseconds to collect, however large the database is."""
        now = self._clock()
        driver_seen_at = DriverLeases(self._db, self._clock).lease().seen_at
        with self._db.read() as session:
            return ServiceStats(
                campaigns=dict.fromkeys(CAMPAIGN_STATES, 0) | _counts(session, Campaign.state),
                open_trials={
                    state: _count(session, Trial.state == state) for state in ("PENDING", "RUNNING")
                },
                workers=_counts(
                    session, WorkerRow.cluster, is_there(now), workers_of_kind(is_simulated=False)
                ),
                quarantined_nodes=len(session.execute(_QUARANTINED).all()),
                node_seconds=_costs(session),
                owner_node_seconds=_costs_of_owners(session),
                unnumbered_events=_count(session, EventRow.seq.is_(None)),
                num_bytes=_size(session),
                driver_seen_at=driver_seen_at,
            )

    def why_not_usable(self) -> list[str]:
        """Why the database cannot be used; empty: it can. DatabaseUnavailableError: no answer."""
        with self._db.read() as session:
            reasons = []
            found, wanted = session.scalar(_REVISION), migrate.head()
            if found != wanted:
                reasons.append(f"its schema is {found}, and this version's is {wanted}")
            if self._db.is_shared and session.scalar(select(func.pg_is_in_recovery())):
                reasons.append("it is a standby, which takes no writes")
            return reasons


def _counts(session: Session, column: Any, *conditions: ColumnElement[bool]) -> dict[str, int]:
    query = select(column, func.count()).where(*conditions).group_by(column)
    return {row[0]: row[1] for row in session.execute(query)}


def _count(session: Session, condition: ColumnElement[bool]) -> int:
    return session.scalar(select(func.count()).where(condition)) or 0


def _costs(session: Session) -> dict[str, float]:
    columns = (*COST_COLUMNS.values(), "allocation_idle_node_seconds")
    query = select(*(func.sum(getattr(Campaign, name)) for name in columns))
    row = session.execute(query.where(campaigns_of_kind(is_simulated=False))).one()
    *sums, allocations_idle = (float(value or 0.0) for value in row)
    costs = dict(zip(COST_COLUMNS, sums, strict=True))
    return costs | {"idle": costs["idle"] + allocations_idle}


def _costs_of_owners(session: Session) -> Counter[str]:
    cost = func.sum(sum(getattr(PastUse, part) for part in USAGE_PARTS))
    is_measured = ~PastUse.trainer.startswith(SIMULATOR_PREFIX, autoescape=True)
    query = select(PastUse.owner, cost).where(is_measured).group_by(PastUse.owner)
    return Counter(dict(session.execute(query).all()))


def _size(session: Session) -> int:
    if session.get_bind().dialect.name == "sqlite":
        query = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
    else:
        query = "SELECT pg_database_size(current_database())"
    return int(session.scalar(text(query)) or 0)
