"""Cluster presets, and the reading of a user's description of a cluster."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any, Final

from layout_tuner.documents.reading import (
    Problems,
    is_positive_number,
    nearest,
    read_mapping,
    shown,
    unknown_names,
)
from layout_tuner.errors import ClusterInvalidError
from layout_tuner.search_spaces.clusters.cluster import (
    CLUSTER_RANGES,
    MAX_DEVICE_MEMORY_BYTES,
    REQUIRED_FIELDS,
    UNKNOWN_DEVICE,
    Cluster,
    detect_local_cpu,
)
from layout_tuner.search_spaces.clusters.device_peaks import DEVICE_PEAKS
from layout_tuner.search_spaces.clusters.network_levels import NetworkLevel
from layout_tuner.search_spaces.clusters.usual_constants import unusual_constants
from layout_tuner.units import GIB

LOCAL_CPU: Final = "local-cpu"
"""The cluster that is detected instead of listed."""

_MAX_DEVICE_MEMORY_GB: Final = MAX_DEVICE_MEMORY_BYTES // GIB

_DATA_SHEET: Final = "{} data sheet; bandwidths are nominal, inside a node 80 % of that"

_of_eight: Final = partial(Cluster, num_nodes=128, devices_per_node=8)
"""A cluster of any size, of nodes with eight devices."""


def _reached(nominal_bytes_per_s: float) -> float:
    """Bandwidth of collectives inside a node: 80 % of the nominal rate in one direction."""
    return 0.8 * nominal_bytes_per_s


def _between(device: str, other: str) -> dict[str, float]:
    """The geometric means of two devices' peaks, in the precisions of both."""
    one, two = DEVICE_PEAKS[device], DEVICE_PEAKS[other]
    return {name: (one[name] * two[name]) ** 0.5 for name in one if name in two}


_NVL72: Final = (
    NetworkLevel(name="tray", devices=4),
    # NVLink's switches connect all trays of a rack at the rate of the links inside a tray, with the
    # latency of a node.
    NetworkLevel(
        name="domain", devices=72, bandwidth_bytes_per_s=_reached(900e9), latency_s=3.4e-6
    ),
    NetworkLevel(name="fabric"),
)
"""The network of racks whose 18 compute trays of four devices are one NVLink domain."""

