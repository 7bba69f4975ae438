"""A body for each route that takes one and leaves parsing to the service; all texts have values."""

from __future__ import annotations

from typing import Any

from tests.kit.api import INTRODUCTION
from tests.kit.store import completed


class Body:
    """A route's body with a value for each of its texts."""

    def __init__(self, method: str, path: str, document: dict[str, Any], url: str = "") -> None:
        self.method, self.path, self.document, self.url = method, path, document, url or path


OUTCOME = {**completed().to_mapping(), "message": "m", "node": "n1"}
NODE = {"name": "n1", "state": "idle", "doing": "d", "reason": "r", "health": {"key": "text"}}
BODIES = [
    Body(
        "POST",
        "/v1/workers",
        {
            **INTRODUCTION,
            "versions": {"python": "3.11"},
            "trainers": {"theirs": "1.2"},
            "trainer_parameters": {"theirs": {"tag": {"type": "text", "pattern": "[a-z]+"}}},
            "trainer_knobs": {"theirs": {"x": {"kind": "switch", "default": False}}},
            "allocation": {"scheduler": "none", "job_id": "7", "launcher": "ray"},
            "nodes": [{"name": "n1", "num_devices": 1}],
        },
    ),
    Body("POST", "/v1/workers/{worker_id}/leases", {"max_trials": 1}, "/v1/workers/w/leases"),
    Body(
        "POST",
        "/v1/workers/{worker_id}/heartbeats",
        {
            "trials": [
                {
                    "trial_id": 1,
                    "attempt": 1,
                    "iterations_done": 0,
                    "phase": "waiting",
                    "waiting_because": "words",
                }
            ],
            "status": {"state": "working", "nodes": [NODE]},
        },
        "/v1/workers/w/heartbeats",
    ),
    Body(
        "POST",
        "/v1/trials/{trial_id}/outcome",
        {"worker_id": "w", "attempt": 1, "outcome": OUTCOME},
        "/v1/trials/1/outcome",
    ),
    Body(
        "PATCH",
        "/v1/campaigns/{campaign}",
        {"budget": {"wall_time": "5m"}, "notes": "n", "visibility": "group", "group": "lab"},
    ),
    Body("POST", "/v1/device-codes", {"host": "login1"}),
    Body("POST", "/v1/device-tokens", {"secret": "key.part"}),
    Body(
        "POST",
        "/v1/tokens",
        {"name": "ci", "role": "viewer", "owner": "ann", "expires_at": "2030-01-01T00:00Z"},
    ),
    Body(
        "POST", "/v1/nodes/{cluster}/{node}/quarantine", {"reason": "r"}, "/v1/nodes/c/n/quarantine"
    ),
    Body("POST", "/v1/trials/{trial_id}/repeat", {"times": 1}, "/v1/trials/1/repeat"),
    Body(
        "PUT",
        "/v1/owners/{name}",
        {"weight": 1.0, "subject": "https://sso.test#1"},
        "/v1/owners/ann",
    ),
    Body(
        "POST",
        "/v1/webhooks",
        {"address": "https://hooks.test/x", "format": "slack", "events": ["campaign.ended"]},
        "/v1/webhooks",
    ),
    Body(
        "PUT",
        "/v1/groups/{name}",
        {"members": ["ann"], "join": ["bob"], "leave": ["cid"]},
        "/v1/groups/lab",
    ),
    Body(
        "PUT",
        "/v1/quotas/{kind}/{name}/{period}",
        {"node_hours": 1.0, "beyond": "wait", "until": "2030-01-01T00:00Z"},
        "/v1/quotas/owner/ann/week",
    ),
]
