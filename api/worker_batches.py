"""Leases and outcomes of all workers of this process, a batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from api.batcher import Batcher
from api.settings import Settings
from api.step_time_to_beat import step_time_to_beat
from api.worker_schemas import LeaseRead
from results_db.errors import ResultsDbError
from results_db.lease_batch import LeaseAsk
from results_db.outcome_batch import OutcomeReport
from results_db.records import LeaseRecord, OutcomeReceipt
from results_db.store import Store
from search_spaces.campaign import CampaignSpec

MOST_OUTCOMES: Final = 32
"""In one transaction: larger ones gain little, and hold their campaigns for longer."""
MOST_LEASES: Final = 64


@dataclass(frozen=True, slots=True)
class WorkerBatches:
    """What workers wait for."""

    leases: Batcher[LeaseAsk, list[LeaseRead]]
    outcomes: Batcher[OutcomeReport, OutcomeReceipt]

    @classmethod
    def of(cls, store: Store, settings: Settings) -> WorkerBatches:
        """Those of a service."""

        def lease(asks: Sequence[LeaseAsk]) -> Sequence[list[LeaseRead] | ResultsDbError]:
            answers = store.lease_many(asks, lease_s=settings.lease_s)
            return [
                answer
                if isinstance(answer, ResultsDbError)
                else [_lease_read(store, lease) for lease in answer]
                for answer in answers
            ]

        return cls(
            leases=Batcher(lease, most=MOST_LEASES),
            outcomes=Batcher(
                store.post_outcomes, most=MOST_OUTCOMES, gather_s=settings.outcome_gather_s
            ),
        )


def _lease_read(store: Store, lease: LeaseRecord) -> LeaseRead:
    spec = CampaignSpec.from_mapping(lease.spec)
    above_s = step_time_to_beat(store, spec, lease)
    probe = spec.probe_request(lease.layout, stop_above_step_time_s=above_s)
    return LeaseRead(
        trial_id=lease.trial_id,
        attempt=lease.attempt,
        campaign=lease.campaign_name,
        number=lease.number,
        request=probe.to_mapping(),
        lease_expires_at=lease.lease_expires_at,
    )
