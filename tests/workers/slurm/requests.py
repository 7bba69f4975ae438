"""Allocations by the dozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import resolve_cluster
from layout_tuner.search_spaces.clusters.site import Site
from layout_tuner.workers.slurm.request import AllocationRequest
from layout_tuner.workers.slurm.site_lookup import site_of


def make_cluster(**changes: Any) -> Cluster:
    described = {"name": "ours", "device": "CPU core", "num_nodes": 4, "devices_per_node": 2}
    return resolve_cluster(described | {"device_memory_gb": 1} | changes)[0]


def make_request(**changes: Any) -> AllocationRequest:
    values: dict[str, Any] = {
        "cluster": make_cluster(),
        "described": {"name": "ours"},
        "site": Site(),
        "num_nodes": 2,
        "time_s": 600.0,
        "url": "http://login1.example.org:8080",
        "token_file": Path("/home/someone/token"),
        "python": Path("/opt/env/bin/python"),
    }
    return AllocationRequest(**(values | changes))


def frontier_request(**changes: Any) -> AllocationRequest:
    site = site_of("frontier")
    values = {
        "cluster": resolve_cluster("frontier")[0],
        "described": "frontier",
        "site": site,
        "num_nodes": 16,
        "time_s": 7200.0,
        "account": "ABC123",
    }
    return make_request(**(values | changes))
