"""The documents of the worker protocol: registration, leases, heartbeats, outcomes."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, Field, PlainValidator, field_validator

from api.documents import texts_of
from api.schemas import Document, Request, TrialId
from results_db.allocation_records import (
    AllocationState,
    AttemptPhase,
    NodeState,
    Scheduler,
    SetAside,
)
from results_db.records import TrialState, WorkerRecord
from search_spaces.duration import MAX_DURATION_S
from search_spaces.errors import SearchSpaceError
from search_spaces.outcome import Outcome
from search_spaces.reading import shown

Count = Annotated[int, Field(ge=1, le=1 << 20)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


Seconds = Annotated[float, Field(ge=0, le=MAX_DURATION_S, allow_inf_nan=False)]
NodeName = Annotated[str, Field(min_length=1, max_length=255)]
Words = Annotated[str, Field(max_length=2000)]
NodesHeld = Annotated[float, Field(ge=0, le=1 << 20, allow_inf_nan=False)]
"""Nodes, a part of one included."""

MAX_NODES: Final = 10_000
"""More nodes than the largest machines have."""

MAX_HEALTH_LENGTH: Final = 4000
"""Longest that a node's health may be, written as JSON."""


def _read_health(health: dict[str, Any]) -> dict[str, Any]:
    """Refuses what no database and no JSON document can hold."""
    for text in texts_of(health):
        _refuse_half_pairs(text)
    length = len(json.dumps(health, allow_nan=False))
    if length > MAX_HEALTH_LENGTH:
        raise ValueError(f"{length} characters of JSON are more than {MAX_HEALTH_LENGTH}")
    return health


def _refuse_half_pairs(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{shown(text)} holds half of a surrogate pair") from error


class AllocationBody(Request):
    """What a worker knows of its allocation."""

    scheduler: Scheduler = "none"
    job_id: str | None = Field(default=None, min_length=1, max_length=64)
    """The scheduler's name for it."""
    launcher: str = Field(default="", max_length=40)
    """What starts its ranks."""
    ends_in_s: Seconds | None = None
    """Seconds left; null: not known, or it does not end."""
    shares_nodes: bool = False
    """Whether several probes may run on one node."""


class NodeBody(Request):
    """A node of an allocation."""

    name: NodeName
    num_devices: Count


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
    allocation: AllocationBody = AllocationBody()
    nodes: list[NodeBody] = Field(default_factory=list, max_length=MAX_NODES)
    """Its nodes by name; may be left out."""

    @field_validator("nodes")
    @classmethod
    def _names_are_different(cls, nodes: list[NodeBody]) -> list[NodeBody]:
        return _refuse_doubles(nodes)


class WorkerCreated(Document):
    worker_id: str
    """Of this session; a worker that is told 404 registers again."""
    heartbeat_interval_s: float
    lease_s: float
    """A lease holds for this long after each heartbeat."""
    quarantined: list[SetAside] = Field(default_factory=list)
    """Nodes of its cluster that no probe shall run on."""


class WorkerPage(Document):
    workers: list[WorkerRecord]
    """Workers heard of lately, the youngest session first."""


class RoomBody(Request):
    """What a trial may need of an allocation that is partly in use."""

    nodes: int = Field(ge=0, le=1 << 20)
    """Whole nodes: a layout over several nodes needs no more, and one on a part of a node fits on any."""
    devices: int = Field(ge=0, le=1 << 20)
    """Devices of one node that is in use partly."""


class LeaseRequest(Request):
    max_trials: int = Field(default=1, ge=1, le=64)
    wait_s: float = Field(default=5.0, ge=0, le=20)
    """Seconds to wait for work before answering with an empty list."""
    room: RoomBody | None = None
    """Only trials that fit there; null: any that fits the allocation."""
    longest_s: Seconds | None = None
    """Only trials whose probes take no longer, by their deadlines; null: any."""


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
    phase: AttemptPhase = "iterating"
    """waiting: leased, and no devices yet."""
    held_s: Seconds | None = None
    """Seconds that it has held its nodes, 0 while it waits; null: since it was leased."""
    nodes_held: NodesHeld | None = None
    """Nodes that it holds, a part of one included; null: those of its layout."""
    waiting_because: Words = ""
    """While it waits: for what."""


class NodeStatusBody(Request):
    """What a node does."""

    name: NodeName
    state: NodeState
    doing: Words = ""
    """In words: which probe runs there."""
    reason: Words = ""
    """Why it is lost, or in quarantine."""
    free_devices: int | None = Field(default=None, ge=0, le=1 << 20)
    health: Annotated[dict[str, Any], AfterValidator(_read_health)] | None = None
    """What its last check found."""


class StatusBody(Request):
    """What a worker says of its allocation."""

    state: AllocationState = "working"
    ends_in_s: Seconds | None = None
    """Seconds left; null: as it said before."""
    idle_node_s: float = Field(default=0.0, ge=0, le=1e15, allow_inf_nan=False)
    """Node-seconds that it held for no probe since it registered: the sum, so that a heartbeat which is lost
    or repeated counts once. Begins at 0 with every registration."""
    nodes: list[NodeStatusBody] = Field(default_factory=list, max_length=MAX_NODES)
    """All of its nodes; empty: as it said before."""

    @field_validator("nodes")
    @classmethod
    def _names_are_different(cls, nodes: list[NodeStatusBody]) -> list[NodeStatusBody]:
        return _refuse_doubles(nodes)


class HeartbeatBody(Request):
    trials: list[BeatBody] = Field(default_factory=list, max_length=1000)
    """Every trial that the worker runs; a lease that is not in the list is not extended."""
    status: StatusBody | None = None
    """Of its allocation; null: as it said before."""


class HeartbeatReply(Document):
    stop: list[int]
    """Trials to stop: cancelled, ended, or no longer leased by this worker."""
    release: list[str] = Field(default_factory=list)
    """Nodes to take out of quarantine; told until the status shows it."""
    quarantine: list[SetAside] = Field(default_factory=list)
    """Nodes to set aside; told until the status shows it."""


_Named = TypeVar("_Named", NodeBody, NodeStatusBody)


def _refuse_doubles(nodes: list[_Named]) -> list[_Named]:
    seen: set[str] = set()
    for node in nodes:
        if node.name in seen:
            raise ValueError(
                f"node {shown(node.name)} is there twice; every node has a name of its own"
            )
        seen.add(node.name)
    return nodes


def _read_outcome(document: Any) -> Outcome:
    """Reads an outcome with its own reader, which repairs nothing."""
    try:
        return Outcome.from_mapping(document)
    except SearchSpaceError:
        # Its words may quote what no answer can hold; what is taken has been looked at, text by text.
        for text in texts_of(document):
            _refuse_half_pairs(text)
        raise


class OutcomePost(Request):
    worker_id: str = Field(max_length=64)
    """Who reports; an outcome is taken from a later session of the worker too."""
    attempt: Count
    outcome: Annotated[Outcome, PlainValidator(_read_outcome, json_schema_input_type=Outcome)]
    nodes_held: NodesHeld | None = None
    """Nodes that it held, a part of one included; null: those of its layout."""
    iterations_s: Seconds | None = None
    """Seconds of its iterations, warm-up included; null: those of its measurement."""


class OutcomeReply(Document):
    accepted: bool
    """False when it came too late to matter; it need not be sent again either way."""
    state: TrialState
    """The trial's state afterwards."""
