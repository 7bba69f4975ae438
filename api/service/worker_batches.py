"""Leases, heartbeats and outcomes of all workers of this process, a batch at a time."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from api.batcher import Batcher
from api.settings import Settings
from api.step_time_to_beat import has_something_to_beat, step_time_at
from api.worker_schemas import LeaseRead
from results_db.allocation_records import HeartbeatAnswer
from results_db.beat_batch import Beat
from results_db.errors import DatabaseUnavailableError, ResultsDbError
from results_db.lease_batch import LeaseAsk
from results_db.outcome_batch import OutcomeReport
from results_db.records import LeaseRecord, OutcomeReceipt
from results_db.store import Store
from search_spaces.campaign import CampaignSpec
from search_spaces.errors import SearchSpaceError

MOST_OUTCOMES: Final = 32
"""In one transaction: larger ones gain little, and hold their campaigns for longer."""
MOST_LEASES: Final = 64
MOST_BEATS: Final = 64
MOST_SPECS: Final = 256
"""Campaigns that a process keeps read."""

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerBatches:
    """What workers wait for."""

    leases: Batcher[LeaseAsk, list[LeaseRead]]
    beats: Batcher[Beat, HeartbeatAnswer]
    outcomes: Batcher[OutcomeReport, OutcomeReceipt]

    @classmethod
    def of(cls, store: Store, settings: Settings) -> WorkerBatches:
        """Those of a service."""
        specs = SpecsRead()

        def lease(
            asks: Sequence[LeaseAsk],
        ) -> Sequence[list[LeaseRead] | ResultsDbError | SearchSpaceError]:
            return _readable(store, specs, store.lease_many(asks, lease_s=settings.lease_s))

        return cls(
            leases=Batcher(lease, most=MOST_LEASES),
            beats=Batcher(
                lambda beats: store.take_beats(beats, lease_s=settings.lease_s), most=MOST_BEATS
            ),
            outcomes=Batcher(
                store.post_outcomes, most=MOST_OUTCOMES, gather_s=settings.outcome_gather_s
            ),
        )


Specs = Mapping[int, CampaignSpec | SearchSpaceError]
"""Campaigns by their ids, or why one cannot be read."""


class SpecsRead:
    """The campaigns that leases were of lately: to read one takes as long as to lease its trial."""

    def __init__(self) -> None:
        self._specs: dict[int, tuple[Mapping[str, Any], CampaignSpec]] = {}

    def of_all(self, leases: Sequence[LeaseRecord]) -> Specs:
        """The campaigns of leases."""
        specs: dict[int, CampaignSpec | SearchSpaceError] = {}
        for lease in leases:
            if lease.campaign_id not in specs:
                specs[lease.campaign_id] = self._of(lease)
        return specs

    def _of(self, lease: LeaseRecord) -> CampaignSpec | SearchSpaceError:
        """Read anew where its document is another than it was."""
        known = self._specs.get(lease.campaign_id)
        if known is not None and known[0] == lease.spec:
            return known[1]
        try:
            spec = CampaignSpec.from_mapping(lease.spec)
        except SearchSpaceError as error:
            return error
        if len(self._specs) >= MOST_SPECS:
            self._specs.clear()
        self._specs[lease.campaign_id] = (lease.spec, spec)
        return spec


def _readable(
    store: Store, known: SpecsRead, answers: Sequence[list[LeaseRecord] | ResultsDbError]
) -> list[list[LeaseRead] | ResultsDbError | SearchSpaceError]:
    """The leases as workers read them; campaigns are read, and their best found, once a batch.

    A campaign that cannot be read is the answer of those alone who leased a trial of it.
    """
    leases = [
        lease for answer in answers if not isinstance(answer, ResultsDbError) for lease in answer
    ]
    specs = known.of_all(leases)
    best = _best_known(
        store,
        {
            lease.campaign_id
            for lease in leases
            if isinstance(spec := specs[lease.campaign_id], CampaignSpec)
            and has_something_to_beat(spec, lease)
        },
    )
    return [
        answer if isinstance(answer, ResultsDbError) else _answer(answer, specs, best)
        for answer in answers
    ]


def _answer(
    leases: Sequence[LeaseRecord], specs: Specs, best: Mapping[int, float]
) -> list[LeaseRead] | SearchSpaceError:
    read = []
    for lease in leases:
        spec = specs[lease.campaign_id]
        if isinstance(spec, SearchSpaceError):
            return spec
        read.append(_lease_read(spec, lease, best.get(lease.campaign_id)))
    return read


def _best_known(store: Store, campaign_ids: Collection[int]) -> Mapping[int, float]:
    """What is to be beaten; nothing where the database does not say.

    The trials are leased by now: were the answer lost, each would be a lost attempt. Without it a probe
    is not stopped early.
    """
    try:
        return store.values_to_beat(campaign_ids)
    except DatabaseUnavailableError as error:
        _log.warning("leases are handed out without what is to be beaten: %s", error)
        return {}


def _lease_read(spec: CampaignSpec, lease: LeaseRecord, best: float | None) -> LeaseRead:
    above_s = None
    if best is not None and has_something_to_beat(spec, lease):
        above_s = step_time_at(best, spec, lease)
    probe = spec.probe_request(lease.layout, stop_above_step_time_s=above_s)
    return LeaseRead(
        trial_id=lease.trial_id,
        attempt=lease.attempt,
        campaign=lease.campaign_name,
        number=lease.number,
        request=probe.to_mapping(),
        lease_expires_at=lease.lease_expires_at,
    )
