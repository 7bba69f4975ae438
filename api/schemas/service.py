"""The documents of the service: tokens and audit, workers and nodes, models and clusters."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field

from api.schemas.campaigns_and_trials import CostRead, Document, Request
from api.schemas.text_types import Moment, Reason
from results_db.actor import TokenRole
from results_db.records import LeasedTrialRead, WorkerRecord
from results_db.service_records import AllocationNodeRead, AuditEntryRead, ClusterNodeRead
from search_spaces.protocol.states import Scheduler
from search_spaces.spec.presets.clusters import CLUSTER_PRESETS, LOCAL_CPU, resolve_cluster
from search_spaces.spec.presets.models import MODEL_PRESETS

TokenId = Annotated[int, Field(ge=1, le=(1 << 31) - 1)]
ShownState = Literal["starting", "working", "draining", "silent", "ended"]

_OF_PRESETS: Final[dict[str, Any]] = {
    "preset": True,
    "created_by": None,
    "created_at": None,
    "updated_at": None,
}


class TokenCreate(Request):
    """A new token."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    """The owner of what it submits; also in the audit. Each name has at most one valid token."""
    role: TokenRole
    """viewer: reads. submitter: also submits campaigns and changes its own. admin: everything.
    worker: leases and reports trials, and nothing else."""
    # A strict model refuses texts as times, but JSON has no other form.
    expires_at: Annotated[Moment | None, Field(strict=False)] = None
    """When it expires, with a time zone; null: never."""


class TokenRead(Document):
    """A token without its secret, which cannot be read again."""

    id: int
    name: str
    role: TokenRole
    created_at: datetime
    created_by: str
    """The name of the token that made it."""
    expires_at: datetime | None
    """null: it does not expire."""
    revoked_at: datetime | None
    """null: it is not revoked."""
    last_used_at: datetime | None
    """Accurate to a minute; null: never."""
    is_valid: bool


class TokenCreated(TokenRead):
    """A new token, with its secret."""

    token: str
    """The secret; the service does not store it."""


class TokenPage(Document):
    """Tokens, the newest first, without those of the data directory."""

    tokens: list[TokenRead]


class SignInCodeCreated(Document):
    """A one-time code with which the holder of a token signs in to the pages."""

    code: str
    """Open `/sign-in#code=<code>` of the service in a browser. It works once."""
    expires_at: datetime


class WhoAmI(Document):
    """The holder of the request's token."""

    name: str
    role: TokenRole
    expires_at: datetime | None
    """null: it does not expire."""


class AuditPage(Document):
    """Changes, the newest first."""

    entries: list[AuditEntryRead]
    next_cursor: str | None
    """Pass it as `cursor` for the next page; null on the last."""


class NotLeasedRead(Document):
    """A trial that no worker has leased, and why this allocation does not lease it."""

    trial_id: int
    campaign: str
    number: int
    """The trial's number in its campaign."""
    num_nodes: int
    num_devices: int
    reason: str


class AllocationRead(Document):
    """An allocation: the nodes of one worker, their trials and their cost."""

    id: str
    """The id of its worker's session."""
    name: str
    host: str
    cluster: str
    scheduler: Scheduler
    job_id: str | None
    """The scheduler's id of it."""
    launcher: str
    """The launcher of its ranks; empty: not reported."""
    device: str
    num_nodes: int
    devices_per_node: int
    shares_nodes: bool
    """Whether several probes may run on one node."""
    state: ShownState
    """draining: it takes no more trials, because it ends soon. silent: its worker sent no heartbeat
    lately."""
    seconds_left: float | None
    """Seconds until it ends; null: unknown, or never."""
    registered_at: datetime
    seen_at: datetime
    status_at: datetime | None
    """Time of the last status from its worker; null: there was none."""
    ended_at: datetime | None
    nodes: list[AllocationNodeRead]
    """In the worker's order; empty: not reported."""
    running: list[LeasedTrialRead]
    """Trials that hold nodes, the oldest first."""
    waiting: list[LeasedTrialRead]
    """Leased trials that wait for devices."""
    num_not_leased: int
    """Trials of its cluster that no worker has leased."""
    not_leased: list[NotLeasedRead]
    """The oldest of them, each with a reason; empty if the allocation has ended."""
    cost: CostRead
    """The cost of its ended attempts, and its idle node-seconds."""


class WorkerPage(Document):
    workers: list[WorkerRecord]
    """Workers with a recent heartbeat, the newest session first."""


class AllocationPage(Document):
    """Allocations, the newest first."""

    allocations: list[AllocationRead]


class NodePage(Document):
    """Nodes by cluster and name."""

    nodes: list[ClusterNodeRead]


class NodeQuarantineCreate(Request):
    """The reason to put a node into quarantine."""

    reason: Annotated[Reason, Field(min_length=1)] = "asked for by a user"


class CatalogueEntry(Document):
    """The common fields of models and clusters."""

    name: str
    preset: bool
    """Whether it is a preset of the program; presets cannot be replaced or deleted."""
    description: dict[str, Any]
    """All fields, in the form of campaign files."""
    created_by: str | None
    """Name of the token that stored it first; null for a preset."""
    created_at: datetime | None
    updated_at: datetime | None


class ModelRead(CatalogueEntry):
    """A model that campaign files can name."""

    num_parameters: int
    """Number of parameters; shared ones count once."""

    @classmethod
    def of_preset(cls, name: str) -> Self:
        shape = MODEL_PRESETS[name]
        description = shape.to_mapping()
        return cls(
            name=name, description=description, num_parameters=shape.num_parameters, **_OF_PRESETS
        )


class ClusterRead(CatalogueEntry):
    """A cluster that campaign files can name."""

    num_devices: int
    """Devices of the whole machine."""
    warning: str | None
    """The constants that were assumed; null: none."""

    @classmethod
    def of_preset(cls, name: str) -> Self:
        """A preset; those of local-cpu are detected."""
        cluster, _ = resolve_cluster(name)
        description, num_devices = cluster.to_mapping(), cluster.num_devices
        return cls(
            name=name, description=description, num_devices=num_devices, warning=None, **_OF_PRESETS
        )


class ModelPage(Document):
    """Models: presets, then those of users, both sorted by name."""

    models: list[ModelRead]

    @classmethod
    def of_presets(cls) -> Self:
        return cls(models=[ModelRead.of_preset(name) for name in MODEL_PRESETS])


class ClusterPage(Document):
    """Clusters: presets, then those of users, both sorted by name."""

    clusters: list[ClusterRead]

    @classmethod
    def of_presets(cls) -> Self:
        names = (LOCAL_CPU, *CLUSTER_PRESETS)
        return cls(clusters=[ClusterRead.of_preset(name) for name in names])
