"""The cluster: a description of the machine that layouts are judged against."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

from search_spaces.errors import ClusterInvalidError
from search_spaces.layout import PRECISIONS
from search_spaces.machine import ROOT, usable_cores, usable_memory_bytes
from search_spaces.reading import (
    MAX_COUNT,
    MAX_NAME_LENGTH,
    MAX_TEXT_LENGTH,
    is_line,
    is_name,
    is_positive_number,
    read_mapping,
    refuse_unknown,
    shown,
    whole_number_problem,
)

GIB: Final = 1 << 30
MAX_DEVICE_MEMORY_BYTES: Final = 1 << 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A machine: nodes of equal devices, their memory, their speed and their links.

    Bandwidths are effective bytes a second and direction; they feed the estimates, never a limit.

    Raises:
        ClusterInvalidError: at construction, when a number is out of range.
    """

    name: str
    """What workers and campaigns match on."""
    device: str
    """What one device is, for people."""
    num_nodes: int
    """Nodes that exist: the largest layout."""
    devices_per_node: int
    """Devices of a node; a rank occupies one."""
    device_memory_bytes: int
    """Memory of one device, in bytes."""
    peak_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """Peak of the matrix units by precision, in FLOP/s of one device; empty: measured by the worker."""
    memory_bandwidth_bytes_per_s: float = 1e12
    """Memory bandwidth of one device."""
    intra_node_bandwidth_bytes_per_s: Mapping[int, float] = field(default_factory=dict)
    """Effective collective bandwidth inside a node, by the number of ranks in the group."""
    inter_node_bandwidth_bytes_per_s: float = 25e9
    """Effective collective bandwidth between nodes, a device."""
    host_operation_s: float = 10e-6
    """Time that the host takes for one operation of eager PyTorch, its autograd included."""
    intra_node_latency_s: float = 3.4e-6
    """Latency of a collective or a transfer inside a node, beyond its bytes."""
    inter_node_latency_s: float = 14e-6
    """Latency of a step of a collective, or of a transfer, between nodes."""
    source: str = ""
    """Where the numbers come from; says "generic constants" where they are guesses."""

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ClusterInvalidError(
                f"name={shown(self.name)} is not a string of 1 to {MAX_NAME_LENGTH} characters"
            )
        for name in ("device", "source"):
            if not is_line(getattr(self, name)):
                raise ClusterInvalidError(
                    f"{name}={shown(getattr(self, name))} is not a line of printable text, at most "
                    f"{MAX_TEXT_LENGTH} characters long"
                )
        for name in ("num_nodes", "devices_per_node", "device_memory_bytes"):
            high = MAX_DEVICE_MEMORY_BYTES if name == "device_memory_bytes" else MAX_COUNT
            problem = whole_number_problem(getattr(self, name), high=high)
            if problem:
                raise ClusterInvalidError(f"{name}={problem}")
        for name in _POSITIVE:
            if not is_positive_number(getattr(self, name)):
                raise ClusterInvalidError(f"{name}={shown(getattr(self, name))} is not over 0")
        for name in ("peak_flops_per_s", "intra_node_bandwidth_bytes_per_s"):
            self._check_table(name)
        for precision in self.peak_flops_per_s:
            if precision not in PRECISIONS:
                raise ClusterInvalidError(
                    f"peak_flops_per_s[{shown(precision)}] is not one of {', '.join(PRECISIONS)}"
                )

    def _check_table(self, name: str) -> None:
        table = getattr(self, name)
        if not isinstance(table, Mapping):
            raise ClusterInvalidError(f"{name}={shown(table)} is not a mapping")
        for key, value in table.items():
            problem = whole_number_problem(key) if name in _BY_RANKS else None
            if problem:
                raise ClusterInvalidError(f"{name}: {problem}")
            if not is_positive_number(value):
                raise ClusterInvalidError(
                    f"{name}[{shown(key)}]={shown(value)} is not a number over 0"
                )

    @property
    def num_devices(self) -> int:
        """Devices of the whole machine."""
        return self.num_nodes * self.devices_per_node

    def to_mapping(self) -> dict[str, Any]:
        """The fields by name, as plain JSON values (keys become strings)."""
        mapping = asdict(self)
        mapping["peak_flops_per_s"] = dict(self.peak_flops_per_s)
        mapping["intra_node_bandwidth_bytes_per_s"] = {
            str(ranks): value for ranks, value in self.intra_node_bandwidth_bytes_per_s.items()
        }
        return mapping

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Builds a cluster from its fields by name.

        Raises:
            ClusterInvalidError: a field is unknown, missing, or out of range.
        """
        known = tuple(f.name for f in fields(cls))
        values = read_mapping(mapping, ClusterInvalidError, "the cluster")
        refuse_unknown(values, known, ClusterInvalidError, "cluster field")
        missing = [name for name in REQUIRED_FIELDS if values.get(name) is None]
        if missing:
            raise ClusterInvalidError(f"the cluster's {missing[0]} is missing")
        links = values.get("intra_node_bandwidth_bytes_per_s", {})
        values["intra_node_bandwidth_bytes_per_s"] = _read_links(links)
        return cls(**values)


REQUIRED_FIELDS: Final = (
    "name",
    "device",
    "num_nodes",
    "devices_per_node",
    "device_memory_bytes",
)
"""Fields of a cluster without a default: what it is, and all that a layout is held to."""


def _read_links(links: object) -> dict[int, float]:
    """The table of links, whose keys JSON can only spell as strings; each has one spelling."""
    if not isinstance(links, Mapping):
        raise ClusterInvalidError(
            f"intra_node_bandwidth_bytes_per_s={shown(links)} is not a mapping from numbers of ranks"
        )
    table: dict[int, float] = {}
    for key, bandwidth in links.items():
        ranks = int(key) if isinstance(key, str) and _RANKS.fullmatch(key) else key
        if isinstance(ranks, bool) or not isinstance(ranks, int):
            raise ClusterInvalidError(
                f"intra_node_bandwidth_bytes_per_s: {shown(key)} is not a number of ranks; the "
                "table maps from numbers of ranks, as 2 or 8"
            )
        if ranks in table:
            raise ClusterInvalidError(
                f"intra_node_bandwidth_bytes_per_s: {ranks} is there more than once"
            )
        table[ranks] = bandwidth
    return table


_POSITIVE: Final = (
    "memory_bandwidth_bytes_per_s",
    "inter_node_bandwidth_bytes_per_s",
    "host_operation_s",
    "intra_node_latency_s",
    "inter_node_latency_s",
)
_BY_RANKS: Final = ("intra_node_bandwidth_bytes_per_s",)
_RANKS: Final = re.compile(r"[1-9][0-9]{0,8}")


def detect_local_cpu(devices_per_node: int | None = None, *, root: Path = ROOT) -> Cluster:
    """This machine as a cluster of one node: one device a core, and an equal share of the memory.

    The share is of three quarters of the memory: the service, Ray and the operating system live in
    the rest. Both are what this process may use, the limits of a container included.

    Args:
        devices_per_node: cores to use; None: every core that this process may use.
        root: where the kernel's files are.

    Raises:
        ClusterInvalidError: more devices than there are cores.
    """
    cores = usable_cores(root)
    devices = cores if devices_per_node is None else devices_per_node
    problem = whole_number_problem(devices)
    if problem:
        raise ClusterInvalidError(f"devices_per_node={problem}")
    if devices > cores:
        raise ClusterInvalidError(
            f"devices_per_node={devices} is more than the {cores} cores that this machine lets "
            f"this process use; local-cpu runs one rank a core, so give at most {cores}"
        )
    return Cluster(
        name="local-cpu",
        device="CPU core",
        num_nodes=1,
        devices_per_node=devices,
        device_memory_bytes=max(usable_memory_bytes(root) * 3 // 4 // devices, 1),
        memory_bandwidth_bytes_per_s=10e9,
        intra_node_bandwidth_bytes_per_s={2: 2e9, 4: 1e9, 8: 0.5e9},
        inter_node_bandwidth_bytes_per_s=1e9,
        source="cores and memory detected; bandwidths are generic constants",
    )
