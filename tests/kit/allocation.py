"""What the tests of allocations say as a worker."""

from __future__ import annotations

from typing import Any

from tests.kit.api import Api

NODES = [{"name": "n1", "num_devices": 4}, {"name": "n2", "num_devices": 4}]
ALLOCATION = {
    "scheduler": "slurm",
    "job_id": "4711",
    "launcher": "srun",
    "ends_in_s": 3600.0,
    "shares_nodes": True,
}


def register(api: Api, name: str = "w1", **changes: Any) -> str:
    return api.register(
        name, **{"num_nodes": 2, "nodes": NODES, "allocation": ALLOCATION} | changes
    )


def node(name: str, state: str = "idle", **more: Any) -> dict[str, Any]:
    return {"name": name, "state": state, **more}


def beat(api: Api, worker: str, *nodes: dict[str, Any], **more: Any) -> Any:
    status = {"state": "working", "nodes": list(nodes), **more.pop("status", {})}
    return api.post(f"/workers/{worker}/heartbeats", {"trials": [], "status": status, **more})
