"""Requests that may be sent again: a key that its sender chose, and what the first one made."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from results_db.errors import IdempotencyKeyInUseError, IdempotencyKeyReusedError
from results_db.models import Campaign
from results_db.part import StorePart
from results_db.records import CampaignRecord
from results_db.rows import campaign_record
from results_db.service_tables import IdempotencyKey


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestKey:
    """How a sender names a request, and what the request says."""

    key: str
    request_hash: str
    """SHA-256 of it, in hexadecimal."""


class Idempotency(StorePart):
    """The part of the store that knows requests again."""

    def campaign_of_request(self, request: RequestKey) -> CampaignRecord | None:
        """The campaign that this sender's request of that key made; None: it made none so far.

        Raises:
            IdempotencyKeyReusedError: the key was sent with another request.
        """
        with self._db.read() as session:
            found = session.execute(
                select(IdempotencyKey, Campaign)
                .join(Campaign, Campaign.id == IdempotencyKey.campaign_id)
                .where(IdempotencyKey.actor == self._actor.name, IdempotencyKey.key == request.key)
            ).one_or_none()
            if found is None:
                return None
            row, campaign = found
            if row.request_hash != request.request_hash:
                raise IdempotencyKeyReusedError(
                    f"the Idempotency-Key {request.key!r} was sent with another request before; "
                    "choose another key for another campaign"
                )
            return campaign_record(campaign, self._clock())


def keep_key(
    session: Session, actor: str, request: RequestKey, campaign_id: int, now: datetime
) -> None:
    """Writes the key in the transaction that makes the campaign.

    Raises:
        IdempotencyKeyInUseError: the same request is being answered at this moment.
    """
    session.add(
        IdempotencyKey(
            actor=actor,
            key=request.key,
            request_hash=request.request_hash,
            campaign_id=campaign_id,
            created_at=now,
        )
    )
    try:
        session.flush()
    except IntegrityError as error:
        raise IdempotencyKeyInUseError(
            f"a request with the Idempotency-Key {request.key!r} was just answered; send it again "
            "to get its answer"
        ) from error