_CLUSTERS: Final = (
    Cluster(
        name="frontier",
        device="AMD MI250X GCD",
        num_nodes=9856,
        devices_per_node=8,
        device_memory_bytes=64 * GIB,
        peak_flops_per_s=DEVICE_PEAKS["MI250X"],
        memory_bandwidth_bytes_per_s=1.6e12,
        # Not monotonic: four ranks span two packages over the thinnest links.
        intra_node_bandwidth_bytes_per_s={2: 129e9, 4: 52e9, 8: 135e9},
        # Measured with all eight devices of a node in different groups, on up to 1,024 devices.
        inter_node_bandwidth_bytes_per_s=5e9,
        levels=(
            NetworkLevel(name="pair", devices=2),  # the two GCDs of a package
            # Groups of which no two ranks share a package: measured are 50 GB/s for 2 ranks and 72
            # for 4 over two groups, 36 for 2 over four. Four neighbours stay at 52.
            NetworkLevel(name="node", devices=8, bandwidth_bytes_per_s=50e9),
            NetworkLevel(name="group", devices=1024),  # of the dragonfly: 128 nodes of a cabinet
            # Groups have 4 links of 25 GB/s to each of 73 others, 7.1 GB/s a device: more than the
            # 5 that a device reaches in its group, so that they are no slower level.
            NetworkLevel(name="system"),
        ),
        source="OLCF user guide; collectives as measured in arXiv:2502.08145",
    ),
    Cluster(
        name="perlmutter",
        device="NVIDIA A100-SXM4-40GB",
        num_nodes=1536,
        devices_per_node=4,
        device_memory_bytes=40 * GIB,
        peak_flops_per_s=DEVICE_PEAKS["A100"],
        memory_bandwidth_bytes_per_s=1.555e12,
        intra_node_bandwidth_bytes_per_s={2: 80e9, 4: 200e9},
        inter_node_bandwidth_bytes_per_s=25e9,
        source="NERSC documentation and NVIDIA's data sheet; bandwidths are nominal",
    ),
    _of_eight(
        name="a100-sxm",
        device="NVIDIA A100-SXM4-80GB",
        device_memory_bytes=80 * GIB,
        peak_flops_per_s=DEVICE_PEAKS["A100"],
        memory_bandwidth_bytes_per_s=2.039e12,
        intra_node_bandwidth_bytes_per_s={2: 230e9, 4: 230e9, 8: 230e9},
        inter_node_bandwidth_bytes_per_s=25e9,
        source="NVIDIA's data sheet; bandwidths are nominal",
    ),
    _of_eight(
        name="h100-sxm",
        device="NVIDIA H100-SXM5-80GB",
        device_memory_bytes=80 * GIB,
        peak_flops_per_s=DEVICE_PEAKS["H100"],
        memory_bandwidth_bytes_per_s=3.35e12,
        intra_node_bandwidth_bytes_per_s={2: 360e9, 4: 360e9, 8: 360e9},
        inter_node_bandwidth_bytes_per_s=50e9,
        source="NVIDIA's data sheet; bandwidths are nominal",
    ),
    Cluster(
        name="a100-sxm-4",
        # The board of JUWELS Booster, Leonardo and others, here with NVIDIA's 80 GB devices.
        device="NVIDIA A100-SXM4-80GB",
        num_nodes=128,
        devices_per_node=4,
        device_memory_bytes=80 * GIB,
        peak_flops_per_s=DEVICE_PEAKS["A100"],
        memory_bandwidth_bytes_per_s=2.039e12,  # A100 80GB data sheet
        # HGX A100 4-GPU has no NVSwitch: each pair has 4 links of 25 GB/s each way.
        intra_node_bandwidth_bytes_per_s={2: _reached(100e9), 4: _reached(300e9)},
        inter_node_bandwidth_bytes_per_s=25e9,  # one HDR-200 port a device
        source=_DATA_SHEET.format("NVIDIA A100 80GB and HGX A100 4-GPU"),
    ),
    _of_eight(
        name="h200",
        device="NVIDIA H200-SXM5-141GB",
        device_memory_bytes=141 * GIB,
        peak_flops_per_s=DEVICE_PEAKS["H200"],
        memory_bandwidth_bytes_per_s=4.8e12,  # H200 data sheet, HBM3e
        # NVLink 4 with NVSwitch: 18 links of 25 GB/s each way, for a group of any size.
        intra_node_bandwidth_bytes_per_s=dict.fromkeys((2, 4, 8), _reached(450e9)),
        inter_node_bandwidth_bytes_per_s=50e9,  # one NDR-400 port a device, as in DGX H200
        source=_DATA_SHEET.format("NVIDIA H200"),
    ),
    _of_eight(
        name="mi300x",
        device="AMD Instinct MI300X",
        device_memory_bytes=192 * GIB,
        peak_flops_per_s=DEVICE_PEAKS["MI300X"],
        memory_bandwidth_bytes_per_s=5.3e12,  # MI300X data sheet, HBM3
        # No switch: each pair has one Infinity Fabric link of 64 GB/s each way, 7 links a device.
        intra_node_bandwidth_bytes_per_s={
            2: _reached(64e9),
            4: _reached(3 * 64e9),
            8: _reached(7 * 64e9),
        },
        inter_node_bandwidth_bytes_per_s=50e9,  # one 400 Gb/s port a device
        source=_DATA_SHEET.format("AMD Instinct MI300X"),
    ),
    Cluster(
        name="gb200",
        device="NVIDIA GB200",
        num_nodes=18,  # compute trays of one NVL72 rack
        devices_per_node=4,
        # GB200 NVL72 data sheet over its 72 devices: 13.4 TB of HBM3e, 576 TB/s.
        device_memory_bytes=186 * GIB,
        peak_flops_per_s=DEVICE_PEAKS["GB200"],
        memory_bandwidth_bytes_per_s=8e12,
        # NVLink 5: 18 links of 50 GB/s each way.
        intra_node_bandwidth_bytes_per_s=dict.fromkeys((2, 4), _reached(900e9)),
        inter_node_bandwidth_bytes_per_s=50e9,  # one 400 Gb/s port a device
        levels=_NVL72,
        source=_DATA_SHEET.format("NVIDIA GB200 NVL72"),
    ),
    Cluster(
        name="gb300",
        device="NVIDIA GB300",
        num_nodes=18,  # compute trays of one NVL72 rack
        devices_per_node=4,
        # GB300 NVL72 data sheet over its 72 devices: 20 TB of HBM3e, 576 TB/s.
        device_memory_bytes=259 * GIB,
        peak_flops_per_s=DEVICE_PEAKS["GB300"],
        memory_bandwidth_bytes_per_s=8e12,
        intra_node_bandwidth_bytes_per_s=dict.fromkeys((2, 4), _reached(900e9)),
        inter_node_bandwidth_bytes_per_s=100e9,  # one 800 Gb/s port a device
        levels=_NVL72,
        source=_DATA_SHEET.format("NVIDIA GB300 NVL72"),
    ),
    _of_eight(
        name="b200",
        device="NVIDIA B200-SXM-180GB",
        # HGX B200 data sheet over its 8 devices: 1.44 TB of HBM3e, 62 TB/s.
        device_memory_bytes=167 * GIB,
        peak_flops_per_s=DEVICE_PEAKS["B200"],
        memory_bandwidth_bytes_per_s=7.7e12,
        intra_node_bandwidth_bytes_per_s=dict.fromkeys((2, 4, 8), _reached(900e9)),
        inter_node_bandwidth_bytes_per_s=50e9,  # one 400 Gb/s port a device, as in DGX B200
        source=_DATA_SHEET.format("NVIDIA HGX B200"),
    ),
    _of_eight(
        name="b300",
        device="NVIDIA B300-SXM6",
        # HGX B300 data sheet over its 8 devices: 2.1 TB of HBM3e, 64 TB/s.
        device_memory_bytes=244 * GIB,
        peak_flops_per_s=DEVICE_PEAKS["B300"],
        memory_bandwidth_bytes_per_s=8e12,
        intra_node_bandwidth_bytes_per_s=dict.fromkeys((2, 4, 8), _reached(900e9)),
        inter_node_bandwidth_bytes_per_s=100e9,  # one 800 Gb/s port a device, as in DGX B300
        source=_DATA_SHEET.format("NVIDIA HGX B300"),
    ),
    Cluster(
        name="alps",
        device="NVIDIA GH200-96GB",
        num_nodes=2688,  # docs.cscs.ch/alps/hardware
        devices_per_node=4,
        device_memory_bytes=96 * GIB,  # GH200 data sheet, HBM3
        peak_flops_per_s=DEVICE_PEAKS["GH200"],
        memory_bandwidth_bytes_per_s=4e12,  # GH200 data sheet, HBM3
        # Six NVLink 4 links, 150 GB/s each way, between each pair (arXiv:2408.11556).
        intra_node_bandwidth_bytes_per_s={2: _reached(150e9), 4: _reached(450e9)},
        inter_node_bandwidth_bytes_per_s=25e9,  # a Slingshot port of 200 Gb/s a device, likewise
        source="CSCS documentation and NVIDIA's GH200 data sheet; bandwidths are nominal, inside a node "
        "80 % of that",
    ),
    _of_eight(
        name="h800",
        device="NVIDIA H800-SXM5-80GB",
        device_memory_bytes=80 * GIB,
        peak_flops_per_s=DEVICE_PEAKS["H800"],
        memory_bandwidth_bytes_per_s=3.35e12,  # H800 data sheet, HBM3
        # NVLink of 400 GB/s, 200 each way; about 160 are reached (arXiv:2505.09343, section 4.1).
        intra_node_bandwidth_bytes_per_s=dict.fromkeys((2, 4, 8), _reached(200e9)),
        inter_node_bandwidth_bytes_per_s=50e9,  # one NDR-400 port a device, likewise
        source=_DATA_SHEET.format("NVIDIA H800"),
    ),
    _of_eight(
        name="h100-hbm2e",
        # The device of torchtitan's benchmarks, limited to 500 W: 96 GB, 2.4 TB/s.
        device="NVIDIA H100 96GB HBM2e",
        device_memory_bytes=96 * GIB,
        peak_flops_per_s=_between("H100", "H100 NVL"),
        memory_bandwidth_bytes_per_s=2.4e12,
        intra_node_bandwidth_bytes_per_s=dict.fromkeys((2, 4, 8), _reached(450e9)),
        inter_node_bandwidth_bytes_per_s=50e9,  # 400 Gb/s a device, likewise
        source="arXiv:2410.06511: a peak between those of NVIDIA's data sheets of H100 SXM and NVL; "
        "bandwidths are nominal, inside a node 80 % of that",
    ),
    _of_eight(
        name="a100-pcie",
        device="NVIDIA A100-PCIE-80GB",
        device_memory_bytes=80 * GIB,
        peak_flops_per_s=DEVICE_PEAKS["A100"],
        memory_bandwidth_bytes_per_s=1.935e12,  # A100 80GB PCIe data sheet
        # All-reduces of 2, 4 and 8 devices of one node in SimuMax (github.com/MooreThreads/SimuMax,
        # 4dcaae51, configs/system/a100_pcie.json): 69, 69 and 41 % of 30 GB/s.
        intra_node_bandwidth_bytes_per_s={2: 20.7e9, 4: 20.7e9, 8: 12.4e9},
        # There, groups of 4 beside tp 2 get 7 to 7.7 GB/s, and groups of 2 beside tp 4 get 4.
        shared_intra_node_path=True,
        inter_node_bandwidth_bytes_per_s=12.5e9,  # a 100 Gb/s port a device
        source="NVIDIA A100 80GB PCIe data sheet; collectives as measured for SimuMax",
    ),
    _of_eight(
        name="mi355x",
        device="AMD Instinct MI355X",
        device_memory_bytes=288 * GIB,
        peak_flops_per_s=DEVICE_PEAKS["MI355X"],
        memory_bandwidth_bytes_per_s=8e12,  # MI355X data sheet, HBM3E
        # As MI300X, with links of 76.8 GB/s each way.
        intra_node_bandwidth_bytes_per_s={
            2: _reached(76.8e9),
            4: _reached(3 * 76.8e9),
            8: _reached(7 * 76.8e9),
        },
        inter_node_bandwidth_bytes_per_s=50e9,  # one 400 Gb/s port a device
        source=_DATA_SHEET.format("AMD Instinct MI355X"),
    ),
    _of_eight(
        name="v100",
        device="NVIDIA V100-SXM2-32GB",
        device_memory_bytes=32 * GIB,
        peak_flops_per_s=DEVICE_PEAKS["V100"],
        memory_bandwidth_bytes_per_s=0.9e12,  # V100 data sheet
        # DGX-1: six NVLink 2 links of 25 GB/s each way a device. Of the other devices of its half
        # of the node, one has two of them and the others one each.
        intra_node_bandwidth_bytes_per_s={
            2: _reached(25e9),
            4: _reached(100e9),
            8: _reached(150e9),
        },
        inter_node_bandwidth_bytes_per_s=6.25e9,  # four 100 Gb/s ports a node
        source=_DATA_SHEET.format("NVIDIA V100 and DGX-1"),
    ),
    Cluster(
        name="gh200",
        # Nodes of four superchips, as in JUPITER and Alps.
        device="NVIDIA GH200-96GB",
        num_nodes=128,
        devices_per_node=4,
        device_memory_bytes=96 * GIB,
        peak_flops_per_s=DEVICE_PEAKS["GH200"],
        memory_bandwidth_bytes_per_s=4e12,  # GH200 data sheet, HBM3
        intra_node_bandwidth_bytes_per_s={2: _reached(150e9), 4: _reached(450e9)},  # as in alps
        inter_node_bandwidth_bytes_per_s=25e9,  # one 200 Gb/s port a device
        source=_DATA_SHEET.format("NVIDIA GH200"),
    ),
)

