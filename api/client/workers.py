"""Calls of the worker protocol: for workers of other makes, and for tests.

The workers of this project have a client of their own, which needs none of the API's code.
"""

from __future__ import annotations

from api.client.call import Call, delete, get, post, reader_of, segment
from api.client.route import route
from api.worker_schemas import (
    HeartbeatBody,
    HeartbeatReply,
    LeaseRequest,
    LeasesRead,
    OutcomePost,
    OutcomeReply,
    WorkerCreate,
    WorkerCreated,
    WorkerPage,
)


class WorkerCalls:
    """What workers ask."""

    @route
    def workers(self) -> Call[WorkerPage]:
        """The workers that were heard of lately."""
        return get("/workers", WorkerPage)

    @route
    def register_worker(self, worker: WorkerCreate) -> Call[WorkerCreated]:
        """Begins a worker's session; an earlier one of the same name ends."""
        return post("/workers", WorkerCreated, worker.model_dump(mode="json"))

    @route
    def drain_worker(self, worker_id: str) -> Call[None]:
        """Ends a worker's session in order: what it still leases goes back."""
        return delete(f"/workers/{segment(worker_id)}")

    @route
    def lease_trials(self, worker_id: str, request: LeaseRequest) -> Call[LeasesRead]:
        """Leases waiting trials that fit, the oldest first; waits for some where there are none."""
        path = f"/workers/{segment(worker_id)}/leases"
        return post(path, LeasesRead, request.model_dump(mode="json"))

    @route
    def post_heartbeat(self, worker_id: str, heartbeat: HeartbeatBody) -> Call[HeartbeatReply]:
        """Extends the leases of the trials that a worker runs, and says what its nodes do."""
        path = f"/workers/{segment(worker_id)}/heartbeats"
        return post(path, HeartbeatReply, heartbeat.model_dump(mode="json"))

    @route
    def post_outcome(self, trial_id: int, outcome: OutcomePost) -> Call[OutcomeReply]:
        """Reports how an attempt ended; again is once."""
        return Call(
            method="POST",
            path=f"/v1/trials/{trial_id}/outcome",
            read=reader_of(OutcomeReply),
            json={
                **outcome.model_dump(mode="json", exclude={"outcome"}),
                "outcome": outcome.outcome.to_mapping(),
            },
            is_repeatable=True,
        )
