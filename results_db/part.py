"""What every part of the store stands on: a database, a clock, and in whose name it acts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Self

from sqlalchemy import insert
from sqlalchemy.orm import Session

from results_db.actor import SYSTEM, Actor
from results_db.service_tables import AuditRow
from results_db.session import Database

Clock = Callable[[], datetime]
"""Tells the time, aware; tests turn it forward."""


def utc_now() -> datetime:
    """The time, in UTC."""
    return datetime.now(UTC)


class StorePart:
    """One meaning of the store: campaigns, trials, workers, leases, ..."""

    def __init__(self, database: Database, clock: Clock, actor: Actor = SYSTEM) -> None:
        self._db = database
        self._clock = clock
        self._actor = actor

    def by(self, actor: Actor) -> Self:
        """The same store, acting in somebody's name."""
        other = copy.copy(self)
        other._actor = actor
        return other

    def _audit(
        self, session: Session, action: str, target_kind: str, target: str | int, **details: Any
    ) -> None:
        """Notes who makes a change, in the transaction that makes it."""
        session.execute(
            insert(AuditRow).values(
                at=self._clock(),
                actor=self._actor.name,
                role=self._actor.role,
                token_id=self._actor.token_id,
                address=self._actor.address,
                action=action,
                target_kind=target_kind,
                target=str(target),
                details=details,
            )
        )
