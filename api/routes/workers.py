"""The worker protocol: register, lease, heartbeat, outcome, drain.

Workers only ever call; the service never calls them. A worker that falls silent loses its leases,
and whatever it reports later is still taken while the trial has not ended.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.concurrency import run_in_threadpool

from api.dependencies import SettingsDep, StoreDep
from api.schemas import TrialId
from api.settings import Settings
from api.step_time_to_beat import step_time_to_beat
from api.worker_schemas import (
    HeartbeatBody,
    HeartbeatReply,
    LeaseRead,
    LeaseRequest,
    LeasesRead,
    OutcomePost,
    OutcomeReply,
    StatusBody,
    WorkerCreate,
    WorkerCreated,
    WorkerPage,
)
from results_db.allocation_records import (
    AllocationFacts,
    AllocationStatus,
    NodeFacts,
    NodeStatus,
    Room,
)
from results_db.records import LeaseRecord, TrialBeat
from results_db.store import Store
from search_spaces.campaign import CampaignSpec

router = APIRouter(prefix="/v1", tags=["workers"])

WorkerId = Annotated[str, Path(max_length=64)]


@router.post("/workers", status_code=HTTPStatus.CREATED)
def register_worker(body: WorkerCreate, store: StoreDep, settings: SettingsDep) -> WorkerCreated:
    """Begin a worker's session.

    An earlier session of the same name ends: its running trials go back to PENDING at once.
    """
    worker = store.register_worker(
        name=body.name,
        host=body.host,
        cluster=body.cluster,
        num_nodes=body.num_nodes,
        devices_per_node=body.devices_per_node,
        device=body.device,
        versions=body.versions,
        allocation=AllocationFacts(**body.allocation.model_dump()),
        nodes=[NodeFacts(**node.model_dump()) for node in body.nodes],
    )
    return WorkerCreated(
        worker_id=worker.id,
        heartbeat_interval_s=settings.heartbeat_interval_s,
        lease_s=settings.lease_s,
        quarantined=store.quarantined_nodes(worker.cluster),
    )


@router.get("/workers")
def list_workers(store: StoreDep) -> WorkerPage:
    """List the workers that were heard of lately."""
    return WorkerPage(workers=store.workers())


@router.delete("/workers/{worker_id}", status_code=HTTPStatus.NO_CONTENT)
def drain_worker(worker_id: WorkerId, store: StoreDep) -> None:
    """End a worker's session in order: what it still leases goes back, no attempt counts as lost."""
    store.drain_worker(worker_id)


@router.post("/workers/{worker_id}/leases")
async def lease_trials(
    worker_id: WorkerId,
    body: LeaseRequest,
    store: StoreDep,
    settings: SettingsDep,
    request: Request,
) -> LeasesRead:
    """Lease waiting trials that fit the worker, the oldest first; waits for some up to `wait_s`.

    404 when the session is unknown or has ended: register again. 409 when another worker has
    registered under the same name: end.
    """
    deadline = asyncio.get_running_loop().time() + body.wait_s
    leases = await _try_lease(store, settings, worker_id, body)
    while (
        not leases
        and asyncio.get_running_loop().time() < deadline
        and not settings.stopping.is_set()
    ):
        await asyncio.sleep(settings.lease_poll_s)
        # A trial leased to a client that has gone would be lost until its lease expires.
        if await request.is_disconnected():
            break
        leases = await _try_lease(store, settings, worker_id, body)
    return LeasesRead(leases=leases)


async def _try_lease(
    store: Store, settings: Settings, worker_id: str, body: LeaseRequest
) -> list[LeaseRead]:
    leases = await run_in_threadpool(
        store.lease,
        worker_id,
        body.max_trials,
        room=None if body.room is None else Room(**body.room.model_dump()),
        longest_s=body.longest_s,
        lease_s=settings.lease_s,
    )
    return [await run_in_threadpool(_lease_read, store, lease) for lease in leases]


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


@router.post("/workers/{worker_id}/heartbeats")
def post_heartbeat(
    worker_id: WorkerId, body: HeartbeatBody, store: StoreDep, settings: SettingsDep
) -> HeartbeatReply:
    """Extend the leases of the trials that the worker runs, and say what its nodes do.

    The answer says which trials to stop, and which nodes users want released or set aside.

    404 when the session is unknown or has ended: register again. 409 when another worker has
    registered under the same name: end.
    """
    beats = [TrialBeat(**beat.model_dump()) for beat in body.trials]
    answer = store.heartbeat(
        worker_id, beats, status=_status(body.status), lease_s=settings.lease_s
    )
    return HeartbeatReply(
        stop=list(answer.stop), release=list(answer.release), quarantine=list(answer.quarantine)
    )


def _status(body: StatusBody | None) -> AllocationStatus | None:
    if body is None:
        return None
    return AllocationStatus(
        state=body.state,
        ends_in_s=body.ends_in_s,
        idle_node_s=body.idle_node_s,
        nodes=tuple(NodeStatus(**node.model_dump()) for node in body.nodes),
    )


@router.post("/trials/{trial_id}/outcome")
def post_outcome(
    trial_id: Annotated[TrialId, Path()], body: OutcomePost, store: StoreDep
) -> OutcomeReply:
    """Report how an attempt ended. Posting it again changes nothing.

    A late outcome is taken unless the trial has ended; `accepted` says whether it was. 409 when the
    trial never had this attempt.
    """
    receipt = store.post_outcome(
        trial_id,
        body.attempt,
        body.outcome,
        nodes_held=body.nodes_held,
        iterations_s=body.iterations_s,
    )
    return OutcomeReply(accepted=receipt.accepted, state=receipt.state)
