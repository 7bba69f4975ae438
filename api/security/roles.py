"""Who may do what: one table for every route of the service.

A route that is not in the table keeps the service from starting, so that none is forgotten; the gate
(`api.gate`) asks the table before anything else of a request is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from api.errors import AccessUndeclaredError
from results_db.actor import TokenRole

Owned = Literal["campaign", "trial", "model", "cluster"]
"""What belongs to whoever's name made it; a trial belongs to its campaign's."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may use a route."""

    least: TokenRole | None
    """Role that it takes; None: it is open, and needs no token."""
    owned: Owned | None = None
    """What a submitter must own that the path names; None: nothing."""
    lasts: bool = False
    """Whether its answer goes on until somebody ends it, so that the token is asked for again meanwhile."""

    def admits(self, role: TokenRole) -> bool:
        """Whether a token of this role may use the route; what it must own is another question."""
        if self.least is None or role == "admin":
            return True
        if "worker" in (self.least, role):
            return self.least == role
        return _RANK[role] >= _RANK[self.least]

    def admitted(self) -> str:
        """The roles that may use the route, in words."""
        return " or ".join(role for role in (*_RANK, "worker") if self.admits(role))


_RANK: Final[Mapping[TokenRole, int]] = {"viewer": 0, "submitter": 1, "admin": 2}

OPEN: Final = Rule(None)
VIEWER: Final = Rule("viewer")
WATCHER: Final = Rule("viewer", lasts=True)
SUBMITTER: Final = Rule("submitter")
ADMIN: Final = Rule("admin")
WORKER: Final = Rule("worker")
OWN_CAMPAIGN: Final = Rule("submitter", owned="campaign")
OWN_TRIAL: Final = Rule("submitter", owned="trial")
OWN_MODEL: Final = Rule("submitter", owned="model")
OWN_CLUSTER: Final = Rule("submitter", owned="cluster")

ACCESS: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        # The description of the API, and whether the service is there: no data of anybody's.
        "openapi": OPEN,
        "docs-assets": OPEN,
        "read_docs": OPEN,
        "read_root": OPEN,
        "read_health": OPEN,
        "read_readiness": OPEN,
        "read_metrics": VIEWER,
        # Campaigns, and what they are made of.
        "create_campaign": SUBMITTER,
        "import_campaigns": SUBMITTER,
        "list_campaigns": VIEWER,
        "read_campaign": VIEWER,
        "read_report": VIEWER,
        "read_analysis": VIEWER,
        "read_table_of_campaign": VIEWER,
        "export_trial": VIEWER,
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
        "list_clusters": VIEWER,
        "read_cluster": VIEWER,
        "put_cluster": OWN_CLUSTER,
        "delete_cluster": OWN_CLUSTER,
        # Trials, and what is made of them.
        "list_trials": VIEWER,
        "read_trial": VIEWER,
        "read_trial_log": VIEWER,
        "repeat_trial": OWN_TRIAL,
        "requeue_trial": OWN_TRIAL,
        "cancel_trial": OWN_TRIAL,
        "read_leaderboard": VIEWER,
        "stream_campaign_events": WATCHER,
        "stream_events": WATCHER,
        # Machines: a node that is set aside is missed by everybody.
        "list_allocations": VIEWER,
        "read_allocation": VIEWER,
        "list_nodes": VIEWER,
        "quarantine_node": ADMIN,
        "release_node": ADMIN,
        "list_workers": VIEWER,
        # The worker protocol.
        "register_worker": WORKER,
        "drain_worker": WORKER,
        "lease_trials": WORKER,
        "post_heartbeat": WORKER,
        "post_outcome": WORKER,
        # Access itself.
        "read_whoami": VIEWER,
        "create_token": ADMIN,
        "list_tokens": ADMIN,
        "revoke_token": ADMIN,
        "list_audit": ADMIN,
    }
)
"""Every route's rule by its operation id, which is its function's name."""


def refuse_undeclared(operations: Iterable[str]) -> None:
    """Refuses routes that the table does not have.

    Raises:
        AccessUndeclaredError: there are some.
    """
    undeclared = sorted(set(operations) - set(ACCESS))
    if undeclared:
        raise AccessUndeclaredError(
            f"nobody says who may use {', '.join(undeclared)}: add a line to ACCESS in api/access.py"
        )
