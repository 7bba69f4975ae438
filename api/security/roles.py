"""The table of access, the role that each route of the service needs; and who owns what.

The service does not start if a route is missing in the table. `api.security.access_check` uses the
table before the body of a request is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool

from layout_tuner.api.errors import AccessUndeclaredError
from layout_tuner.api.schemas.text_types import campaign_reference
from layout_tuner.protocol.worker_messages import TrialId
from layout_tuner.results_db.actor import Actor, TokenRole
from layout_tuner.results_db.errors import ValueUnstorableError
from layout_tuner.results_db.store import Store

MOST_WORKERS: Final = 4096
"""Sessions of workers whose owners a process keeps."""

Owned = Literal["campaign", "trial", "model", "cluster", "worker"]
"""Things with an owner. A trial has its campaign's; a worker belongs to the token that registered
it, the other things to the owner whom a token acts for."""


@dataclass(frozen=True, slots=True)
class AccessRule:
    """The condition for using a route."""

    least: TokenRole | Literal["any"] | None
    """The least role. any: every valid token. None: no token is needed."""
    owned: Owned | None = None
    """What the path names and a submitter or worker must own; None: nothing."""

    def admits(self, role: TokenRole) -> bool:
        """Whether this role is enough, ownership aside."""
        if self.least is None or self.least == "any" or role == "admin":
            return True
        if "worker" in (self.least, role):
            return self.least == role
        return _RANK[role] >= _RANK[self.least]

    def admitted(self) -> str:
        """The roles that may use the route, in words."""
        return " or ".join(role for role in (*_RANK, "worker") if self.admits(role))


_RANK: Final[Mapping[TokenRole, int]] = {"viewer": 0, "submitter": 1, "admin": 2}

OPEN: Final = AccessRule(None)
HOLDER: Final = AccessRule("any")
VIEWER: Final = AccessRule("viewer")
SUBMITTER: Final = AccessRule("submitter")
ADMIN: Final = AccessRule("admin")
WORKER: Final = AccessRule("worker")
OWN_WORKER: Final = AccessRule("worker", owned="worker")
OWN_CAMPAIGN: Final = AccessRule("submitter", owned="campaign")
OWN_TRIAL: Final = AccessRule("submitter", owned="trial")
OWN_MODEL: Final = AccessRule("submitter", owned="model")
OWN_CLUSTER: Final = AccessRule("submitter", owned="cluster")

_OPERATIONS: Final[Mapping[AccessRule, str]] = {
    # Health, the sign-in and the description of the API: no data of users.
    OPEN: """
        openapi docs-assets read_docs read_asset read_health read_readiness show_sign_in sign_in
        create_device_code create_device_token
        begin_owner_sign_in finish_owner_sign_in
    """,
    # Workers resolve the cluster that the service names.
    HOLDER: "list_clusters read_cluster read_whoami",
    # What can be read; workers have no sessions.
    VIEWER: """
        read_metrics sign_out create_sign_in_code show_device revoke_device_token
        show_campaigns show_campaign show_trials show_failures show_events show_trial
        show_plots show_plot_data show_timeline show_trial_comparison show_campaign_comparison
        show_export show_export_file show_allocations
        list_campaigns read_campaign read_plan read_report read_plot read_analysis read_table_of_campaign
        export_trial list_export_formats list_models read_model list_trainers read_trainer show_trainer
        list_trials read_trial read_trial_log read_leaderboard
        stream_campaign_events stream_events
        list_allocations read_allocation list_nodes list_workers read_usage show_usage
        list_groups list_shares list_quotas list_webhooks
    """,
    SUBMITTER: """
        show_submit do_submit do_check do_read_job do_clone_campaign
        create_campaign plan_campaign import_campaigns clone_campaign
        create_webhook delete_webhook test_webhook
    """,
    OWN_CAMPAIGN: """
        show_delete_campaign do_delete_campaign do_change_campaign
        do_pause_campaign do_resume_campaign do_cancel_campaign
        update_campaign delete_campaign pause_campaign resume_campaign cancel_campaign
    """,
    OWN_TRIAL: """
        do_requeue_trial do_repeat_trial do_cancel_trial requeue_trial repeat_trial cancel_trial
    """,
    OWN_MODEL: "put_model delete_model",
    OWN_CLUSTER: "put_cluster delete_cluster",
    # Tokens, owners and the audit; allocations and nodes, since a quarantine affects all users.
    ADMIN: """
        show_tokens do_create_token do_revoke_token show_audit
        create_token list_tokens revoke_token list_audit sign_out_owner
        list_owners put_owner put_group delete_group
        do_remove_allocation do_quarantine do_release
        remove_allocation quarantine_node release_node put_quota delete_quota
    """,
    # The worker protocol.
    WORKER: "register_worker post_outcome",
    OWN_WORKER: "drain_worker lease_trials post_heartbeat",
}

ACCESS: Final[Mapping[str, AccessRule]] = {
    name: rule for rule, names in _OPERATIONS.items() for name in names.split()
}
"""The rule of each route by its operation id, the name of its function."""


def refuse_undeclared(operations: Iterable[str]) -> None:
    """Checks that every route has a rule. Raises AccessUndeclaredError if a route has none."""
    if undeclared := sorted(set(operations) - set(ACCESS)):
        raise AccessUndeclaredError(
            f"no rule of access for {', '.join(undeclared)}: add a line to ACCESS in api/security/roles.py"
        )


class OwnersOfThings:
    """Finds the owner of the resource in a path."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._of_workers: dict[str, str] = {}
        """Tokens by session: a session's never changes, and workers ask all the time."""
        self._parameter_and_owner: Mapping[Owned, tuple[str, Callable[[Store, str], str | None]]]
        self._parameter_and_owner = {
            "campaign": ("campaign", _of_campaign),
            "trial": ("trial_id", _of_trial),
            "model": ("name", lambda store, name: store.catalogue.owner_of("model", name)),
            "cluster": ("name", lambda store, name: store.catalogue.owner_of("cluster", name)),
            "worker": ("worker_id", lambda store, worker_id: store.workers.owner_of(worker_id)),
        }

    async def why_not(self, owned: Owned, named: Mapping[str, str], actor: Actor) -> str | None:
        """Why the actor may not change the resource.

        None: it may, or there is no such resource, or none that the actor may see.
        """
        parameter, find_owner = self._parameter_and_owner[owned]
        name, asker = named[parameter], actor.name if owned == "worker" else actor.owner
        owner = self._of_workers.get(name) if owned == "worker" else None
        try:
            if owner is None:
                owner = await run_in_threadpool(find_owner, self._store.by(actor), name)
        except ValueUnstorableError:
            return None  # there is none of this name, and the route answers so
        if owned == "worker" and owner is not None:
            if len(self._of_workers) >= MOST_WORKERS:
                self._of_workers.clear()
            self._of_workers[name] = owner
        return None if owner is None or owner == asker else whose(owned, name, owner, asker)


def _of_campaign(store: Store, named: str) -> str | None:
    return store.access.owner_of_campaign(campaign_reference(named))


def _of_trial(store: Store, named: str) -> str | None:
    """None also if it is not a number: the route refuses it."""
    try:
        trial_id = _TRIAL_ID.validate_python(named)
    except ValidationError:
        return None
    return store.access.owner_of_trial(trial_id)


def whose(owned: Owned, name: str, owner: str, asker: str) -> str:
    """Why an owner may not change a resource of another."""
    return (
        f"the {owned} {name[:80]!r} belongs to {owner!r}, and {asker!r} changes only things of its "
        f"own; ask {owner!r} or an admin"
    )


_TRIAL_ID: Final = TypeAdapter[int](TrialId)
"""Reads a trial's id as the routes do, which accept "+7" for 7."""
