"""The worker protocol: register, lease, heartbeat, outcome, drain.

Workers only ever call; the service never calls them. A worker that falls silent loses its leases,
and whatever it reports later is still taken while the trial has not ended.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Request

from api.dependencies import BatchesDep, SettingsDep, StoreDep
from api.schemas import TrialId
from api.worker_schemas import (
    HeartbeatBody,
    HeartbeatReply,
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
from results_db.beat_batch import Beat
from results_db.lease_batch import LeaseAsk
from results_db.outcome_batch import OutcomeReport
from results_db.records import TrialBeat

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
    batches: BatchesDep,
    settings: SettingsDep,
    request: Request,
) -> LeasesRead:
    """Lease waiting trials that fit the worker, the oldest first; waits for some up to `wait_s`.

    404 when the session is unknown or has ended: register again. 409 when another worker has
    registered under the same name: end.
    """
    ask = LeaseAsk(
        worker_id=worker_id,
        max_trials=body.max_trials,
        room=None if body.room is None else Room(**body.room.model_dump()),
        longest_s=body.longest_s,
    )
    deadline = asyncio.get_running_loop().time() + body.wait_s
    leases = await batches.leases.ask(ask)
    while (
        not leases
        and asyncio.get_running_loop().time() < deadline
        and not settings.stopping.is_set()
    ):
        await asyncio.sleep(settings.lease_poll_s)
        # A trial leased to a client that has gone would be lost until its lease expires.
        if await request.is_disconnected():
            break
        leases = await batches.leases.ask(ask)
    return LeasesRead(leases=leases)


@router.post("/workers/{worker_id}/heartbeats")
async def post_heartbeat(
    worker_id: WorkerId, body: HeartbeatBody, batches: BatchesDep
) -> HeartbeatReply:
    """Extend the leases of the trials that the worker runs, and say what its nodes do.

    The answer says which trials to stop, and which nodes users want released or set aside.

    404 when the session is unknown or has ended: register again. 409 when another worker has
    registered under the same name: end.
    """
    beat = Beat(
        worker_id=worker_id,
        trials=[TrialBeat(**beat.model_dump()) for beat in body.trials],
        status=_status(body.status),
    )
    answer = await batches.beats.ask(beat)
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
async def post_outcome(
    trial_id: Annotated[TrialId, Path()], body: OutcomePost, batches: BatchesDep
) -> OutcomeReply:
    """Report how an attempt ended. Posting it again changes nothing.

    A late outcome is taken unless the trial has ended; `accepted` says whether it was. 409 when the
    trial never had this attempt.
    """
    report = OutcomeReport(
        trial_id=trial_id,
        attempt=body.attempt,
        outcome=body.outcome,
        nodes_held=body.nodes_held,
        iterations_s=body.iterations_s,
    )
    receipt = await batches.outcomes.ask(report)
    return OutcomeReply(accepted=receipt.accepted, state=receipt.state)
