"""The audit: who changed what, and when. Rows are written with the changes (`StorePart._audit`)."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select

from results_db.access_records import AuditRecord
from results_db.part import StorePart
from results_db.service_tables import AuditRow


class Audit(StorePart):
    """The audit's part of the store."""

    def audit(
        self,
        *,
        actor: str | None = None,
        action: str | None = None,
        target_kind: str | None = None,
        target: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        before_id: int | None = None,
        limit: int = 100,
    ) -> list[AuditRecord]:
        """Changes, the youngest first.

        Args:
            actor: only those of this name.
            action: only this one, as "campaign.pause".
            target_kind: only those of such things, as "campaign".
            target: only those of the thing that is called so.
            since: only those at or after this time.
            until: only those before this time.
            before_id: only those older than this entry.
            limit: at most so many.
        """
        query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit)
        for column, value in (
            (AuditRow.actor, actor),
            (AuditRow.action, action),
            (AuditRow.target_kind, target_kind),
            (AuditRow.target, target),
        ):
            if value is not None:
                query = query.where(column == value)
        if since is not None:
            query = query.where(AuditRow.at >= since)
        if until is not None:
            query = query.where(AuditRow.at < until)
        if before_id is not None:
            query = query.where(AuditRow.id < before_id)
        with self._db.read() as session:
            return [_record(row) for row in session.scalars(query)]


def _record(row: AuditRow) -> AuditRecord:
    return AuditRecord(
        id=row.id,
        at=row.at,
        actor=row.actor,
        role=row.role,
        token_id=row.token_id,
        address=row.address,
        action=row.action,
        target_kind=row.target_kind,
        target=row.target,
        details=dict(row.details),
    )
