"""Methods about the service: its health, models, clusters, allocations, nodes, tokens, audit."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from api.client.call import (
    PAGE,
    Call,
    PagedCall,
    delete,
    get,
    post,
    put,
    reader_of,
    segment,
)
from api.client.methods import route, walk
from api.schemas.access import (
    AuditEntryRead,
    AuditPage,
    SignInCodeCreated,
    TokenCreate,
    TokenCreated,
    TokenPage,
    TokenRead,
    WhoAmI,
)
from api.schemas.allocations import (
    AllocationPage,
    AllocationRead,
    ClusterNodeRead,
    NodePage,
    WorkerPage,
)
from api.schemas.campaigns_and_trials import Health, Readiness
from api.schemas.catalogue import ClusterPage, ClusterRead, ModelPage, ModelRead


class ServiceCalls:
    """The service itself."""

    @route
    def health(self) -> Call[Health]:
        """Whether the parts of the service are running."""
        return get("/health", Health)

    @route
    def readiness(self) -> Call[Readiness]:
        """Whether the service can work; if it cannot, the call fails with the reasons."""
        return get("/ready", Readiness)

    @route
    def metrics(self) -> Call[str]:
        """The service's metrics in the format of Prometheus."""
        # Prometheus looks for them beside the API, not below it.
        return Call(method="GET", path="/metrics", read=lambda r: r.text, is_repeatable=True)


class CatalogueCalls:
    """Models and clusters that campaign files name."""

    @route
    def models(self) -> Call[ModelPage]:
        """Presets, then the users' models."""
        return get("/models", ModelPage)

    @route
    def model(self, name: str) -> Call[ModelRead]:
        """A model's shape, by its name."""
        return get(f"/models/{segment(name)}", ModelRead)

    @route
    def put_model(self, name: str, description: Mapping[str, Any] | str) -> Call[ModelRead]:
        """Stores a model under a new name: a shape, or a preset with changes."""
        return put(f"/models/{segment(name)}", ModelRead, description)

    @route
    def delete_model(self, name: str) -> Call[None]:
        """Deletes a model that is not a preset."""
        return delete(f"/models/{segment(name)}")

    @route
    def clusters(self) -> Call[ClusterPage]:
        """Presets, then the users' clusters."""
        return get("/clusters", ClusterPage)

    @route
    def cluster(self, name: str) -> Call[ClusterRead]:
        """A cluster's limits and constants, by its name."""
        return get(f"/clusters/{segment(name)}", ClusterRead)

    @route
    def put_cluster(self, name: str, description: Mapping[str, Any] | str) -> Call[ClusterRead]:
        """Stores a cluster under a new name: its fields, or a preset with changes."""
        return put(f"/clusters/{segment(name)}", ClusterRead, description)

    @route
    def delete_cluster(self, name: str) -> Call[None]:
        """Deletes a cluster that is not a preset."""
        return delete(f"/clusters/{segment(name)}")


class AllocationCalls:
    """Workers, their allocations and nodes."""

    @route
    def workers(self) -> Call[WorkerPage]:
        """The workers that reported lately."""
        return get("/workers", WorkerPage)

    @route
    def allocations(
        self, *, ended: bool = False, name: str | None = None, limit: int | None = None
    ) -> Call[AllocationPage]:
        """Allocations, the newest first.

        Args:
            ended: whether to list also those that have ended.
            name: selects by the name of the worker, the job id or the id of the worker's session.
            limit: most allocations of the answer.
        """
        return get("/allocations", AllocationPage, all=ended or None, name=name, limit=limit)

    @route
    def allocation(self, allocation_id: str) -> Call[AllocationRead]:
        """One allocation, by the id of its worker's session."""
        return get(f"/allocations/{segment(allocation_id)}", AllocationRead)

    @route
    def remove_allocation(self, allocation_id: str) -> Call[None]:
        """Removes an allocation with everything that its worker reported about it."""
        return delete(f"/allocations/{segment(allocation_id)}")

    @route
    def nodes(self, cluster: str | None = None) -> Call[NodePage]:
        """Nodes of allocations, and those in quarantine."""
        return get("/nodes", NodePage, cluster=cluster)

    @route
    def quarantine_node(self, cluster: str, node: str, reason: str) -> Call[ClusterNodeRead]:
        """Puts a node in quarantine until it is released."""
        path = f"/nodes/{segment(cluster)}/{segment(node)}/quarantine"
        return post(path, ClusterNodeRead, {"reason": reason})

    @route
    def release_node(self, cluster: str, node: str) -> Call[ClusterNodeRead]:
        """Releases a node from quarantine."""
        return post(f"/nodes/{segment(cluster)}/{segment(node)}/release", ClusterNodeRead)


class AccessCalls:
    """Tokens and the audit log."""

    @route
    def whoami(self) -> Call[WhoAmI]:
        """The name and the role of the client's own token."""
        return get("/whoami", WhoAmI)

    @route
    def create_sign_in_code(self) -> Call[SignInCodeCreated]:
        """Creates a one-time code with which a browser signs in as the client's token."""
        return post("/sign-in-codes", SignInCodeCreated)

    @route
    def create_token(self, token: TokenCreate) -> Call[TokenCreated]:
        """Creates a token; only this answer contains it."""
        return post("/tokens", TokenCreated, token.model_dump(mode="json"))

    @route
    def tokens(self, *, revoked: bool | None = None) -> Call[TokenPage]:
        """Tokens, the newest first: those that are not revoked, or all."""
        return get("/tokens", TokenPage, revoked=revoked)

    @route
    def revoke_token(self, token_id: int) -> Call[TokenRead]:
        """Revokes a token for good; revoking it twice has no further effect."""
        return Call(
            method="DELETE",
            path=f"/v1/tokens/{token_id}",
            read=reader_of(TokenRead),
            is_repeatable=True,
        )

    @route
    def audit_page(
        self,
        *,
        actor: str | None = None,
        action: str | None = None,
        target_kind: str | None = None,
        target: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Call[AuditPage]:
        """A page of the audit log, the newest change first; the arguments select changes."""
        query = _changes(actor, action, target_kind, target, since, until)
        return get("/audit", AuditPage, **query, limit=limit, cursor=cursor)

    @walk
    def audit(
        self,
        *,
        actor: str | None = None,
        action: str | None = None,
        target_kind: str | None = None,
        target: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> PagedCall[AuditPage, AuditEntryRead]:
        """All changes in the audit log, the newest first; the arguments select changes."""
        query = _changes(actor, action, target_kind, target, since, until)
        return PagedCall(
            page=lambda cursor: get("/audit", AuditPage, **query, limit=PAGE, cursor=cursor),
            items=lambda page: page.entries,
        )


def _changes(
    actor: str | None,
    action: str | None,
    target_kind: str | None,
    target: str | None,
    since: datetime | None,
    until: datetime | None,
) -> dict[str, Any]:
    return {
        "actor": actor,
        "action": action,
        "target_kind": target_kind,
        "target": target,
        "since": since and since.isoformat(),
        "until": until and until.isoformat(),
    }
