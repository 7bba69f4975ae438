"""Sweeps: when leases were last looked through, by whichever of the service's processes."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select, update

from results_db.part import StorePart
from results_db.service_tables import SweepRow


class Sweeps(StorePart):
    """The sweeps' part of the store."""

    def swept_at(self) -> datetime | None:
        """When the last sweep was; None: there was none yet."""
        with self._db.read() as session:
            return session.scalar(select(SweepRow.swept_at))

    def note_sweep(self, now: datetime) -> None:
        """Says that leases have just been looked through, or extended instead."""
        with self._db.write() as session:
            session.execute(update(SweepRow).values(swept_at=now))
