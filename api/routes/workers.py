"""The worker protocol: register, lease, heartbeat, outcome, drain.

Workers call the service; the service never calls them. A worker without heartbeats loses its
leases; its later reports are still accepted while the trial has not ended.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Annotated, Final

from fastapi import Path, Request

from layout_tuner.api.dependencies import (
    ActorDep,
    BatchesDep,
    ChangesDep,
    OwnersDep,
    SettingsDep,
    StoreDep,
)
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.http.request_bodies import BodyRoute
from layout_tuner.api.schemas.allocations import WorkerPage
from layout_tuner.protocol.worker_messages import (
    HeartbeatBody,
    HeartbeatReply,
    LeaseRequest,
    LeasesRead,
    OutcomePost,
    OutcomeReply,
    OutcomeReport,
    TrialId,
    WorkerCreate,
    WorkerCreated,
)
from layout_tuner.results_db.allocations.leases import HEARTBEAT_INTERVAL_S, LEASE_S, LeaseAsk
from layout_tuner.results_db.allocations.workers import Beat
from layout_tuner.results_db.database.change_mark import OPEN_SESSION, WAITING_TRIAL
from layout_tuner.results_db.errors import AttemptNotFoundError

router = LazyRouter(route_class=BodyRoute, prefix="/v1", tags=["workers"])

SIGN_OF_LIFE_S: Final = 5.0
"""Seconds after which a waiting request asks again although nothing has changed: it is recorded as
a sign of life of its worker."""

WorkerId = Annotated[str, Path(max_length=64)]


@router.post("/workers", status_code=HTTPStatus.CREATED)
def register_worker(body: WorkerCreate, store: StoreDep) -> WorkerCreated:
    """Begin a worker's session.

    An earlier session with the same name ends, and its running trials become PENDING at once. 403
    if that session is live and another token registered it.
    """
    worker = store.workers.register(body)
    return WorkerCreated(
        worker_id=worker.id,
        heartbeat_interval_s=HEARTBEAT_INTERVAL_S,
        lease_s=LEASE_S,
        quarantined=tuple(store.workers.quarantined_nodes(worker.id)),
    )


@router.get("/workers")
def list_workers(store: StoreDep) -> WorkerPage:
    """List the workers with a recent heartbeat."""
    return WorkerPage(workers=store.workers.find())


@router.delete("/workers/{worker_id}", status_code=HTTPStatus.NO_CONTENT)
def drain_worker(worker_id: WorkerId, store: StoreDep) -> None:
    """End a worker's session: its leases are returned, and no attempt counts as lost."""
    store.workers.drain(worker_id)


@router.post("/workers/{worker_id}/leases")
async def lease_trials(
    worker_id: WorkerId,
    body: LeaseRequest,
    batches: BatchesDep,
    changes: ChangesDep,
    settings: SettingsDep,
    request: Request,
) -> LeasesRead:
    """Lease waiting trials that fit the worker, the oldest first; waits up to `wait_s` for one.

    404 if the session is unknown or has ended: the worker must register again. 409 if another
    worker has registered with the same name: the worker must end.
    """
    ask = LeaseAsk(worker_id=worker_id, request=body)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + body.wait_s
    seen, asked_s = changes.number, loop.time()
    leases = await batches.leases.ask(ask)
    while not leases and (left_s := deadline - loop.time()) > 0 and not settings.stopping.is_set():
        await changes.after(
            seen, within_s=min(left_s, SIGN_OF_LIFE_S), pause_s=settings.lease_poll_s
        )
        # A trial leased to a disconnected client would be blocked until its lease expires.
        if await request.is_disconnected():
            break
        seen = changes.number
        is_as_before = changes.finds(OPEN_SESSION, worker_id) and not changes.finds(WAITING_TRIAL)
        if is_as_before and loop.time() - asked_s < SIGN_OF_LIFE_S:
            continue
        if await request.app.state.book.find(request.state.credential.token_hash) is None:
            break  # the token was revoked, or has expired, while the request waited
        asked_s = loop.time()
        leases = await batches.leases.ask(ask)
    return LeasesRead(leases=leases)


@router.post("/workers/{worker_id}/heartbeats")
async def post_heartbeat(
    worker_id: WorkerId, body: HeartbeatBody, batches: BatchesDep
) -> HeartbeatReply:
    """Extend the leases of the worker's trials, and report the status of its nodes.

    The answer lists trials to stop, and nodes to release or to put into quarantine.

    404 if the session is unknown or has ended: the worker must register again. 409 if another
    worker has registered with the same name: the worker must end.
    """
    return await batches.beats.ask(Beat(worker_id=worker_id, heartbeat=body))


@router.post("/trials/{trial_id}/outcome")
async def post_outcome(
    trial_id: Annotated[TrialId, Path()],
    body: OutcomePost,
    batches: BatchesDep,
    owners: OwnersDep,
    actor: ActorDep,
) -> OutcomeReply:
    """Report the outcome of an attempt. Repeating it changes nothing.

    A late outcome is accepted unless the trial has ended; `accepted` states this, and `reason` why
    an outcome was dropped. 409 if the trial never had this attempt, if another worker leased it, or
    if another token registered the worker; 422 if a figure contradicts another, the layout, the
    device or the service's clock.
    """
    if actor.role != "admin":
        why = await owners.why_not("worker", {"worker_id": body.worker_id}, actor)
        if why is not None:
            raise AttemptNotFoundError(why)
    return await batches.outcomes.ask(OutcomeReport.of(trial_id, body))