CLUSTER_PRESETS: Final[Mapping[str, Cluster]] = {cluster.name: cluster for cluster in _CLUSTERS}
"""Every listed cluster by name; `local-cpu` is detected instead."""

_GENERIC: Final[Mapping[str, Any]] = {
    "device": UNKNOWN_DEVICE,
    "num_nodes": 1,
    "devices_per_node": 8,
    "device_memory_bytes": 80 * GIB,
    "memory_bandwidth_bytes_per_s": 2e12,
    "intra_node_bandwidth_bytes_per_s": {2: 200e9, 4: 200e9, 8: 200e9},
    "inter_node_bandwidth_bytes_per_s": 25e9,
}
# Peaks are not guessed: where none is stated, the worker measures it.


def resolve_cluster(described: str | Mapping[str, Any]) -> tuple[Cluster, str | None]:
    """The cluster that a user described, and a warning of guessed and of unusual constants.

    A description is a preset's name, or a mapping of `Cluster` fields. A mapping may start from a
    preset (`{preset: frontier, num_nodes: 16}`), and may give the memory as `device_memory_gb` (of
    2^30 bytes). A mapping with a new `name` gets generic constants for all missing fields; the
    warning lists them. A mapping with a preset's `name` must have no other field, or all required
    ones, as `Cluster.to_mapping` writes them.

    Raises:
        ClusterInvalidError: a preset or a field is unknown or impossible, local-cpu is larger than
            this machine, or a preset's name has some of the required fields only.
    """
    if isinstance(described, str):
        if not is_cluster_preset(described):
            raise unknown_cluster(described)
        described = {"preset": described}
    values = read_mapping(described, ClusterInvalidError, "the cluster")
    known = [f.name for f in fields(Cluster)]
    names = ["preset", "device_memory_gb", *known]
    problems = Problems()
    problems.add(*unknown_names(values, names, ClusterInvalidError, "cluster field"))
    values = {name: value for name, value in values.items() if name in names}
    with problems.collecting():
        _read_memory(values)
    with problems.collecting():
        if set(values) == {"name"} and is_cluster_preset(values["name"]):
            values = {"preset": values["name"]}
        is_preset = "preset" in values
        cluster, guessed = (_from_preset(values), None) if is_preset else _from_generic(values)
    problems.refuse()
    return cluster, "; ".join(filter(None, (guessed, unusual_constants(cluster)))) or None


