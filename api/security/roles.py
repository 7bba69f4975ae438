"""The table of access: the role that each route of the service needs.

The service does not start if a route is missing in the table. `api.security.access_check` uses the
table before the body of a request is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from api.errors import AccessUndeclaredError
from results_db.actor import TokenRole

Owned = Literal["campaign", "trial", "model", "cluster", "worker"]
"""Things with an owner: the name of the token that made them. A trial has its campaign's owner."""


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

ACCESS: Final[Mapping[str, AccessRule]] = MappingProxyType(
    {
        # The description of the API and health: no data of users.
        "openapi": OPEN,
        "docs-assets": OPEN,
        "read_docs": OPEN,
        "read_asset": OPEN,
        "read_health": OPEN,
        "read_readiness": OPEN,
        "read_metrics": VIEWER,
        # Sign-in. Workers have no sessions.
        "show_sign_in": OPEN,
        "sign_in": OPEN,
        "sign_out": VIEWER,
        "create_sign_in_code": VIEWER,
        # Pages.
        "show_campaigns": VIEWER,
        "show_trial": VIEWER,
        "show_trial_comparison": VIEWER,
        "show_submit": SUBMITTER,
        "do_submit": SUBMITTER,
        "do_check": SUBMITTER,
        "show_export": VIEWER,
        "show_export_file": VIEWER,
        "show_allocations": VIEWER,
        "do_remove_allocation": ADMIN,
        "do_quarantine": ADMIN,
        "do_release": ADMIN,
        "show_tokens": ADMIN,
        "do_create_token": ADMIN,
        "do_revoke_token": ADMIN,
        "show_audit": ADMIN,
        "show_campaign_comparison": VIEWER,
        "show_campaign": VIEWER,
        "show_trials": VIEWER,
        "show_failures": VIEWER,
        "show_events": VIEWER,
        "show_delete_campaign": OWN_CAMPAIGN,
        "do_pause_campaign": OWN_CAMPAIGN,
        "do_resume_campaign": OWN_CAMPAIGN,
        "do_cancel_campaign": OWN_CAMPAIGN,
        "do_change_campaign": OWN_CAMPAIGN,
        "do_delete_campaign": OWN_CAMPAIGN,
        "do_clone_campaign": SUBMITTER,
        "do_requeue_trial": OWN_TRIAL,
        "do_repeat_trial": OWN_TRIAL,
        "do_cancel_trial": OWN_TRIAL,
        "show_plots": VIEWER,
        "show_plot_data": VIEWER,
        "show_timeline": VIEWER,
        # Campaigns, models and clusters.
        "create_campaign": SUBMITTER,
        "plan_campaign": SUBMITTER,
        "read_plan": VIEWER,
        "import_campaigns": SUBMITTER,
        "list_campaigns": VIEWER,
        "read_campaign": VIEWER,
        "read_report": VIEWER,
        "read_analysis": VIEWER,
        "read_table_of_campaign": VIEWER,
        "export_trial": VIEWER,
        "list_export_formats": VIEWER,
        "clone_campaign": SUBMITTER,
        "update_campaign": OWN_CAMPAIGN,
        "delete_campaign": OWN_CAMPAIGN,
        "pause_campaign": OWN_CAMPAIGN,
        "resume_campaign": OWN_CAMPAIGN,
        "cancel_campaign": OWN_CAMPAIGN,
        "list_models": VIEWER,
        "read_model": VIEWER,
        "put_model": OWN_MODEL,
        "delete_model": OWN_MODEL,
        "list_clusters": HOLDER,
        "read_cluster": HOLDER,
        "put_cluster": OWN_CLUSTER,
        "delete_cluster": OWN_CLUSTER,
        # Trials, leaderboard and events.
        "list_trials": VIEWER,
        "read_trial": VIEWER,
        "read_trial_log": VIEWER,
        "repeat_trial": OWN_TRIAL,
        "requeue_trial": OWN_TRIAL,
        "cancel_trial": OWN_TRIAL,
        "read_leaderboard": VIEWER,
        "stream_campaign_events": VIEWER,
        "stream_events": VIEWER,
        # Allocations and nodes: a quarantine affects all users.
        "list_allocations": VIEWER,
        "read_allocation": VIEWER,
        "remove_allocation": ADMIN,
        "list_nodes": VIEWER,
        "quarantine_node": ADMIN,
        "release_node": ADMIN,
        "list_workers": VIEWER,
        # The worker protocol.
        "register_worker": WORKER,
        "drain_worker": OWN_WORKER,
        "lease_trials": OWN_WORKER,
        "post_heartbeat": OWN_WORKER,
        "post_outcome": WORKER,
        # Tokens and the audit.
        "read_whoami": HOLDER,
        "create_token": ADMIN,
        "list_tokens": ADMIN,
        "revoke_token": ADMIN,
        "list_audit": ADMIN,
    }
)
"""The rule of each route by its operation id, the name of its function."""


def refuse_undeclared(operations: Iterable[str]) -> None:
    """Checks that every route has a rule.

    Raises:
        AccessUndeclaredError: a route has none.
    """
    undeclared = sorted(set(operations) - set(ACCESS))
    if undeclared:
        raise AccessUndeclaredError(
            f"no rule of access for {', '.join(undeclared)}: add a line to ACCESS in api/security/roles.py"
        )
