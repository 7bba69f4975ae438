"""The documents of the worker protocol: registration, leases, heartbeats, outcomes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from api.documents import texts_of
from api.schemas import Document, Request, TrialId
from results_db.records import TrialState, WorkerRecord
from search_spaces.outcome import Outcome
from search_spaces.reading import shown

Count = Annotated[int, Field(ge=1, le=1 << 20)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class WorkerCreate(Request):
    """A worker introduces itself."""

    name: Name
    """Registering a name again ends its earlier session."""
    host: Name
    cluster: Name
    """Only campaigns of this cluster's name are leased to it."""
    num_nodes: Count
    devices_per_node: Count
    device: Name
    versions: dict[str, str] = Field(default_factory=dict, max_length=50)


class WorkerCreated(Document):
    worker_id: str
    """Of this session; a worker that is told 404 registers again."""
    heartbeat_interval_s: float
    lease_s: float
    """A lease holds for this long after each heartbeat."""


class WorkerPage(Document):
    workers: list[WorkerRecord]
    """Workers heard of lately, the youngest session first."""


class LeaseRequest(Request):
    max_trials: int = Field(default=1, ge=1, le=64)
    wait_s: float = Field(default=5.0, ge=0, le=20)
    """Seconds to wait for work before answering with an empty list."""


class LeaseRead(Document):
    trial_id: int
    attempt: int
    """To be sent back with heartbeats and the outcome."""
    campaign: str
    number: int
    """The trial's number in its campaign."""
    request: dict[str, Any]
    """The probe to run: a `ProbeRequest` document."""
    lease_expires_at: datetime


class LeasesRead(Document):
    leases: list[LeaseRead]


class BeatBody(Request):
    trial_id: TrialId
    attempt: Count
    iterations_done: int = Field(ge=0, le=1 << 31)


class HeartbeatBody(Request):
    trials: list[BeatBody] = Field(default_factory=list, max_length=1000)
    """Every trial that the worker runs; a lease that is not in the list is not extended."""


class HeartbeatReply(Document):
    stop: list[int]
    """Trials to stop: cancelled, ended, or no longer leased by this worker."""


def _read_outcome(document: Any) -> Outcome:
    """Reads an outcome with its own reader, which repairs nothing."""
    for text in texts_of(document):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{shown(text)} holds half of a surrogate pair") from error
    return Outcome.from_mapping(document)


class OutcomePost(Request):
    worker_id: str = Field(max_length=64)
    """Who reports; an outcome is taken from a later session of the worker too."""
    attempt: Count
    outcome: Annotated[Outcome, PlainValidator(_read_outcome, json_schema_input_type=Outcome)]


class OutcomeReply(Document):
    accepted: bool
    """False when it came too late to matter; it need not be sent again either way."""
    state: TrialState
    """The trial's state afterwards."""
