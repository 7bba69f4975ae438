"""The messages between worker and service, defined once for both sides and for the database.

The service validates what workers send with pydantic: by the types, the limits in `Annotated` and
the hooks of `documents.pydantic_hooks`. A worker builds the same classes and sends
them as JSON. The class names are the names of the schemas in the OpenAPI document, and the strings
under the fields are their descriptions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Annotated, Any, Final, Self, cast

from annotated_types import Interval, Len, MaxLen

from layout_tuner.documents.duration import MAX_DURATION_S
from layout_tuner.documents.limits import (
    MAX_ID,
    document_problem,
    name_problem,
    visible_text_problem,
)
from layout_tuner.documents.pydantic_hooks import (
    ReadWith,
    Refuses,
    StopsAtFirstError,
    StrictMessage,
)
from layout_tuner.documents.reading import read_named, shown
from layout_tuner.errors import SpaceInvalidError
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.protocol.states import (
    AllocationState,
    AttemptPhase,
    NodeState,
    Scheduler,
    TrialState,
)
from layout_tuner.search_spaces.jobs.job_knob import JobKnob
from layout_tuner.trainers.parameters import ParameterInvalidError, read_declarations

MAX_NODES: Final = 10_000
"""More nodes than the largest machines have."""
MAX_WORDS: Final = 2000
"""Most characters of a text for people: what a node does, why a trial waits."""
MAX_HEALTH_LENGTH: Final = 4000
"""Most characters of a node's health, written as JSON."""

MAX_KNOBS: Final = 64
"""Most job knobs of a trainer: those of an adapter, and those that a file adds."""

_MAX_NAME: Final = 200
_MAX_NODE_NAME: Final = 255


def _health_problem(health: dict[str, Any]) -> str | None:
    """Depth was checked with the whole body."""
    if found := document_problem(health, visible_text_problem):
        return ": ".join(filter(None, found))
    length = len(json.dumps(health, allow_nan=False))
    if length > MAX_HEALTH_LENGTH:
        return f"{length} characters of JSON are more than {MAX_HEALTH_LENGTH}"
    return None


def _declarations(value: object) -> dict[str, Any]:
    """A trainer's parameters as they were sent, once they are known to be readable."""
    for name, each in read_declarations(value).items():
        if not each.is_quick:
            problem = "it is not one line, or it may take long to match"
            raise ParameterInvalidError(problem, field=f"{name}.pattern")
    return cast("dict[str, Any]", value)


def _knobs(value: object) -> dict[str, Any]:
    """A trainer's job knobs as they were sent, once they are known to be readable."""
    declared_knobs(value)
    return cast("dict[str, Any]", value)


def declared_knobs(value: object) -> dict[str, JobKnob]:
    """Job knobs by name as a worker declares them; SpaceInvalidError for a malformed one."""
    return read_named(value, JobKnob.from_mapping, SpaceInvalidError, "the knobs", most=MAX_KNOBS)


def _repeated_name(nodes: Sequence[NodeBody | NodeStatusBody]) -> str | None:
    seen: set[str] = set()
    for node in nodes:
        if node.name in seen:
            return f"node {shown(node.name)} is there twice; every node has a name of its own"
        seen.add(node.name)
    return None


Declarations = Annotated[dict[str, Any], ReadWith(_declarations)]
"""Parameters of a trainer by name, each with the fields that the file of trainers has."""
KnobDeclarations = Annotated[dict[str, Any], ReadWith(_knobs)]
"""Job knobs of a trainer by name: kind, values, default, when, effects and so on."""
Name = Annotated[str, Len(1, _MAX_NAME), Refuses(lambda name: name_problem(name, _MAX_NAME))]
"""Of a worker, a host, a cluster or a device."""
NodeName = Annotated[
    str, Len(1, _MAX_NODE_NAME), Refuses(lambda name: name_problem(name, _MAX_NODE_NAME))
]
Line = Annotated[str, MaxLen(200), Refuses(visible_text_problem)]
"""Printable text of one line, possibly empty."""
Key = Annotated[str, Len(1, 64), Refuses(visible_text_problem)]
"""A name that a client chooses: a key of a map, a job's id."""
Words = Annotated[str, MaxLen(MAX_WORDS), Refuses(visible_text_problem)]
"""Text for people, on one line."""
TrialId = Annotated[int, Interval(ge=1, le=MAX_ID)]
Count = Annotated[int, Interval(ge=1, le=1 << 20)]
CountFromZero = Annotated[int, Interval(ge=0, le=1 << 20)]
Seconds = Annotated[float, Interval(ge=0, le=MAX_DURATION_S)]
NodesHeld = Annotated[float, Interval(ge=0, le=1 << 20)]
"""Nodes; a fraction where a probe holds a part of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationBody(StrictMessage):
    """What a worker knows of its allocation."""

    scheduler: Scheduler = "none"
    job_id: Key | None = None
    """The scheduler's name for it."""
    launcher: Annotated[Line, MaxLen(40)] = ""
    """What starts its ranks."""
    ends_in_s: Seconds | None = None
    """Seconds left; null: not known, or it does not end."""
    shares_nodes: bool = False
    """Whether several probes may run on one node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeBody(StrictMessage):
    """A node of an allocation."""

    name: NodeName
    num_devices: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCreate(StrictMessage):
    """A worker introduces itself."""

    name: Name
    """Registering a name again ends its earlier session."""
    host: Name
    cluster: Name
    """Only campaigns of this cluster's name are leased to it."""
    num_nodes: Count
    devices_per_node: Count
    device: Name
    versions: Annotated[dict[Key, Line], MaxLen(50)] = field(default_factory=dict)
    trainers: Annotated[dict[Key, Key], MaxLen(50)] = field(default_factory=dict)
    """Versions of the trainers that it runs besides the embedded one, by name."""
    trainer_parameters: Annotated[dict[Key, Declarations], MaxLen(50)] = field(default_factory=dict)
    """What campaigns may set, by trainer and parameter: type, minimum, maximum, choices, pattern,
    below and default, as in the file of trainers. Without those of a trainer, the parameters of
    campaigns with it are not checked at submission."""
    trainer_knobs: Annotated[dict[Key, KnobDeclarations], MaxLen(50)] = field(default_factory=dict)
    """The job knobs that campaigns may search, by trainer and name. Without those of a trainer,
    campaigns with it may search those of the adapter of its name, if there is one."""
    allocation: AllocationBody = AllocationBody()
    nodes: Annotated[
        list[NodeBody], StopsAtFirstError(), MaxLen(MAX_NODES), Refuses(_repeated_name)
    ] = field(default_factory=list)
    """Its nodes by name; may be left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetAside:
    """A node that no probe shall run on."""

    node: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCreated:
    worker_id: str
    """Of this session; a worker that is answered 404 registers again."""
    heartbeat_interval_s: float
    lease_s: float
    """A lease holds for this long after each heartbeat."""
    quarantined: tuple[SetAside, ...] = field(default_factory=tuple)
    """Nodes of its cluster that no probe shall run on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoomBody(StrictMessage):
    """What a trial may need of an allocation that is partly in use."""

    nodes: CountFromZero
    """Free whole nodes: enough for a layout over several nodes; a smaller one fits on any node."""
    devices: CountFromZero
    """Devices of one node that is in use partly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRequest(StrictMessage):
    max_trials: Annotated[int, Interval(ge=1, le=64)] = 1
    wait_s: Annotated[float, Interval(ge=0, le=20)] = 5.0
    """Seconds to wait for work before answering with an empty list."""
    room: RoomBody | None = None
    """Only trials that each fit there; null: any that fits the allocation."""
    longest_s: Seconds | None = None
    """Only trials with a probe deadline of at most this; null: any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRead:
    trial_id: int
    attempt: int
    """To be sent back with heartbeats and the outcome."""
    campaign: str
    number: int
    """The trial's number in its campaign."""
    request: dict[str, Any]
    """The probe to run: a `ProbeRequest` document."""
    lease_expires_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class LeasesRead:
    leases: list[LeaseRead]


