"""Known machines, and the reading of a user's description of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final

from search_spaces.cluster import (
    GIB,
    MAX_DEVICE_MEMORY_BYTES,
    REQUIRED_FIELDS,
    Cluster,
    detect_local_cpu,
)
from search_spaces.errors import ClusterInvalidError
from search_spaces.reading import (
    is_positive_number,
    nearest,
    read_mapping,
    refuse_unknown,
    shown,
)

LOCAL_CPU: Final = "local-cpu"
"""The one cluster that is detected rather than listed."""

_MAX_DEVICE_MEMORY_GB: Final = MAX_DEVICE_MEMORY_BYTES // GIB

_A100_PEAKS: Final = {"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12}

_CLUSTERS: Final = (
    Cluster(
        name="frontier",
        device="AMD MI250X GCD",
        num_nodes=9856,
        devices_per_node=8,
        device_memory_bytes=64 * GIB,
        peak_flops_per_s={"fp32": 47.9e12, "bf16": 191.5e12, "fp16": 191.5e12},
        memory_bandwidth_bytes_per_s=1.6e12,
        # Not monotonic: four ranks span two packages over the thinnest links.
        intra_node_bandwidth_bytes_per_s={2: 129e9, 4: 52e9, 8: 135e9},
        # With all eight devices of a node in groups of their own.
        inter_node_bandwidth_bytes_per_s=5e9,
        source="OLCF user guide; collectives as measured in arXiv:2502.08145",
    ),
    Cluster(
        name="perlmutter",
        device="NVIDIA A100-SXM4-40GB",
        num_nodes=1536,
        devices_per_node=4,
        device_memory_bytes=40 * GIB,
        peak_flops_per_s=_A100_PEAKS,
        memory_bandwidth_bytes_per_s=1.555e12,
        intra_node_bandwidth_bytes_per_s={2: 80e9, 4: 200e9},
        inter_node_bandwidth_bytes_per_s=25e9,
        source="NERSC documentation and NVIDIA's data sheet; bandwidths are nominal",
    ),
    Cluster(
        name="a100-sxm",
        device="NVIDIA A100-SXM4-80GB",
        num_nodes=128,
        devices_per_node=8,
        device_memory_bytes=80 * GIB,
        peak_flops_per_s=_A100_PEAKS,
        memory_bandwidth_bytes_per_s=2.039e12,
        intra_node_bandwidth_bytes_per_s={2: 230e9, 4: 230e9, 8: 230e9},
        inter_node_bandwidth_bytes_per_s=25e9,
        source="NVIDIA's data sheet; bandwidths are nominal",
    ),
    Cluster(
        name="h100-sxm",
        device="NVIDIA H100-SXM5-80GB",
        num_nodes=128,
        devices_per_node=8,
        device_memory_bytes=80 * GIB,
        peak_flops_per_s={"fp32": 66.9e12, "bf16": 989.4e12, "fp16": 989.4e12},
        memory_bandwidth_bytes_per_s=3.35e12,
        intra_node_bandwidth_bytes_per_s={2: 360e9, 4: 360e9, 8: 360e9},
        inter_node_bandwidth_bytes_per_s=50e9,
        source="NVIDIA's data sheet; bandwidths are nominal",
    ),
)

CLUSTER_PRESETS: Final[Mapping[str, Cluster]] = MappingProxyType(
    {cluster.name: cluster for cluster in _CLUSTERS}
)
"""Every listed cluster by name; `local-cpu` is detected instead."""

_GENERIC: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "device": "unknown device",
        "num_nodes": 1,
        "devices_per_node": 8,
        "device_memory_bytes": 80 * GIB,
        "memory_bandwidth_bytes_per_s": 2e12,
        "intra_node_bandwidth_bytes_per_s": {2: 200e9, 4: 200e9, 8: 200e9},
        "inter_node_bandwidth_bytes_per_s": 25e9,
    }
)
# The peak is not among them: it is measured where nobody states it.


def resolve_cluster(described: str | Mapping[str, Any]) -> tuple[Cluster, str | None]:
    """The cluster that a user described, and a warning where constants had to be guessed.

    A description is a preset's name, or a mapping of `Cluster` fields. A mapping may start from a
    preset (`{preset: frontier, num_nodes: 16}`) and may give the memory as `device_memory_gb`
    (of 2^30 bytes, as vendors count). A name that nobody knows gets generic constants for whatever
    is not given; the warning lists them. A preset's own name is a description by itself, or stands
    beside everything that layouts are held to, as `Cluster.to_mapping` writes it.

    Raises:
        ClusterInvalidError: a field is unknown or impossible, local-cpu is asked for more than this
            machine has, or a preset's name stands beside some fields in place of `preset`.
    """
    if isinstance(described, str):
        described = {"preset": described} if _is_preset(described) else {"name": described}
    values = read_mapping(described, ClusterInvalidError, "the cluster")
    known = [f.name for f in fields(Cluster)]
    refuse_unknown(
        values, ["preset", "device_memory_gb", *known], ClusterInvalidError, "cluster field"
    )
    _read_memory(values)
    if "preset" in values:
        return _from_preset(values), None
    if set(values) == {"name"} and _is_preset(values["name"]):
        return _from_preset({"preset": values["name"]}), None
    return _from_generic(values)


def _is_preset(name: object) -> bool:
    return isinstance(name, str) and (name == LOCAL_CPU or name in CLUSTER_PRESETS)


def _read_memory(values: dict[str, Any]) -> None:
    if "device_memory_gb" not in values:
        return
    gigabytes = values.pop("device_memory_gb")
    if "device_memory_bytes" in values:
        raise ClusterInvalidError("give device_memory_gb or device_memory_bytes, not both")
    if not is_positive_number(gigabytes):
        raise ClusterInvalidError(f"device_memory_gb={shown(gigabytes)} is not a number over 0")
    if gigabytes > _MAX_DEVICE_MEMORY_GB:
        raise ClusterInvalidError(
            f"device_memory_gb={shown(gigabytes)} is more than {_MAX_DEVICE_MEMORY_GB}, the largest "
            "that is accepted"
        )
    values["device_memory_bytes"] = int(gigabytes * GIB)


def _from_preset(values: dict[str, Any]) -> Cluster:
    preset = values.pop("preset")
    if not _is_preset(preset):
        choices = [LOCAL_CPU, *CLUSTER_PRESETS]
        raise ClusterInvalidError(
            f"unknown cluster preset {shown(preset)}{nearest(str(preset)[:80], choices)}"
        )
    if preset != LOCAL_CPU:
        return Cluster.from_mapping(CLUSTER_PRESETS[preset].to_mapping() | values)
    base = detect_local_cpu(values.pop("devices_per_node", None))
    if values.get("num_nodes", 1) != 1:
        raise ClusterInvalidError(
            f"num_nodes={shown(values['num_nodes'])}: local-cpu is this machine, one node"
        )
    return Cluster.from_mapping(base.to_mapping() | values)


def _from_generic(values: dict[str, Any]) -> tuple[Cluster, str | None]:
    if "name" not in values:
        choices = ", ".join([LOCAL_CPU, *CLUSTER_PRESETS])
        raise ClusterInvalidError(
            f"the cluster has no name; give a name, or a preset ({choices}) to start from"
        )
    guessed = {name: value for name, value in _GENERIC.items() if name not in values}
    _refuse_half_a_preset(values, guessed)
    source = "generic constants" if guessed else "given by the user"
    cluster = Cluster.from_mapping({"source": source} | guessed | values)
    if not guessed:
        return cluster, None
    listed = ", ".join(f"{name}={value}" for name, value in guessed.items())
    why = "is written out without all of its constants"
    if not _is_preset(cluster.name):
        why = f"is not a preset ({', '.join([LOCAL_CPU, *CLUSTER_PRESETS])})"
    return cluster, f"cluster {cluster.name!r} {why}: generic constants stand in for {listed}"


def _refuse_half_a_preset(values: Mapping[str, Any], guessed: Mapping[str, Any]) -> None:
    """Whoever names a known machine means its limits, not guesses at them."""
    lacking = [name for name in REQUIRED_FIELDS if name in guessed]
    if lacking and _is_preset(values["name"]):
        preset = values["name"]
        raise ClusterInvalidError(
            f"name={preset!r} is a preset's, and {', '.join(lacking)} would have to be guessed; to "
            f"start from the preset say {{preset: {preset}, ...}} in place of {{name: {preset}, "
            "...}, or write the cluster out"
        )
