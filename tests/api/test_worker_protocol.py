"""The worker's own lease client against a real service: the two agree on the protocol."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from results_db.data_dir import DataDir
from results_db.store import Store
from search_spaces.layout import Layout
from search_spaces.outcome import ProbeRequest
from tests.api.process import ServeProcess
from tests.api.service import CAMPAIGN
from tests.results_db.factories import completed
from workers.errors import RequestRefusedError, TokenRefusedError, WorkerUnknownError
from workers.lease_client import LeaseClient
from workers.protocol import Beat, LeaseAsk, OutcomeReport, WorkerIdentity

IDENTITY = WorkerIdentity(
    name="w1",
    host="node-1",
    cluster="local-cpu",
    num_nodes=1,
    devices_per_node=4,
    device="CPU core",
    versions={"python": "3.11", "torch": "2.13", "ray": "2.60"},
)
LAYOUT = Layout(tp=2, num_microbatches=8)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    service = ServeProcess(tmp_path_factory.mktemp("service"))
    yield service
    service.end()


@pytest.fixture
def client(service: ServeProcess) -> Iterator[LeaseClient]:
    token = (service.data_dir / "token").read_text().strip()
    with LeaseClient(service.service["url"], token) as client:
        yield client


def test_a_trial_goes_through_the_lease_client(service: ServeProcess, client: LeaseClient) -> None:
    campaign = service.post("/campaigns", CAMPAIGN)
    store = Store(DataDir(service.data_dir).database_url)
    registration = client.register(IDENTITY)
    assert registration.heartbeat_interval_s == 2.0
    assert client.lease(registration.worker_id, LeaseAsk(wait_s=0)) is None

    trial = store.add_trial(campaign["id"], LAYOUT)
    lease = client.lease(registration.worker_id, LeaseAsk(wait_s=5))
    assert lease is not None
    assert (lease.trial_id, lease.campaign, lease.number) == (trial.id, "first", 1)
    assert ProbeRequest.from_mapping(lease.request).layout == LAYOUT

    beat = Beat(trial_id=lease.trial_id, attempt=lease.attempt, iterations_done=3)
    assert client.heartbeat(registration.worker_id, [beat]).stop == ()
    report = OutcomeReport(
        trial_id=lease.trial_id,
        attempt=lease.attempt,
        worker_id=registration.worker_id,
        outcome=completed(LAYOUT).to_mapping(),
    )
    assert client.post_outcome(report)
    assert client.post_outcome(report)
    assert store.trial(trial.id).state == "COMPLETED"
    assert client.heartbeat(registration.worker_id, [beat]).stop == (trial.id,)

    with pytest.raises(RequestRefusedError, match="no attempt 9"):
        client.post_outcome(dataclasses.replace(report, attempt=9))
    client.unregister(registration.worker_id)
    with pytest.raises(WorkerUnknownError):
        client.heartbeat(registration.worker_id, [])
    store.close()


def test_the_lease_client_knows_a_refused_token(service: ServeProcess, tmp_path: Path) -> None:
    with (
        LeaseClient(service.service["url"], "wrong") as client,
        pytest.raises(TokenRefusedError, match="token"),
    ):
        client.register(IDENTITY)
