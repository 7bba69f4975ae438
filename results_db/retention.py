"""Retention: how long logs, iterations, events, audit entries and idempotency keys are kept.

Campaigns, trials and measurements are kept until a user deletes them. Rows are deleted in small
transactions, so that others do not wait for long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Final, Self

from sqlalchemy import ColumnElement, delete, exists, select

from layout_tuner.documents.numbers import read_number
from layout_tuner.results_db.access.browser_sessions import SignIns
from layout_tuner.results_db.database.database import rows_deleted
from layout_tuner.results_db.database.events import emit
from layout_tuner.results_db.database.locks import lock_campaign
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.errors import RetentionInvalidError
from layout_tuner.results_db.events.event_log import EventLog
from layout_tuner.results_db.models.service_tables import AuditRow, IdempotencyKey, MessageRow
from layout_tuner.results_db.models.tables import Campaign, IterationRow, Trial, TrialLog

ROWS_AT_ONCE: Final = 1000
"""Most rows that one transaction deletes."""

FOR_EVER: Final = "forever"
MAX_DAYS: Final = 36_500.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """The number of days for which rows are kept; None: for ever."""

    logs: float | None = None
    """The last lines that the ranks of a trial printed, from the trial's end."""
    iterations: float | None = None
    """Iterations with their times and losses, from their campaign's end. Medians and quartiles
    stay; the interval of a layout that ran once is lost."""
    events: float | None = 30.0
    """Events, which clients read after a reconnect; the newest of each campaign stays."""
    audit: float | None = None
    """Entries of the audit log."""
    requests: float | None = 7.0
    """Idempotency keys of requests."""
    messages: float | None = 30.0
    """Messages of webhooks, also those that wait."""

    @classmethod
    def read(cls, settings: Iterable[str]) -> Self:
        """Reads settings such as "logs=90" or "events=forever"; the last one of a kind counts.

        Raises RetentionInvalidError for an invalid one.
        """
        return cls(**dict(map(_read_setting, settings)))


KINDS: Final = tuple(field.name for field in fields(Retention))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """The number of deleted rows."""

    logs: int = 0
    iterations: int = 0
    events: int = 0
    audit: int = 0
    requests: int = 0
    messages: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, kind) for kind in KINDS)


class Pruning(StoreSection):
    """The store's method that deletes old rows."""

    def prune(self, retention: Retention) -> Pruned:
        """Deletes rows that are older than their retention; returns the number of each kind.

        Sign-ins that have expired are deleted too, and not counted: nobody can use them.
        """
        now = self._clock()
        kept = {kind: getattr(retention, kind) for kind in KINDS}
        before = {
            kind: now - timedelta(days=days) for kind, days in kept.items() if days is not None
        }
        gone: dict[str, int] = {}
        for kind, (key, is_old) in _OLD_ROWS.items():
            if kind in before:
                gone[kind] = self._delete_all(key, is_old(before[kind]))
        if "iterations" in before:
            gone["iterations"] = self._prune_iterations(before["iterations"])
        if "events" in before:
            gone["events"] = EventLog(self._db, self._clock).prune(before["events"])
        SignIns(self._db, self._clock).prune()
        pruned = Pruned(**gone)
        if pruned.total:
            with self._db.write() as session:
                rows = {kind: number for kind, number in gone.items() if number}
                self._audit(session, "database.prune", "database", "results", **rows)
        return pruned

    def _delete_all(self, key: Any, is_old: ColumnElement[bool]) -> int:
        total = 0
        while True:
            with self._db.write() as session:
                keys = session.scalars(select(key).where(is_old).limit(ROWS_AT_ONCE)).all()
                if not keys:
                    return total
                total += rows_deleted(session, delete(key.class_).where(key.in_(keys), is_old))

    def _prune_iterations(self, before: datetime) -> int:
        """Deletes iterations by campaign, since the pages of each change."""
        with self._db.read() as session:
            of_campaign = Trial.campaign_id == Campaign.id
            has_some = exists().where(of_campaign, IterationRow.trial_id == Trial.id)
            query = select(Campaign.id).where(Campaign.ended_at < before, has_some)
            ids = session.scalars(query.order_by(Campaign.id)).all()
        total = 0
        for campaign_id in ids:
            with self._db.write() as session:
                if session.get(Campaign, campaign_id) is None:
                    continue  # deleted in the meantime
                lock_campaign(session, campaign_id)
                trials = select(Trial.id).where(Trial.campaign_id == campaign_id)
                old = delete(IterationRow).where(IterationRow.trial_id.in_(trials))
                total += rows_deleted(session, old)
                emit(session, campaign_id, "campaign.changed", now=self._clock())
        return total


_OLD_ROWS: Final[Mapping[str, tuple[Any, Callable[[datetime], ColumnElement[bool]]]]] = {
    "logs": (
        TrialLog.trial_id,
        lambda before: TrialLog.trial_id.in_(select(Trial.id).where(Trial.ended_at < before)),
    ),
    "audit": (AuditRow.id, lambda before: AuditRow.at < before),
    "messages": (MessageRow.id, lambda before: MessageRow.at < before),
    "requests": (IdempotencyKey.campaign_id, lambda before: IdempotencyKey.created_at < before),
}
"""By kind, the column by which rows are deleted, and which rows are old."""


def _read_setting(setting: str) -> tuple[str, float | None]:
    kind, _, value = setting.partition("=")
    kind = kind.strip()
    if kind not in KINDS:
        raise RetentionInvalidError(
            f"{setting!r} does not say what is kept: write KIND=DAYS, of {', '.join(KINDS)}"
        )
    if value.strip() == FOR_EVER:
        return kind, None
    try:
        days = read_number(value.strip())
    except ValueError:
        days = -1.0
    if not 0 <= days <= MAX_DAYS:
        raise RetentionInvalidError(
            f"{setting!r} does not say for how long: write a number of days, or {kind}={FOR_EVER}"
        )
    return kind, days
