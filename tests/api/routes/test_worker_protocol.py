"""The worker's own lease client against a real service: the two agree on the protocol."""

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from results_db.database.data_dir import DataDir
from search_spaces.protocol import worker_messages as said
from search_spaces.protocol.outcome import ProbeRequest
from search_spaces.protocol.states import ATTEMPT_PHASES, NODE_STATES
from search_spaces.spec.layout import Layout
from tests.kit.api import CAMPAIGN, INTRODUCTION
from tests.kit.services import ServeProcess
from tests.kit.store import TimelyStore, completed
from workers.errors import RequestRefusedError, TokenRefusedError, WorkerUnknownError
from workers.service.lease_client import EncodedOutcome, LeaseClient
from workers.worker.outcome_posting import Outbox
from workers.worker.outcome_spool import Spool

VERSIONS = {"python": "3.11", "torch": "2.13", "ray": "2.60"}
IDENTITY = said.WorkerCreate(
    **{**INTRODUCTION, "name": "w1", "cluster": "local-cpu"}, versions=VERSIONS
)
LAYOUT = Layout(tp=2, num_microbatches=8)


@pytest.fixture
def client(service: ServeProcess) -> Iterator[LeaseClient]:
    token = (service.data_dir / "token").read_text().strip()
    with LeaseClient(service.service["url"], token) as client:
        yield client


def test_a_trial_goes_through_the_lease_client_and_a_refused_token_is_reported(
    service: ServeProcess, client: LeaseClient
) -> None:
    campaign = service.post("/campaigns", CAMPAIGN)
    store = TimelyStore(DataDir(service.data_dir).database_url)
    registration = client.register(IDENTITY)
    assert registration.heartbeat_interval_s == 2.0
    assert client.lease(registration.worker_id, said.LeaseRequest(wait_s=0)) is None

    trial = store.trials.add(campaign["id"], LAYOUT)
    lease = client.lease(registration.worker_id, said.LeaseRequest(wait_s=5))
    assert lease is not None
    assert (lease.trial_id, lease.campaign, lease.number) == (trial.id, "first", 1)
    assert ProbeRequest.from_mapping(lease.request).layout == LAYOUT

    beat = said.BeatBody(trial_id=lease.trial_id, attempt=lease.attempt, iterations_done=3)
    assert client.heartbeat(registration.worker_id, said.HeartbeatBody(trials=[beat])).stop == ()
    report = said.OutcomeReport(
        trial_id=lease.trial_id,
        attempt=lease.attempt,
        worker_id=registration.worker_id,
        outcome=completed(LAYOUT),
    )
    assert client.post_outcome(EncodedOutcome.of(report))
    assert client.post_outcome(EncodedOutcome.of(report))
    assert store.trials.get(trial.id).state == "COMPLETED"
    assert client.heartbeat(registration.worker_id, said.HeartbeatBody(trials=[beat])).stop == (
        trial.id,
    )

    with pytest.raises(RequestRefusedError, match="no attempt 9"):
        client.post_outcome(EncodedOutcome.of(dataclasses.replace(report, attempt=9)))
    cut = dataclasses.replace(EncodedOutcome.of(report), body=b'{"half')
    with pytest.raises(RequestRefusedError, match=r"answered 4\d\d"):
        client.post_outcome(cut)
    client.unregister(registration.worker_id)
    with pytest.raises(WorkerUnknownError):
        client.heartbeat(registration.worker_id, said.HeartbeatBody())
    store.close()

    with (
        LeaseClient(service.service["url"], "wrong") as client,
        pytest.raises(TokenRefusedError, match="token"),
    ):
        client.register(IDENTITY)


