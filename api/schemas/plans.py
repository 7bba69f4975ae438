"""Documents of plans that the driver makes."""

from __future__ import annotations

from datetime import datetime
from typing import Self

from layout_tuner.api.schemas.campaigns_and_trials import Document
from layout_tuner.predictions.belief.plan import Plan
from layout_tuner.results_db.records import PlanRecord, PlanState


class PlanRead(Document):
    """A plan that the driver makes."""

    id: int
    state: PlanState
    """WAITING for the driver, DONE, or FAILED."""
    created_at: datetime
    ended_at: datetime | None
    problem: str
    """Why it could not be made; empty unless FAILED."""
    plan: Plan | None
    """Null unless DONE."""

    @classmethod
    def of_record(cls, record: PlanRecord) -> Self:
        return cls.of(record, plan=record.answer or None)