@dataclass(frozen=True, kw_only=True, slots=True)
class BeatBody(StrictMessage):
    trial_id: TrialId
    attempt: Count
    iterations_done: Annotated[int, Interval(ge=0, le=1 << 31)]
    phase: AttemptPhase = "iterating"
    """waiting: leased, and no devices yet."""
    held_s: Seconds | None = None
    """Seconds that it has held its nodes, 0 while it waits; null: since it was leased."""
    nodes_held: NodesHeld | None = None
    """Nodes that it holds, a part of one included; null: those of its layout."""
    waiting_because: Words = ""
    """The reason why it waits, if it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatusBody(StrictMessage):
    """What a node does."""

    name: NodeName
    state: NodeState
    doing: Words = ""
    """In words: the probe that runs there."""
    reason: Words = ""
    """Why it is lost, or in quarantine."""
    free_devices: CountFromZero | None = None
    health: Annotated[dict[str, Any], Refuses(_health_problem)] | None = None
    """What its last check found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusBody(StrictMessage):
    """A worker's report about its allocation."""

    state: AllocationState = "working"
    ends_in_s: Seconds | None = None
    """Seconds left; null: unchanged."""
    idle_node_s: Annotated[float, Interval(ge=0, le=1e15)] = 0.0
    """Node-seconds without a probe since the worker registered. It is a sum, so that a lost or
    repeated heartbeat counts once; each registration starts at 0."""
    nodes: Annotated[
        list[NodeStatusBody], StopsAtFirstError(), MaxLen(MAX_NODES), Refuses(_repeated_name)
    ] = field(default_factory=list)
    """All of its nodes; empty: unchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatBody(StrictMessage):
    trials: Annotated[list[BeatBody], StopsAtFirstError(), MaxLen(1000)] = field(
        default_factory=list
    )
    """Every trial that the worker runs; a lease that is not in the list is not extended."""
    status: StatusBody | None = None
    """The status of its allocation; null: unchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatReply:
    stop: tuple[int, ...]
    """Trials to stop: cancelled, ended, or no longer leased by this worker."""
    release: tuple[str, ...] = field(default_factory=tuple)
    """Nodes to take out of quarantine; repeated until the status shows it."""
    quarantine: tuple[SetAside, ...] = field(default_factory=tuple)
    """Nodes to set aside; repeated until the status shows it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomePost(StrictMessage):
    worker_id: Key
    """The sender; a later session of the worker may also report an outcome."""
    attempt: Count
    outcome: Annotated[Outcome, ReadWith(Outcome.from_mapping)]
    nodes_held: NodesHeld | None = None
    """Nodes that it held, a part of one included; null: those of its layout."""
    iterations_s: Seconds | None = None
    """Seconds of its iterations, warm-up included; null: those of its measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeReport(OutcomePost):
    """An outcome and its trial: workers keep it on disk, the service in its queue."""

    trial_id: int

    @classmethod
    def of(cls, trial_id: int, post: OutcomePost) -> Self:
        """The outcome that was posted to a trial's address."""
        said = {each.name: getattr(post, each.name) for each in fields(post)}
        return cls(trial_id=trial_id, **said)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeReply:
    accepted: bool
    """False when it was dropped; it need not be sent again either way."""
    state: TrialState
    """The trial's state afterwards."""
    reason: str = ""
    """Why it was dropped: it came too late to matter, or the attempt has reported another one."""
