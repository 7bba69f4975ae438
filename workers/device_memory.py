"""What of a node's memory is in use, by device, seen from outside: no context is created.

AMD's driver tells it in /sys/class/drm, its KFD which of the devices there is which to ROCm (Linux,
Documentation/gpu/amdgpu/driver-misc.rst, and drivers/gpu/drm/amd/amdkfd/kfd_topology.c). NVIDIA's
is asked by `workers.nvidia_memory`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from search_spaces.machine import ROOT
from workers.errors import DeviceHiddenError
from workers.rank_task import RankTask
from workers.visible_devices import CUDA, HIP, ROCR, rank_variables

_KFD_NODES: Final = "sys/class/kfd/kfd/topology/nodes"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUse:
    """How much of one device's memory is in use, by whomever."""

    names: tuple[str, str]
    """What lists of visible devices call it: its number and its UUID."""
    used_bytes: int | None
    """None: it does not tell."""


def host_bytes_in_use(root: Path = ROOT) -> int:
    """Memory of the host that is neither available nor private to a living process.

    That is what a group can leave behind when all its processes have been reaped: shared memory,
    files in memory, huge pages, and what a driver pinned for it. Private memory then is another's.
    """
    sizes = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        sizes[name] = int(value.split()[0]) * 1024
    total, available, private = (
        sizes.get(name, 0) for name in ("MemTotal", "MemAvailable", "AnonPages")
    )
    return total - available - private


def device_name(task: RankTask, environment: Mapping[str, str], *, amd: bool) -> str:
    """What the node calls the device of a rank: a number or a UUID; empty: it is hidden."""
    try:
        seen = rank_variables(task.device_index, environment)
    except DeviceHiddenError:  # the rank itself fails and says so
        return ""
    if not amd:
        return seen[CUDA] or ""
    below, entry = seen[ROCR], seen[HIP] or ""
    return below.split(",")[int(entry)] if below and entry.isdecimal() else entry


def amd_devices(root: Path = ROOT) -> tuple[DeviceUse, ...]:
    """AMD's devices that this process may use, in ROCm's order; none where there are none.

    Args:
        root: where the kernel's files are.
    """
    nodes = [path for path in (root / _KFD_NODES).glob("*") if path.name.isdecimal()]
    found: list[DeviceUse] = []
    for node in sorted(nodes, key=lambda path: int(path.name)):
        properties = _properties(node / "properties")
        if not properties.get("simd_count"):  # a processor's
            continue
        device = root / f"sys/class/drm/renderD{properties.get('drm_render_minor')}/device"
        uuid = f"GPU-{properties.get('unique_id', 0):016x}"
        used_bytes = _number(device / "mem_info_vram_used")
        found.append(DeviceUse(names=(str(len(found)), uuid), used_bytes=used_bytes))
    return tuple(found)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except OSError:  # it is not there, or not for us
        return None


def _properties(path: Path) -> dict[str, int]:
    """A node of the KFD; nothing of one that was not given to this process."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, value in (line.split() for line in lines)}