def is_cluster_preset(name: object) -> bool:
    """Whether a name is a cluster preset, or local-cpu."""
    return isinstance(name, str) and (name == LOCAL_CPU or name in CLUSTER_PRESETS)


_OF_A_DEVICE: Final = (
    "device",
    "peak_flops_per_s",
    "memory_bandwidth_bytes_per_s",
    "intra_node_bandwidth_bytes_per_s",
    "shared_intra_node_path",
    "source",
)
"""Fields of a cluster that its device decides."""


def with_speeds_of(cluster: Cluster, device: str) -> Cluster | None:
    """The cluster with the speeds of another device; None: no preset is for the device.

    The device is the name of a preset, or its device with or without the vendor, in any case and
    spacing; what follows a comma may describe it. Its peaks, memory bandwidth and links inside a
    node replace the cluster's; so do the levels of its network where nodes have as many devices.
    """
    asked = _squeezed(device.partition(",")[0])
    for preset in _CLUSTERS:
        names = (preset.name, preset.device, preset.device.partition(" ")[2])
        if asked in map(_squeezed, names):
            levels = cluster.levels
            if preset.devices_per_node == cluster.devices_per_node:
                levels = preset.levels
            speeds = {name: getattr(preset, name) for name in _OF_A_DEVICE}
            return replace(cluster, levels=levels, **speeds)
    return None


