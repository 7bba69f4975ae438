"""Waits until the memory that a group of ranks used on a node is free again.

The memory in use on a device is read without a context on any device:

AMD: the driver writes it to /sys/class/drm, and its KFD lists the devices in the order of ROCm
(Linux, Documentation/gpu/amdgpu/driver-misc.rst, and drivers/gpu/drm/amd/amdkfd/kfd_topology.c).
NVIDIA: the management library, through the bindings of nvidia-ml-py
(https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html).
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from layout_tuner.process_resources import ROOT, kernel_text
from layout_tuner.protocol.connection.backoff import Backoff
from layout_tuner.units import memory
from layout_tuner.workers.errors import DeviceHiddenError, MemoryNotBackError
from layout_tuner.workers.ranks.rank_task import RankTask
from layout_tuner.workers.ranks.visible_devices import CUDA, HIP, ROCR, rank_variables

_KFD_NODES: Final = "sys/class/kfd/kfd/topology/nodes"

_DRIVER_ANSWERS_WITHIN_S: Final = 10.0

WAIT_S: Final = 10.0
"""Drivers free the memory of an ended process within about a second."""

DEVICE_SLACK_BYTES: Final = 512 << 20
"""Memory that a driver keeps for itself after the first use of a device."""

HOST_SLACK_BYTES: Final = 2 << 30
"""Memory that other processes may put into shared memory while a group runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUse:
    """How much of one device's memory is in use, by any process."""

    names: tuple[str, str]
    """The device in lists of visible devices: its number and its UUID."""
    used_bytes: int | None
    """None: the driver does not report it."""


def host_bytes_in_use(root: Path = ROOT) -> int:
    """Memory of the host that is neither available nor private to a living process.

    A group can leave such memory behind when all its processes have been reaped: shared memory,
    files in memory, huge pages, and memory that a driver pinned. Private memory belongs to
    processes that still run.
    """
    sizes = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        sizes[name] = int(value.split()[0]) * 1024
    total, available, private = (
        sizes.get(name, 0) for name in ("MemTotal", "MemAvailable", "AnonPages")
    )
    return total - available - private


def visible_names(environment: Mapping[str, str], *, amd: bool | None = None) -> tuple[str, ...]:
    """The node's names for the devices that a rank's environment shows, in their order.

    Numbers or UUIDs. Whether the node has AMD's devices is looked up where `amd` is None.
    """
    amd = bool(amd_devices()) if amd is None else amd
    entries = environment.get(HIP if amd else CUDA, "").split(",")
    below = environment.get(ROCR, "").split(",") if amd and environment.get(ROCR) else None
    return tuple(below[int(entry)] if below and entry.isdecimal() else entry for entry in entries)


def devices_in_use(names: Iterable[str]) -> dict[str, int]:
    """Bytes in use on devices of this machine, by name; devices without a figure are left out."""
    return _used_bytes(amd_devices() or _NVIDIA(), names)


def _used_bytes(devices: Sequence[DeviceUse], names: Iterable[str]) -> dict[str, int]:
    return {
        name: device.used_bytes
        for name in names
        for device in devices
        if device.used_bytes is not None and _is(device, name)
    }


def amd_devices(root: Path = ROOT) -> tuple[DeviceUse, ...]:
    """AMD's devices that this process may use, in ROCm's order; none where there are none."""
    nodes = [path for path in (root / _KFD_NODES).glob("*") if path.name.isdecimal()]
    found: list[DeviceUse] = []
    for node in sorted(nodes, key=lambda path: int(path.name)):
        properties = _properties(node / "properties")
        if not properties.get("simd_count"):  # a processor
            continue
        device = root / f"sys/class/drm/renderD{properties.get('drm_render_minor')}/device"
        uuid = f"GPU-{properties.get('unique_id', 0):016x}"
        used = kernel_text(device / "mem_info_vram_used")
        names, used_bytes = (str(len(found)), uuid), int(used) if used else None
        found.append(DeviceUse(names=names, used_bytes=used_bytes))
    return tuple(found)


def _properties(path: Path) -> dict[str, int]:
    """The properties of a node of the KFD; none where this process may not read them."""
    lines = kernel_text(path).splitlines()
    return {name: int(value) for name, value in (line.split() for line in lines)}


class NvidiaDevices:
    """Lists NVIDIA's devices. Any thread may call it.

    The management library answers within microseconds, or hangs with the driver: it is called in a
    thread, which is then left behind.

    Args:
        nvml: the functions of the management library; None: those of pynvml.
        within_s: how long the driver may take to answer.
    """

    def __init__(self, *, nvml: Any = None, within_s: float = _DRIVER_ANSWERS_WITHIN_S) -> None:
        self._nvml = nvml
        self._within_s = within_s
        self._hangs = False

    def __call__(self) -> tuple[DeviceUse, ...]:
        """The devices that this process may use; none where the library does not answer."""
        if self._hangs:
            return ()
        answers: list[tuple[DeviceUse, ...]] = []
        thread = threading.Thread(target=lambda: answers.append(self._list()), daemon=True)
        thread.start()
        thread.join(self._within_s)
        self._hangs = thread.is_alive()  # no second thread waits for the same driver
        return answers[0] if answers else ()

    def _list(self) -> tuple[DeviceUse, ...]:
        nvml = self._nvml or importlib.import_module("pynvml")
        try:
            nvml.nvmlInit()  # a second call only counts
            return tuple(_nvml_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        except nvml.NVMLError:  # there is no driver
            return ()


def _nvml_device(nvml: Any, index: int) -> DeviceUse:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    names = (str(index), nvml.nvmlDeviceGetUUID(handle))
    try:
        return DeviceUse(names=names, used_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).used)
    except nvml.NVMLError:  # not supported, where the device shares the host's memory
        return DeviceUse(names=names, used_bytes=None)