def test_a_measurement_that_the_service_refuses_ends_its_trial_with_the_refusal(
    service: ServeProcess, client: LeaseClient, tmp_path: Path
) -> None:
    campaign = service.post("/campaigns", {**CAMPAIGN, "name": "refused"})
    with closing(TimelyStore(DataDir(service.data_dir).database_url)) as store:
        trial = store.trials.add(campaign["id"], LAYOUT)
    worker_id = client.register(dataclasses.replace(IDENTITY, name="refused")).worker_id
    lease = client.lease(worker_id, said.LeaseRequest(wait_s=5))
    assert lease is not None
    assert lease.trial_id == trial.id
    report = said.OutcomeReport(
        trial_id=trial.id,
        attempt=lease.attempt,
        worker_id=worker_id,
        outcome=completed(LAYOUT, peak_memory_bytes=9),
    )
    with Spool(tmp_path) as spool:
        outbox = Outbox(client, spool)
        outbox.keep(report)
        assert not outbox.post()
    ended = service.get(f"/trials/{trial.id}")
    assert (ended["state"], ended["reason"], ended["attempt"]) == ("FAILED", "implausible", 1)
    refusal = f"the service refused the measurement: the measurement of {LAYOUT.key}: peak_memory"
    assert ended["message"].startswith(refusal)
    assert "is less than a rank of the layout certainly holds" in ended["message"]
    page = service.http.get(f"{service.url}/trials/{trial.id}", follow_redirects=True)
    assert refusal.removeprefix("the") in page.text
    assert [path.name for path in (tmp_path / "rejected").iterdir()]


def test_every_field_of_a_heartbeat_reaches_the_allocation(
    service: ServeProcess, client: LeaseClient
) -> None:
    nodes = [said.NodeBody(name=f"n-{s}", num_devices=4) for s in NODE_STATES]
    registration = client.register(
        dataclasses.replace(
            IDENTITY,
            name="says-all",
            cluster="elsewhere",
            num_nodes=len(nodes),
            nodes=nodes,
            allocation=said.AllocationBody(
                scheduler="slurm", job_id="12", launcher="srun", ends_in_s=60.0, shares_nodes=True
            ),
        )
    )
    ask = said.LeaseRequest(wait_s=0, room=said.RoomBody(nodes=1, devices=2), longest_s=30.0)
    assert client.lease(registration.worker_id, ask) is None
    status = said.StatusBody(
        state="draining",
        ends_in_s=30.0,
        idle_node_s=0.001,  # less than has passed
        nodes=[
            said.NodeStatusBody(
                name=f"n-{state}",
                state=state,
                doing="trial 1 of first",
                reason="why",
                free_devices=1,
                health={"gemm_tflops": [1.0, 2.0], "link_gbytes_per_s": None},
            )
            for state in NODE_STATES
        ],
    )
    beats = [
        said.BeatBody(
            trial_id=999,
            attempt=1,
            iterations_done=0,
            phase=phase,
            held_s=1.0,
            nodes_held=0.5,
            waiting_because="every node is busy",
        )
        for phase in ATTEMPT_PHASES
    ]
    answer = client.heartbeat(
        registration.worker_id, said.HeartbeatBody(trials=beats, status=status)
    )
    assert set(answer.stop) == {999}
    read = service.get(f"/allocations/{registration.worker_id}")
    assert [(node["name"], node["state"]) for node in read["nodes"]] == [
        (f"n-{state}", state) for state in NODE_STATES
    ]
    assert (read["state"], read["cost"]["idle"]) == ("draining", 0.001)

    service.post("/nodes/elsewhere/n-quarantined/release")
    service.post("/nodes/elsewhere/n-idle/quarantine", {"reason": "loud"})
    answer = client.heartbeat(registration.worker_id, said.HeartbeatBody(status=status))
    assert answer.release == ("n-quarantined",)
    assert answer.quarantine == (said.SetAside(node="n-idle", reason="loud"),)
    again = client.register(dataclasses.replace(IDENTITY, name="later", cluster="elsewhere"))
    assert again.quarantined == (said.SetAside(node="n-idle", reason="loud"),)
