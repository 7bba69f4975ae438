"""What of a node's memory is in use, by device, seen from outside: no context is created.

AMD's driver tells it in /sys/class/drm, its KFD which of the devices there is which to ROCm (Linux,
Documentation/gpu/amdgpu/driver-misc.rst, and drivers/gpu/drm/amd/amdkfd/kfd_topology.c); NVIDIA's
tells it through nvidia-smi, in a process of its own that can be left alone if the driver hangs.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from search_spaces.machine import ROOT
from workers.errors import DeviceHiddenError
from workers.rank_task import RankTask
from workers.visible_devices import CUDA, HIP, ROCR, rank_variables

_KFD_NODES: Final = "sys/class/kfd/kfd/topology/nodes"
_MIB: Final = 1 << 20
NVIDIA_SMI: Final = (
    "nvidia-smi",
    "--query-gpu=index,uuid,memory.used",
    "--format=csv,noheader,nounits",
)
_NVIDIA_WITHIN_S: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUse:
    """How much of one device's memory is in use, by whomever."""

    names: tuple[str, str]
    """What lists of visible devices call it: its number and its UUID."""
    used_bytes: int | None
    """None: it does not tell."""


def devices_in_use(
    root: Path = ROOT, nvidia_smi: Sequence[str] = NVIDIA_SMI
) -> tuple[DeviceUse, ...]:
    """The devices that this process may use, in their runtime's order; none where nothing tells.

    Args:
        root: where the kernel's files are.
        nvidia_smi: the command that lists number, UUID and MiB in use.
    """
    return _amd_devices(root) or _nvidia_devices(nvidia_smi)


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


def is_amd(root: Path = ROOT) -> bool:
    """Whether the devices are AMD's."""
    return bool(_amd_devices(root))


def _amd_devices(root: Path) -> tuple[DeviceUse, ...]:
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


def _nvidia_devices(command: Sequence[str]) -> tuple[DeviceUse, ...]:
    try:
        listed = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_NVIDIA_WITHIN_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # not there, or it can't tell
        return ()
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.stdout.splitlines()]
    return tuple(
        # "[N/A]" where the device shares the host's memory.
        DeviceUse(names=(index, uuid), used_bytes=int(mib) * _MIB if mib.isdecimal() else None)
        for index, uuid, mib in rows
    )
