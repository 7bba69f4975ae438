"""The audit log: who changed what, in the transaction of the change."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Unpack

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.models.service_tables import AuditRow
from layout_tuner.results_db.service_records import AuditChoice


def write_entry(
    session: Session,
    actor: Actor,
    at: datetime,
    action: str,
    target_kind: str,
    target: str | int,
    details: dict[str, Any],
) -> None:
    """Writes an entry; every change of the store is written here."""
    session.execute(
        insert(AuditRow).values(
            at=at,
            actor=actor.name,
            role=actor.role,
            token_id=actor.token_id,
            address=actor.address,
            action=action,
            target_kind=target_kind,
            target=str(target),
            details=details,
        )
    )


def entries(
    session: Session, *, before_id: int | None, limit: int, **chosen: Unpack[AuditChoice]
) -> Sequence[AuditRow]:
    """Entries of the chosen kinds, the newest first.

    Those at `since` are included, and those at `until` are not.
    """
    query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit)
    given = {name: value for name, value in chosen.items() if value is not None}
    if (since := given.pop("since", None)) is not None:
        query = query.where(AuditRow.at >= since)
    if (until := given.pop("until", None)) is not None:
        query = query.where(AuditRow.at < until)
    query = query.where(*(getattr(AuditRow, name) == value for name, value in given.items()))
    if before_id is not None:
        query = query.where(AuditRow.id < before_id)
    return session.scalars(query).all()
