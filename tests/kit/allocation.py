"""What the tests of allocations say as a worker."""

from __future__ import annotations

from typing import Any

from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CLUSTER, Api

LAYOUT = Layout(num_microbatches=8)
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


class Place:
    """A cluster of its own, with a campaign of the same name."""

    def __init__(self, api: Api, name: str) -> None:
        self.api, self.name = api, name
        self.campaign_id = int(api.submit(name=name, cluster={**CLUSTER, "name": name})["id"])

    def register(self, worker: str = "w1", **changes: Any) -> str:
        return register(self.api, worker, cluster=self.name, **changes)

    def add(self, layout: Layout = LAYOUT) -> int:
        return int(self.api.store.trials.add(self.campaign_id, layout).id)

    def read(self) -> Any:
        return self.api.get(f"/campaigns/{self.name}")

    def why_it_waits(self) -> Any:
        return self.read()["progress"]["waiting_reason"]
