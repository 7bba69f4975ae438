"""What workers are answered when a part of it cannot be had."""

from __future__ import annotations

import asyncio
import logging

import pytest

from api.leases.worker_batches import WorkerBatches
from results_db.allocations.leases import LeaseAsk
from results_db.errors import DatabaseUnavailableError
from results_db.records import WorkerRecord
from results_db.store import Store
from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.errors import SearchSpaceError
from search_spaces.protocol.worker_messages import LeaseRead, LeaseRequest
from search_spaces.spec.layout import Layout
from tests.kit.api import CAMPAIGN
from tests.kit.store import make_campaign, make_worker

LAYOUT = Layout(num_microbatches=8)


def submit(store: Store) -> int:
    """A campaign on the cluster of the factories' workers."""
    spec = CampaignSpec.from_mapping(CAMPAIGN)
    return store.campaigns.create(spec.to_mapping(), num_legal_layouts=4).id


def lease_for_each(store: Store, *workers: WorkerRecord) -> list[list[LeaseRead] | BaseException]:
    """What workers are answered that ask at the same time, for a trial each."""

    async def ask() -> list[list[LeaseRead] | BaseException]:
        batches = WorkerBatches.of(store)
        asks = [LeaseAsk(worker_id=worker.id, request=LeaseRequest()) for worker in workers]
        return await asyncio.gather(*map(batches.leases.ask, asks), return_exceptions=True)

    return asyncio.run(ask())


def test_a_lease_is_answered_although_the_step_time_to_beat_is_unknown(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trial = store.trials.add(submit(store), LAYOUT)

    def gone(_campaign_ids: object) -> None:
        raise DatabaseUnavailableError("the server has gone")

    monkeypatch.setattr(store.leaderboard, "values_to_beat", gone)
    with caplog.at_level(logging.WARNING):
        (leases,) = lease_for_each(store, make_worker(store))
    assert isinstance(leases, list)
    assert [(lease.trial_id, lease.attempt) for lease in leases] == [(trial.id, 1)]
    assert "the server has gone" in caplog.text


def test_an_unreadable_campaign_does_not_affect_leases_of_others(store: Store) -> None:
    broken = store.trials.add(make_campaign(store, "no-space"), LAYOUT)
    sound = store.trials.add(submit(store), LAYOUT)
    answers = lease_for_each(store, make_worker(store, "w1"), make_worker(store, "w2"))
    assert store.trials.get(broken.id).state == "RUNNING"
    (refused,) = (answer for answer in answers if isinstance(answer, SearchSpaceError))
    assert "space" in str(refused)
    (leases,) = (answer for answer in answers if isinstance(answer, list))
    assert [lease.trial_id for lease in leases] == [sound.id]
