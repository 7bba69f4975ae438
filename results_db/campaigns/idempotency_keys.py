"""Idempotency keys: a sender repeats a request with the same key, and gets the same campaign."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from layout_tuner.results_db.errors import IdempotencyKeyInUseError, IdempotencyKeyReusedError
from layout_tuner.results_db.models.service_tables import IdempotencyKey
from layout_tuner.results_db.models.tables import Campaign
from layout_tuner.results_db.rows import columns_of


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestKey:
    """The key of a request, and a hash of the request."""

    key: str
    request_hash: str
    """SHA-256 of it, in hexadecimal."""


def campaign_of_key(session: Session, actor: str, request: RequestKey) -> Campaign | None:
    """See `Campaigns.of_request`."""
    found = session.execute(
        select(IdempotencyKey, Campaign)
        .join(Campaign, Campaign.id == IdempotencyKey.campaign_id)
        .where(IdempotencyKey.actor == actor, IdempotencyKey.key == request.key)
    ).one_or_none()
    if found is None:
        return None
    row, campaign = found
    if row.request_hash != request.request_hash:
        raise IdempotencyKeyReusedError(
            f"the Idempotency-Key {request.key!r} was sent with another request before; "
            "choose another key for another campaign"
        )
    return campaign


def keep_key(
    session: Session, actor: str, request: RequestKey, campaign_id: int, now: datetime
) -> None:
    """Writes the key in the transaction that creates the campaign; see `Campaigns.create`."""
    columns = columns_of(request, actor=actor, campaign_id=campaign_id, created_at=now)
    session.add(IdempotencyKey(**columns))
    try:
        session.flush()
    except IntegrityError as error:
        raise IdempotencyKeyInUseError(
            f"a request with the Idempotency-Key {request.key!r} was just answered; send it again "
            "to get its answer"
        ) from error