def _squeezed(text: str) -> str:
    return "".join(text.split()).lower()


def unknown_cluster(
    name: str, *, own: Collection[str] = (), searched: str = ""
) -> ClusterInvalidError:
    """The error about an unknown name of a cluster.

    `own` are clusters that are stored in the service; `searched` are other places that were
    searched, as the end of a sentence.
    """
    known = [LOCAL_CPU, *CLUSTER_PRESETS, *own]
    return ClusterInvalidError(
        f"unknown cluster {shown(name)}{nearest(name, known)}{searched}; describe a cluster of "
        "your own as a mapping with name: and its fields, in a file where a command asks for it"
    )


def _read_memory(values: dict[str, Any]) -> None:
    if "device_memory_gb" not in values:
        return
    gigabytes = values.pop("device_memory_gb")
    refused = partial(ClusterInvalidError.of_field, "device_memory_gb")
    if "device_memory_bytes" in values:
        raise refused("give device_memory_gb or device_memory_bytes, not both")
    if not is_positive_number(gigabytes):
        raise refused(f"device_memory_gb={shown(gigabytes)} is not a number over 0")
    if gigabytes > _MAX_DEVICE_MEMORY_GB:
        raise refused(
            f"device_memory_gb={shown(gigabytes)} is more than {_MAX_DEVICE_MEMORY_GB}, the largest "
            "that is accepted"
        )
    values["device_memory_bytes"] = int(gigabytes * GIB)


