"""Waits until a node's memory is as free after a group as it was before it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from search_spaces.machine import ROOT
from workers.device_memory import DeviceUse, amd_devices, device_name, host_bytes_in_use
from workers.errors import MemoryNotBackError
from workers.nvidia_memory import NvidiaDevices
from workers.rank_task import RankTask

WAIT_S: Final = 10.0
"""Drivers give a dead process's memory back within a second or so."""

DEVICE_SLACK_BYTES: Final = 512 << 20
"""What a driver keeps for itself once a device has been used."""

HOST_SLACK_BYTES: Final = 2 << 30
"""What others may leave in shared memory while a group runs."""

_FIRST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.25


class MemoryWatch:
    """Knows what was in use before each group of a node, and waits until it is so again.

    A device is compared with the least that was in use while nothing of ours ran on it, so that
    what is lost little by little shows too. The host is compared with the moment when the first of
    the groups that run side by side began, once the last of them has ended: what one of them
    leaves can't be told from what the others use. Any thread may call it.

    Args:
        environment: of the zygote; it says which devices the ranks see.
        root: where the kernel's files are.
        nvidia_devices: lists NVIDIA's devices; None: as this machine does.
        wait_s: how long memory may take to come back.
        device_slack_bytes: what a device may have less.
        host_slack_bytes: what the host may have less.
    """

    def __init__(
        self,
        environment: Mapping[str, str] = os.environ,
        *,
        root: Path = ROOT,
        nvidia_devices: Callable[[], Sequence[DeviceUse]] | None = None,
        wait_s: float = WAIT_S,
        device_slack_bytes: int = DEVICE_SLACK_BYTES,
        host_slack_bytes: int = HOST_SLACK_BYTES,
    ) -> None:
        self._environment = environment
        self._root = root
        self._nvidia_devices = nvidia_devices or NvidiaDevices()
        self._wait_s = wait_s
        self._device_slack_bytes = device_slack_bytes
        self._host_slack_bytes = host_slack_bytes
        self._lock = threading.Lock()
        self._names_by_group: dict[str, frozenset[str]] = {}
        self._idle_bytes: dict[str, int] = {}
        self._host_bytes = 0

    def group_starts(self, tasks: Sequence[RankTask]) -> None:
        """Notes what is in use before the ranks of a group are forked."""
        names = self._device_names(tasks)
        with self._lock:
            if not self._names_by_group:
                self._host_bytes = host_bytes_in_use(self._root)
            self._names_by_group[tasks[0].group] = names
            unknown = names - self._idle_bytes.keys()
        if unknown:
            self._take(self._in_use(unknown))

    def forget(self, group: str) -> None:
        """Takes a group for ended, in a way that leaves nothing to wait for."""
        with self._lock:
            self._names_by_group.pop(group, None)

    def wait_until_back(self, group: str) -> None:
        """Waits until what a group used is free again; to be called when it has no process left.

        Raises:
            MemoryNotBackError: it isn't, after the deadline.
        """
        with self._lock:
            names = self._names_by_group.pop(group, None)
        if names is None:
            return  # it began before the zygote that is asked now, or not at all
        started = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        while missing := [*self._missing_on_devices(names), *self._missing_on_host()]:
            waited_s = time.monotonic() - started
            if waited_s > self._wait_s:
                raise MemoryNotBackError(
                    f"{waited_s:.1f} s after a group ended {' and '.join(missing)}; look for what "
                    "holds the memory (a process of somebody else's, files in /dev/shm, the driver)"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _missing_on_devices(self, names: Iterable[str]) -> list[str]:
        wanted = [name for name in names if name in self._idle_bytes]
        if not wanted:
            return []
        now = self._in_use(wanted)
        missing = []
        for name in sorted(wanted):
            if name not in now:
                missing.append(f"device {name} doesn't tell any more what of its memory is in use")
            elif (held := now[name] - self._idle_bytes[name]) > self._device_slack_bytes:
                missing.append(f"device {name} has {held} bytes more in use than before it")
        if not missing:
            self._take(now)
        return missing

    def _missing_on_host(self) -> list[str]:
        with self._lock:
            if (
                self._names_by_group
            ):  # others are at work, and theirs can't be told from what is left
                return []
            held = host_bytes_in_use(self._root) - self._host_bytes
        if held <= self._host_slack_bytes:
            return []
        return [f"the host has {held} bytes more in use, by no living process, than before it"]

    def _take(self, in_use: Mapping[str, int]) -> None:
        with self._lock:
            for name, used_bytes in in_use.items():
                self._idle_bytes[name] = min(used_bytes, self._idle_bytes.get(name, used_bytes))

    def _device_names(self, tasks: Sequence[RankTask]) -> frozenset[str]:
        if tasks[0].device == "cpu":
            return frozenset()
        amd = bool(amd_devices(self._root))
        names = {device_name(task, self._environment, amd=amd) for task in tasks}
        return frozenset(names - {""})

    def _in_use(self, names: Iterable[str]) -> dict[str, int]:
        devices = amd_devices(self._root) or self._nvidia_devices()
        return {
            name: device.used_bytes
            for name in names
            for device in devices
            if device.used_bytes is not None and _is(device, name)
        }


def _is(device: DeviceUse, name: str) -> bool:
    """Whether a list of visible devices means this one: UUIDs may be cut short there."""
    number, uuid = device.names
    return number == name if name.isdecimal() else uuid.startswith(name)
