"""Methods about the service: its health, models, clusters, allocations, nodes, tokens, audit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Unpack

from layout_tuner.api.schemas.access import (
    AuditPage,
    DeviceCodeCreated,
    DeviceToken,
    GroupPage,
    OwnerPage,
    QuotaPage,
    QuotaPut,
    SharePage,
    SignedOut,
    SignInCodeCreated,
    TokenCreate,
    TokenCreated,
    TokenPage,
    TokenRead,
    WebhookCreate,
    WebhookPage,
    WhoAmI,
)
from layout_tuner.api.schemas.allocations import (
    AllocationPage,
    AllocationRead,
    NodePage,
    WorkerPage,
)
from layout_tuner.api.schemas.campaigns_and_trials import Health, Readiness
from layout_tuner.api.schemas.model_and_cluster_documents import (
    ClusterPage,
    ClusterRead,
    ModelPage,
    ModelRead,
)
from layout_tuner.api.schemas.trainer_documents import TrainerPage, TrainerRead
from layout_tuner.client.calls import PAGE, Calls, segment
from layout_tuner.results_db.actor import QuotaKind, QuotaPeriod
from layout_tuner.results_db.service_records import (
    AuditChoice,
    AuditEntryRead,
    ClusterNodeRead,
    GroupRead,
    OwnerRead,
    QuotaRead,
    UsageChoice,
    UsageRead,
    WebhookRead,
)


class ServiceCalls(Calls):
    """The service itself."""

    def health(self) -> Health:
        """Whether the parts of the service are running."""
        return self._get("/health", Health)

    def readiness(self) -> Readiness:
        """Whether the service can work; if it cannot, the call fails with the reasons."""
        return self._get("/ready", Readiness)

    def usage(self, **asked: Unpack[UsageChoice]) -> UsageRead:
        """Node-hours in a period."""
        return self._get("/usage", UsageRead, **asked)

    def usage_csv(self, **asked: Unpack[UsageChoice]) -> str:
        """The rows of `usage` as CSV."""
        return self._get_file("/usage", format="csv", **asked).text

    def metrics(self) -> str:
        """The service's metrics in the format of Prometheus."""
        # Prometheus looks for them beside the API, not below it.
        return self._send("GET", "/metrics", is_repeatable=True).text


class CatalogueCalls(Calls):
    """Models, clusters and trainers that campaign files name."""

    def models(self) -> ModelPage:
        """Presets, then the users' models."""
        return self._get("/models", ModelPage)

    def model(self, name: str) -> ModelRead:
        """A model's shape, by its name."""
        return self._get(f"/models/{segment(name)}", ModelRead)

    def put_model(self, name: str, description: Mapping[str, Any] | str) -> ModelRead:
        """Stores a model under a new name: a shape, a preset with changes, or its config.json.

        The last is `{"config": FILE, "seq_length": TOKENS}`, and is read here.
        """
        if isinstance(description, Mapping) and "config" in description:
            from layout_tuner.search_spaces.models.model_files import described_model  # YAML, too

            description = described_model({"name": name, **description})
        return self._put(f"/models/{segment(name)}", ModelRead, description)

    def delete_model(self, name: str) -> None:
        """Deletes a model that is not a preset."""
        self._delete(f"/models/{segment(name)}")

    def trainers(self) -> TrainerPage:
        """The trainers with an adapter, each with its job knobs."""
        return self._get("/trainers", TrainerPage)

    def trainer(self, name: str) -> TrainerRead:
        """A trainer's job knobs, by its name."""
        return self._get(f"/trainers/{segment(name)}", TrainerRead)

    def clusters(self) -> ClusterPage:
        """Presets, then the users' clusters."""
        return self._get("/clusters", ClusterPage)

    def cluster(self, name: str) -> ClusterRead:
        """A cluster's limits and constants, by its name."""
        return self._get(f"/clusters/{segment(name)}", ClusterRead)

    def put_cluster(self, name: str, description: Mapping[str, Any] | str) -> ClusterRead:
        """Stores a cluster under a new name: its fields, or a preset with changes."""
        return self._put(f"/clusters/{segment(name)}", ClusterRead, description)

    def delete_cluster(self, name: str) -> None:
        """Deletes a cluster that is not a preset."""
        self._delete(f"/clusters/{segment(name)}")


class AllocationCalls(Calls):
    """Workers, their allocations and nodes."""

    def workers(self) -> WorkerPage:
        """The workers that reported lately."""
        return self._get("/workers", WorkerPage)

    def allocations(
        self, *, ended: bool = False, name: str | None = None, limit: int | None = None
    ) -> AllocationPage:
        """Allocations, the newest first.

        With `ended` also those that have ended; `name` is that of the worker, the job id or the id
        of the worker's session.
        """
        return self._get("/allocations", AllocationPage, all=ended or None, name=name, limit=limit)

    def allocation(self, allocation_id: str) -> AllocationRead:
        """One allocation, by the id of its worker's session."""
        return self._get(f"/allocations/{segment(allocation_id)}", AllocationRead)

    def remove_allocation(self, allocation_id: str) -> None:
        """Removes an allocation with everything that its worker reported about it."""
        self._delete(f"/allocations/{segment(allocation_id)}")

    def nodes(self, cluster: str | None = None) -> NodePage:
        """Nodes of allocations, and those in quarantine."""
        return self._get("/nodes", NodePage, cluster=cluster)

    def quarantine_node(self, cluster: str, node: str, reason: str) -> ClusterNodeRead:
        """Puts a node in quarantine until it is released."""
        path = f"/nodes/{segment(cluster)}/{segment(node)}/quarantine"
        return self._post(path, ClusterNodeRead, {"reason": reason})

    def release_node(self, cluster: str, node: str) -> ClusterNodeRead:
        """Releases a node from quarantine."""
        return self._post(f"/nodes/{segment(cluster)}/{segment(node)}/release", ClusterNodeRead)