_NVIDIA: Final = NvidiaDevices()
"""This machine's devices, for samples."""


@dataclass
class MemoryWatch:
    """Notes the memory in use before each group of a node, and waits until it is free again.

    A device is compared with its minimum while no rank ran on it, so that small losses add up and
    are noticed. The host is compared with the moment before the first of the groups that run side
    by side, after the last of them has ended: before that, memory that one group left can't be
    distinguished from memory that the others use. Any thread may call it.
    """

    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """Of the zygote; it decides which devices the ranks see."""
    root: Path = ROOT
    """Where the kernel's files are."""
    nvidia_devices: Callable[[], Sequence[DeviceUse]] = field(default_factory=NvidiaDevices)
    wait_s: float = WAIT_S
    """How long freeing memory may take."""
    device_slack_bytes: int = DEVICE_SLACK_BYTES
    """How much more a device may use than before."""
    host_slack_bytes: int = HOST_SLACK_BYTES
    """How much more the host may use than before."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._names_by_group: dict[str, frozenset[str]] = {}
        self._idle_bytes: dict[str, int] = {}
        self._host_bytes = 0

    def group_starts(self, tasks: Sequence[RankTask]) -> None:
        """Notes the memory in use; to be called before the ranks of a group are forked."""
        names = self._device_names(tasks)
        with self._lock:
            if not self._names_by_group:
                self._host_bytes = host_bytes_in_use(self.root)
            self._names_by_group[tasks[0].group] = names
            unknown = names - self._idle_bytes.keys()
        if unknown:
            self._take(self._in_use(unknown))

    def forget(self, group: str) -> None:
        """Removes a group without waiting for its memory."""
        with self._lock:
            self._names_by_group.pop(group, None)

    def wait_until_back(self, group: str) -> None:
        """Waits for the memory of an ended group; MemoryNotBackError after `wait_s`."""
        with self._lock:
            names = self._names_by_group.pop(group, None)
        if names is None:
            return  # it was started by an earlier zygote, or not at all
        started = time.monotonic()
        backoff = Backoff(0.005, 0.25)
        while missing := [*self._missing_on_devices(names), *self._missing_on_host()]:
            waited_s = time.monotonic() - started
            if waited_s > self.wait_s:
                raise MemoryNotBackError(
                    f"{waited_s:.1f} s after a group ended {' and '.join(missing)}; look for what "
                    "holds the memory (a process of another user, files in /dev/shm, the driver)"
                )
            time.sleep(backoff.take())

    def _missing_on_devices(self, names: Iterable[str]) -> list[str]:
        wanted = [name for name in names if name in self._idle_bytes]
        if not wanted:
            return []
        now = self._in_use(wanted)
        missing = []
        for name in sorted(wanted):
            if name not in now:
                missing.append(f"device {name} no longer reports its memory in use")
            elif (held := now[name] - self._idle_bytes[name]) > self.device_slack_bytes:
                missing.append(f"device {name} has {memory(held)} more in use than before it")
        if not missing:
            self._take(now)
        return missing

    def _missing_on_host(self) -> list[str]:
        with self._lock:
            if self._names_by_group:  # the other groups use memory of the host too
                return []
            held = host_bytes_in_use(self.root) - self._host_bytes
        if held <= self.host_slack_bytes:
            return []
        return [f"the host has {memory(held)} more in use, by no living process, than before it"]

    def _take(self, in_use: Mapping[str, int]) -> None:
        with self._lock:
            for name, used_bytes in in_use.items():
                self._idle_bytes[name] = min(used_bytes, self._idle_bytes.get(name, used_bytes))

    def _device_names(self, tasks: Sequence[RankTask]) -> frozenset[str]:
        if tasks[0].device == "cpu":
            return frozenset()
        amd, names = bool(amd_devices(self.root)), set[str]()
        for task in tasks:
            with suppress(DeviceHiddenError):  # the rank itself fails with this reason
                seen = rank_variables(task.visible_devices, self.environment)
                names.update(visible_names({n: v or "" for n, v in seen.items()}, amd=amd))
        return frozenset(names)

    def _in_use(self, names: Iterable[str]) -> dict[str, int]:
        return _used_bytes(amd_devices(self.root) or self.nvidia_devices(), names)


def _is(device: DeviceUse, name: str) -> bool:
    """Whether a name in a list of visible devices is that of a device; UUIDs may be shortened."""
    number, uuid = device.names
    return number == name if name.isdecimal() else uuid.startswith(name)