def _from_preset(values: dict[str, Any]) -> Cluster:
    preset = values.pop("preset")
    if not is_cluster_preset(preset):
        choices = [LOCAL_CPU, *CLUSTER_PRESETS]
        raise ClusterInvalidError.of_field(
            "preset", f"unknown cluster preset {shown(preset)}{nearest(preset, choices)}"
        )
    if preset != LOCAL_CPU:
        described = CLUSTER_PRESETS[preset]
        if "levels" not in values and "devices_per_node" in values:
            node = values["devices_per_node"]
            if CLUSTER_RANGES["devices_per_node"].problem(node) is None:
                described = described.with_devices_per_node(node)
        return Cluster.from_mapping(described.to_mapping() | values)
    base = detect_local_cpu(values.pop("devices_per_node", None))
    if values.get("num_nodes", 1) != 1:
        raise ClusterInvalidError.of_field(
            "num_nodes",
            f"num_nodes={shown(values['num_nodes'])}: local-cpu is this machine, one node",
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
    if not is_cluster_preset(cluster.name):
        why = f"is not a preset ({', '.join([LOCAL_CPU, *CLUSTER_PRESETS])})"
    return cluster, f"cluster {cluster.name!r} {why}: generic constants stand in for {listed}"


def _refuse_half_a_preset(values: Mapping[str, Any], guessed: Mapping[str, Any]) -> None:
    """Refuses a preset's name with missing required fields, which would be guessed."""
    lacking = [name for name in REQUIRED_FIELDS if name in guessed]
    if lacking and is_cluster_preset(values["name"]):
        preset = values["name"]
        raise ClusterInvalidError(
            f"name={preset!r} is a preset's, and {', '.join(lacking)} would have to be guessed; to "
            f"start from the preset say {{preset: {preset}, ...}} in place of {{name: {preset}, "
            "...}, or write the cluster out"
        )
