"""The cluster: a description of the machine on which layouts run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from layout_tuner.documents.reading import (
    MAX_COUNT,
    MAX_NAME_LENGTH,
    MAX_TEXT_LENGTH,
    Problems,
    is_line,
    is_name,
    read_mapping,
    refuse_all,
    shown,
    unknown_names,
    whole_number_problem,
)
from layout_tuner.errors import ClusterInvalidError
from layout_tuner.process_resources import ROOT, usable_cores, usable_memory_bytes
from layout_tuner.search_spaces.clusters.network_levels import (
    BANDWIDTHS,
    LATENCIES,
    NetworkLevel,
    level_problems,
    read_levels,
)
from layout_tuner.search_spaces.layouts.layout import PRECISIONS, Precision
from layout_tuner.search_spaces.physical_ranges import Range

MAX_DEVICE_MEMORY_BYTES: Final = 1 << 50

CLUSTER_RANGES: Final[Mapping[str, Range]] = {
    "num_nodes": Range(1, MAX_COUNT, "nodes"),
    "devices_per_node": Range(1, 1 << 12, "devices"),
    "device_memory_bytes": Range(1, MAX_DEVICE_MEMORY_BYTES, "bytes"),
    "peak_flops_per_s": Range(1e6, 1e18, "FLOP/s"),
    "memory_bandwidth_bytes_per_s": BANDWIDTHS,
    "intra_node_bandwidth_bytes_per_s": BANDWIDTHS,
    "inter_node_bandwidth_bytes_per_s": BANDWIDTHS,
    "host_operation_s": LATENCIES,
    "intra_node_latency_s": LATENCIES,
    "inter_node_latency_s": LATENCIES,
}
"""The range of each number of a cluster; for a table, of each of its values."""

UNKNOWN_DEVICE: Final = "unknown device"
"""The device of a cluster of which none was stated."""

MEASURED_SOURCE: Final = "measured by layout-tuner calibrate"
"""How the source of measured constants begins: their peak is the speed of a matrix product."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A machine: nodes of equal devices, their memory, their speed and their links.

    Bandwidths are effective bytes per second in one direction. They are used by estimates only.

    Raises:
        ClusterInvalidError: at construction, when a number is out of range.
    """

    name: str
    """Workers run the trials of campaigns on the cluster of the same name."""
    device: str
    """Description of one device."""
    num_nodes: int
    """Nodes of the machine, and of the largest layout."""
    devices_per_node: int
    """Devices of a node; each rank uses one."""
    device_memory_bytes: int
    """Memory of one device, in bytes."""
    peak_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """Peak of one device's matrix units by precision, in FLOP/s; empty: the worker measures it."""
    memory_bandwidth_bytes_per_s: float = 1e12
    """Memory bandwidth of one device."""
    intra_node_bandwidth_bytes_per_s: Mapping[int, float] = field(default_factory=dict)
    """Effective collective bandwidth inside a node, by the number of ranks in the group."""
    shared_intra_node_path: bool = False
    """Whether all groups of a node share one path, as over PCIe without NVLink or a switch. Groups
    that lie across each other then divide the bandwidth of a whole node."""
    inter_node_bandwidth_bytes_per_s: float = 25e9
    """Effective collective bandwidth between nodes, per device."""
    host_operation_s: float = 10e-6
    """Host time of one operation of eager PyTorch, including autograd."""
    intra_node_latency_s: float = 3.4e-6
    """Latency of a collective or a transfer inside a node, beyond its bytes."""
    inter_node_latency_s: float = 14e-6
    """Latency of a step of a collective, or of a transfer, between nodes."""
    source: str = ""
    """Where the numbers come from; "generic constants" where they are guesses."""
    node_hour_price: str = ""
    """What an hour of a node costs, as "1.20 EUR", for the usage; empty: not stated."""
    levels: tuple[NetworkLevel, ...] = ()
    """The levels of the network, smallest first; one of them is the node. Without levels, the
    network has two, the node and the cluster, which the fields `intra_node_...` and
    `inter_node_...` describe."""

    def __post_init__(self) -> None:
        refuse_all(_wrong_fields({f.name: getattr(self, f.name) for f in fields(self)}))
        # An int in place of a float would overflow numpy's 64 bits where it is multiplied.
        for name, allowed in CLUSTER_RANGES.items():
            value = getattr(self, name)
            if name in _TABLES:
                object.__setattr__(self, name, {key: float(each) for key, each in value.items()})
            elif not allowed.is_whole:
                object.__setattr__(self, name, float(value))

    @property
    def has_cpu_devices(self) -> bool:
        """Whether a device is a CPU core; otherwise it is an accelerator."""
        return "cpu" in self.device.lower()

    @property
    def is_measured(self) -> bool:
        """Whether `layout-tuner calibrate` measured the constants; the peak is a product's then."""
        return self.source.startswith(MEASURED_SOURCE)

    @property
    def default_precision(self) -> Precision:
        """The usual precision of large models here.

        It is bf16 where a peak is stated for it, else fp16, else fp32. On CPU cores fp32 comes
        first, because most have no matrix units for 16 bits. A cluster without peaks gets fp32,
        which every device supports.
        """
        half: tuple[Precision, ...] = ("bf16", "fp16")
        order = ("fp32", *half) if self.has_cpu_devices else (*half, "fp32")
        return next((each for each in order if each in self.peak_flops_per_s), "fp32")

    @property
    def num_devices(self) -> int:
        """Devices of the whole machine."""
        return self.num_nodes * self.devices_per_node

    @property
    def network(self) -> tuple[NetworkLevel, ...]:
        """The levels from the smallest to the whole cluster, with what they do not state.

        Up to the node they have no bandwidth where none is stated: it goes by the number of ranks.
        """
        near = NetworkLevel(name="node", devices=self.devices_per_node)
        levels = list(self.levels or (near,))
        if levels[-1].devices or self.domain_devices > max(each.devices or 0 for each in levels):
            levels.append(NetworkLevel(name="cluster"))
        for place, level in enumerate(levels):
            is_near = level.devices is not None and level.devices <= self.devices_per_node
            usual = None if is_near else self.inter_node_bandwidth_bytes_per_s
            usual_s = self.intra_node_latency_s if is_near else self.inter_node_latency_s
            levels[place] = replace(
                level,
                bandwidth_bytes_per_s=level.bandwidth_bytes_per_s or usual,
                latency_s=level.latency_s or usual_s,
            )
        return tuple(levels)

    @property
    def levels_in_words(self) -> str:
        """The stated levels with their devices, as "node 8, group 1,024, system"."""
        return ", ".join(
            f"{each.name} {each.devices:,}" if each.devices else each.name for each in self.levels
        )

    @property
    def domain_devices(self) -> int:
        """Devices of a domain: of the largest level at least half as fast as a node, as NVLink's.

        It is a node where the network has no such level.
        """
        inside = self.intra_node_bandwidth_bytes_per_s
        node_rate = inside[max(inside)] if inside else self.memory_bandwidth_bytes_per_s / 10.0
        domain = self.devices_per_node
        for level in self.levels:
            rate = level.bandwidth_bytes_per_s or self.inter_node_bandwidth_bytes_per_s
            devices = level.devices or self.num_devices
            if devices > domain and 2 * rate >= node_rate:
                domain = devices
        return domain

    def with_devices_per_node(self, devices: int) -> Cluster:
        """The cluster with other nodes.

        With fewer devices of each, as where a job does not use all, the levels shrink with the
        nodes, and levels of a part of a node that do not divide them go. Larger nodes than those
        of the cluster are a level of its network that is described as a node: there the levels go.
        """
        node, levels = self.devices_per_node, list[NetworkLevel]()
        for level in self.levels if devices <= node else ():
            size = level.devices
            if size is None or size >= node:
                levels.append(replace(level, devices=size and size * devices // node))
            elif size < devices and devices % size == 0:
                levels.append(level)
        return replace(self, devices_per_node=devices, levels=tuple(levels))

    def to_mapping(self) -> dict[str, Any]:
        """The fields by name, as plain JSON values: keys become strings; levels only if stated."""
        links = self.intra_node_bandwidth_bytes_per_s.items()
        values = asdict(self) | {_LINKS: {str(ranks): value for ranks, value in links}}
        values["levels"] = [level.to_mapping() for level in self.levels]
        optional = ("levels", "node_hour_price")
        return {name: value for name, value in values.items() if value or name not in optional}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Builds a cluster from its fields; ClusterInvalidError if one is wrong or missing."""
        known = tuple(f.name for f in fields(cls))
        given = read_mapping(mapping, ClusterInvalidError, "the cluster")
        values = {name: value for name, value in given.items() if name in known}
        problems = Problems()
        problems.add(*unknown_names(given, known, ClusterInvalidError, "cluster field"))
        for name in REQUIRED_FIELDS:
            if values.get(name) is None:
                problems.add(ClusterInvalidError.of_field(name, f"the cluster's {name} is missing"))
        with problems.collecting():
            values[_LINKS] = _read_links(values.pop(_LINKS, {}))
        with problems.collecting():
            if (levels := values.pop("levels", None)) is not None:
                values["levels"] = read_levels(levels)
        stated = {name: value for name, value in values.items() if value is not None}
        problems.add(*_wrong_fields(stated))
        problems.refuse()
        return cls(**values)


def _wrong_fields(values: Mapping[str, Any]) -> Iterator[ClusterInvalidError]:
    for name, value in values.items():
        for problem in _problems(name, value):
            yield ClusterInvalidError.of_field(name, problem)
    node = values.get("devices_per_node")
    if CLUSTER_RANGES["devices_per_node"].problem(node):
        node = None  # one sentence says so already
    for problem in level_problems(values.get("levels", ()), node):
        yield ClusterInvalidError.of_field("levels", problem)


def _problems(name: str, value: object) -> Iterator[str]:
    if name == "name" and not is_name(value):
        yield f"name={shown(value)} is not a string of 1 to {MAX_NAME_LENGTH} characters"
    elif name in _TEXTS and not is_line(value):
        yield (
            f"{name}={shown(value)} is not a line of printable text, at most {MAX_TEXT_LENGTH} "
            "characters long"
        )
    elif name == "node_hour_price" and value != "" and read_price(value) is None:
        yield f"{name}={shown(value)} is not an amount with a currency, such as 1.20 EUR"
    elif name in _TABLES:
        yield from _problems_of_table(name, value)
    elif name == "shared_intra_node_path" and not isinstance(value, bool):
        yield f"{name}={shown(value)} is not true or false"
    elif name in CLUSTER_RANGES and (problem := CLUSTER_RANGES[name].problem(value)):
        yield f"{name}={problem}"


def _problems_of_table(name: str, table: object) -> Iterator[str]:
    if not isinstance(table, Mapping):
        yield f"{name}={shown(table)} is not a mapping"
        return
    for key, value in table.items():
        if name == _LINKS and (problem := whole_number_problem(key)):
            yield f"{name}: {problem}"
        elif name != _LINKS and key not in PRECISIONS:
            yield f"{name}[{shown(key)}] is not one of {', '.join(PRECISIONS)}"
        if problem := CLUSTER_RANGES[name].problem(value):
            yield f"{name}[{shown(key)}]={problem}"


def read_price(text: object) -> tuple[float, str] | None:
    """The amount and the currency of a price such as "1.20 EUR"; None: it is none."""
    written = _PRICE.fullmatch(text) if isinstance(text, str) else None
    return (float(written[1]), written[2]) if written else None


REQUIRED_FIELDS: Final = ("name", "device", "num_nodes", "devices_per_node", "device_memory_bytes")
"""Fields of a cluster without a default."""


def _read_links(links: object) -> dict[int, float]:
    """The table of links; its keys are whole numbers, or strings of them as in JSON."""
    refused = partial(ClusterInvalidError.of_field, _LINKS)
    if not isinstance(links, Mapping):
        raise refused(f"{_LINKS}={shown(links)} is not a mapping from numbers of ranks")
    table: dict[int, float] = {}
    for key, bandwidth in links.items():
        ranks = int(key) if isinstance(key, str) and _RANKS.fullmatch(key) else key
        if isinstance(ranks, bool) or not isinstance(ranks, int):
            raise refused(
                f"{_LINKS}: {shown(key)} is not a number of ranks; the table maps from numbers of "
                "ranks, as 2 or 8"
            )
        if ranks in table:
            raise refused(f"{_LINKS}: {ranks} is there more than once")
        table[ranks] = bandwidth
    return table


_TEXTS: Final = ("device", "source")
_LINKS: Final = "intra_node_bandwidth_bytes_per_s"
_TABLES: Final = ("peak_flops_per_s", _LINKS)
_PRICE: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ([A-Z]{3})")
_RANKS: Final = re.compile(r"[1-9][0-9]{0,8}")


def detect_local_cpu(devices_per_node: int | None = None, *, root: Path = ROOT) -> Cluster:
    """This machine as a cluster of one node: one device a core, and an equal share of the memory.

    A quarter of the memory is left to the service, Ray and the operating system. Cores and memory
    are those that this process may use, within the limits of a container.

    Raises:
        ClusterInvalidError: more devices than there are cores.
    """
    cores = usable_cores(root)
    devices = cores if devices_per_node is None else devices_per_node
    if problem := whole_number_problem(devices):
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