class AccessCalls(Calls):
    """Tokens, owners, groups, fair shares, quotas and the audit log."""

    def shares(self) -> SharePage:
        """What owners have had of clusters; without the role admin that of the own owner."""
        return self._get("/shares", SharePage)

    def quotas(self) -> QuotaPage:
        """All quotas; without the role admin those in force for the own owner."""
        return self._get("/quotas", QuotaPage)

    def put_quota(
        self, kind: QuotaKind, name: str, period: QuotaPeriod, quota: QuotaPut
    ) -> QuotaRead:
        """Sets the quota of an owner or a group in a period."""
        path = f"/quotas/{kind}/{segment(name)}/{period}"
        return self._put(path, QuotaRead, quota.model_dump(mode="json"))

    def delete_quota(self, kind: QuotaKind, name: str, period: QuotaPeriod) -> None:
        """Takes a quota away."""
        self._delete(f"/quotas/{kind}/{segment(name)}/{period}")

    def whoami(self) -> WhoAmI:
        """The name and the role of the client's own token, and its owner with the groups."""
        return self._get("/whoami", WhoAmI)

    def create_sign_in_code(self) -> SignInCodeCreated:
        """Creates a one-time code with which a browser signs in as the client's token."""
        return self._post("/sign-in-codes", SignInCodeCreated)

    def create_device_code(self, host: str) -> DeviceCodeCreated:
        """Creates a code with which a person allows this program on the page `/device`."""
        return self._post("/device-codes", DeviceCodeCreated, {"host": host})

    def create_device_token(self, secret: str) -> DeviceToken:
        """Exchanges the secret of a device code, or of a token, for a token and another secret."""
        return self._post("/device-tokens", DeviceToken, {"secret": secret})

    def revoke_device_token(self) -> None:
        """Ends the sign-in of a command line whose token is the client's."""
        self._delete("/device-tokens")

    def create_token(self, token: TokenCreate) -> TokenCreated:
        """Creates a token; only this answer contains it."""
        return self._post("/tokens", TokenCreated, token.model_dump(mode="json"))

    def tokens(self, *, revoked: bool | None = None) -> TokenPage:
        """Tokens, the newest first: those that are not revoked, or all."""
        return self._get("/tokens", TokenPage, revoked=revoked)

    def revoke_token(self, token_id: int) -> TokenRead:
        """Revokes a token for good; revoking it twice has no further effect."""
        answer = self._send("DELETE", f"/v1/tokens/{token_id}", is_repeatable=True)
        return self._read(answer, TokenRead)

    def owners(self) -> OwnerPage:
        """Owners, to whom campaigns belong, by name."""
        return self._get("/owners", OwnerPage)

    def put_owner(
        self, name: str, weight: float | None = None, subject: str | None = None
    ) -> OwnerRead:
        """Sets the weight and the subject of an owner, who is added if new; None: they stay."""
        wanted = {"weight": weight, "subject": subject}
        return self._put(f"/owners/{segment(name)}", OwnerRead, wanted)

    def sign_out_owner(self, name: str) -> SignedOut:
        """Ends all sessions of an owner in browsers."""
        return self._post(f"/owners/{segment(name)}/sign-out", SignedOut)

    def groups(self) -> GroupPage:
        """All groups by name, for an admin; for others, those of which they are members."""
        return self._get("/groups", GroupPage)

    def put_group(
        self,
        name: str,
        *,
        weight: float | None = None,
        members: Sequence[str] | None = None,
        join: Sequence[str] = (),
        leave: Sequence[str] = (),
    ) -> GroupRead:
        """Sets the weight and all members of a group, or lets owners join and leave; None stays.

        A group that is new is added, unless owners are to join or leave it.
        """
        wanted = {"weight": weight, "members": members, "join": join, "leave": leave}
        return self._put(f"/groups/{segment(name)}", GroupRead, wanted)

    def delete_group(self, name: str) -> None:
        """Deletes a group; campaigns that were for it are then private."""
        self._delete(f"/groups/{segment(name)}")

    def webhooks(self) -> WebhookPage:
        """The owner's webhooks; for an administrator those of all."""
        return self._get("/webhooks", WebhookPage)

    def add_webhook(self, webhook: WebhookCreate) -> WebhookRead:
        """Makes a webhook; only this answer contains its secret."""
        return self._post("/webhooks", WebhookRead, webhook.model_dump())

    def test_webhook(self, webhook_id: int) -> WebhookRead:
        """Turns a webhook on, and sends it a test message."""
        return self._post(f"/webhooks/{webhook_id}/test", WebhookRead)

    def remove_webhook(self, webhook_id: int) -> None:
        """Deletes a webhook."""
        self._delete(f"/webhooks/{webhook_id}")

    def audit_page(
        self, *, limit: int | None = None, cursor: str | None = None, **chosen: Unpack[AuditChoice]
    ) -> AuditPage:
        """A page of the audit log, the newest change first; the arguments select changes."""
        given: dict[str, Any] = {**chosen}
        times = {name: at.isoformat() for name, at in given.items() if isinstance(at, datetime)}
        return self._get("/audit", AuditPage, **{**given, **times}, limit=limit, cursor=cursor)

    def audit(self, **chosen: Unpack[AuditChoice]) -> Iterator[AuditEntryRead]:
        """All changes in the audit log, the newest first; the arguments select changes."""
        return self._walk(
            lambda cursor: self.audit_page(**chosen, limit=PAGE, cursor=cursor),
            lambda page: page.entries,
        )
