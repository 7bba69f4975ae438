"""What workers are answered when a part of it cannot be had."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

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
from tests.api.local_api import CAMPAIGN
from tests.postgres import upgraded
from tests.results_db.factories import make_campaign, make_worker

LAYOUT = Layout(num_microbatches=8)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store.open(upgraded(tmp_path / "data"))) as store:
        yield store


def submit(store: Store) -> int:
    """A campaign on the cluster of the factories' workers."""
    spec = CampaignSpec.from_mapping(CAMPAIGN)
    return store.create_campaign(spec.to_mapping(), num_legal_layouts=4).id


def lease_for_each(store: Store, *workers: WorkerRecord) -> list[list[LeaseRead] | BaseException]:
    """What workers are answered that ask at the same time, for a trial each."""

    async def ask() -> list[list[LeaseRead] | BaseException]:
        batches = WorkerBatches.of(store)
        asks = [LeaseAsk(worker_id=worker.id, request=LeaseRequest()) for worker in workers]
        return await asyncio.gather(*map(batches.leases.ask, asks), return_exceptions=True)

    return asyncio.run(ask())


def test_who_has_leased_a_trial_hears_of_it_though_what_is_to_be_beaten_cannot_be_read(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trial = store.add_trial(submit(store), LAYOUT)

    def gone(_campaign_ids: object) -> None:
        raise DatabaseUnavailableError("the server has gone")

    monkeypatch.setattr(store, "values_to_beat", gone)
    with caplog.at_level(logging.WARNING):
        (leases,) = lease_for_each(store, make_worker(store))
    assert isinstance(leases, list)
    assert [(lease.trial_id, lease.attempt) for lease in leases] == [(trial.id, 1)]
    assert "the server has gone" in caplog.text


def test_a_campaign_that_cannot_be_read_is_no_matter_to_who_leases_another_beside_it(
    store: Store,
) -> None:
    broken = store.add_trial(make_campaign(store, "no-space"), LAYOUT)
    sound = store.add_trial(submit(store), LAYOUT)
    answers = lease_for_each(store, make_worker(store, "w1"), make_worker(store, "w2"))
    assert store.trial(broken.id).state == "RUNNING"
    (refused,) = (answer for answer in answers if isinstance(answer, SearchSpaceError))
    assert "space" in str(refused)
    (leases,) = (answer for answer in answers if isinstance(answer, list))
    assert [lease.trial_id for lease in leases] == [sound.id]
