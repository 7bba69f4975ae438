"""What others take of the devices of a probe while it runs.

On CPU cores the kernel says how long each thread could run and had no core (the second number of
/proc/PID/task/TID/schedstat, in nanoseconds), and how long each core was busy (/proc/stat, in
ticks). The keeper, the worker, the service and the driver are others too.

On NVIDIA's devices the management library says which processes use a device and how much of its
multiprocessors (https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html), and why a
clock is low. AMD's devices are not looked at: what others took of them is not known.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

_PROC: Final = Path("/proc")
_TICK_S: Final = 1.0 / os.sysconf("SC_CLK_TCK")
_NS: Final = 1e-9

_BUSY: Final = (0, 1, 2)
"""Columns of a core in /proc/stat: user, nice and system. The time of interrupts is left out: the
kernel takes a packet of the ranks' own traffic in it too."""
_STOLEN: Final = 7
"""Column of the time in which a hypervisor ran something else on the core."""

_SLOWED: Final = ("HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
"""Reasons for a low clock that are not the probe's own doing. The cap on power is none of them: a
device under full load reaches it, and how far depends on the layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """What others took of a probe's devices. None: not known."""

    others_share: float | None = None
    """Share of a device's time, from 0 to 1."""
    throttled: bool | None = None
    """Whether heat or power held a device's clock down."""


class DeviceWatch(Protocol):
    """Watches one device from its construction on."""

    def end(self) -> Disturbance:
        """What others took of the device since then."""
        ...


class NoWatch:
    """Watches a device that cannot be watched, or whose user cannot tell itself from others."""

    def end(self) -> Disturbance:
        """Nothing is known."""
        return Disturbance()


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreReading:
    """What the kernel has counted of some cores and of the threads of a probe on them."""

    at_s: float
    busy_s: float
    """Time that the cores spent on threads of anybody, their sum."""
    stolen_s: float
    """Time that a hypervisor took from them."""
    threads: Mapping[int, tuple[float, float]]
    """Seconds that each thread of the probe ran, and that it waited for a core, by its id."""

    def taken_s(self, earlier: CoreReading, *, num_cores: int) -> float:
        """Seconds that others took of one core's time since an earlier reading.

            min(longest wait of a thread, busy - own) + stolen / num_cores

        Others take nothing by running on cores that the probe leaves free: then no thread of it
        waits. Its threads may wait for each other, where it has more of them than cores: then
        nobody else is busy on the cores.
        """
        ran_s, longest_s = 0.0, 0.0
        for thread, (ran, waited) in self.threads.items():
            ran_before, waited_before = earlier.threads.get(thread, (0.0, 0.0))
            ran_s += ran - ran_before
            longest_s = max(longest_s, waited - waited_before)
        others_s = max(self.busy_s - earlier.busy_s - ran_s, 0.0)
        return min(longest_s, others_s) + (self.stolen_s - earlier.stolen_s) / num_cores


class CoreWatch:
    """Watches the cores of a rank, or of a program of several processes.

    Args:
        cores: numbers of the cores.
        pids: lists the processes of the probe on them; None: this one alone.
        proc: where the kernel's files are.
    """

    def __init__(
        self,
        cores: Collection[int],
        pids: Callable[[], Iterable[int]] | None = None,
        proc: Path = _PROC,
    ) -> None:
        self._cores = frozenset(cores)
        self._pids = pids or (lambda: (os.getpid(),))
        self._proc = proc
        self._last = self._read()
        self.elapsed_s = self.taken_s = 0.0
        """Seconds from the first reading to the last one, and what others took of one core then."""

    def take(self) -> None:
        """Takes a reading, and adds what others took since the last one."""
        earlier, self._last = self._last, self._read()
        if earlier is not None and self._last is not None:
            self.elapsed_s += self._last.at_s - earlier.at_s
            self.taken_s += self._last.taken_s(earlier, num_cores=len(self._cores))

    def end(self) -> Disturbance:
        """The share of a core's time that others took, of the thread that waited longest."""
        self.take()
        return Disturbance(others_share=share_of(self.taken_s, self.elapsed_s))

    def _read(self) -> CoreReading | None:
        """None: this kernel does not count it."""
        at_s = time.monotonic()
        busy_s = stolen_s = 0.0
        try:
            for line in (self._proc / "stat").read_text().splitlines():
                name, *ticks = line.split()
                if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in self._cores:
                    busy_s += sum(int(ticks[column]) for column in _BUSY) * _TICK_S
                    stolen_s += int(ticks[_STOLEN]) * _TICK_S
        except OSError:
            return None
        threads = dict(each for pid in self._pids() for each in self._threads(pid))
        if not any(ran for ran, _ in threads.values()):
            return None
        return CoreReading(at_s=at_s, busy_s=busy_s, stolen_s=stolen_s, threads=threads)

    def _threads(self, pid: int) -> Iterable[tuple[int, tuple[float, float]]]:
        for path in (self._proc / str(pid) / "task").glob("*/schedstat"):
            with suppress(OSError, ValueError):  # it has ended
                ran_ns, waited_ns, _ = map(int, path.read_text().split())
                yield int(path.parent.name), (ran_ns * _NS, waited_ns * _NS)


def share_of(taken_s: float, elapsed_s: float) -> float | None:
    """What others took as a share from 0 to 1; None: no time has passed."""
    return min(max(taken_s / elapsed_s, 0.0), 1.0) if elapsed_s > 0 else None


class NvidiaWatch:
    """Watches one of NVIDIA's devices; where its driver does not answer, nothing is known of it.

    Args:
        uuid: of the device.
        nvml: the functions of the management library, as in pynvml.
        pid: of the process whose device it is.
    """

    def __init__(self, uuid: str, nvml: Any, pid: int | None = None) -> None:
        self._nvml, self._uuid = nvml, uuid
        self._pid = os.getpid() if pid is None else pid
        self._since_us = int(time.time() * 1e6)
        self._was_slowed = self._is_slowed()

    def end(self) -> Disturbance:
        """The mean use of the device's multiprocessors by others, and whether it was slowed."""
        seen = [each for each in (self._was_slowed, self._is_slowed()) if each is not None]
        throttled = any(seen) if seen else None
        return Disturbance(others_share=self._others_share(), throttled=throttled)

    def _is_slowed(self) -> bool | None:
        nvml = self._nvml
        mask = sum(getattr(nvml, f"nvmlClocksThrottleReason{name}") for name in _SLOWED)
        try:
            return bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._device()) & mask)
        except nvml.NVMLError:
            return None

    def _others_share(self) -> float | None:
        """None also in a container whose processes have other numbers than the driver knows."""
        nvml = self._nvml
        try:
            device = self._device()
            pids = {each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(device)}
            if self._pid not in pids:
                return None
            if len(pids) == 1:
                return 0.0
            samples = nvml.nvmlDeviceGetProcessUtilization(device, self._since_us)
        except nvml.NVMLError:
            return None
        used: defaultdict[int, list[float]] = defaultdict(list)
        for each in samples:
            used[each.pid].append(each.smUtil / 100)
        used.pop(self._pid, None)
        return min(sum(sum(shares) / len(shares) for shares in used.values()), 1.0)

    def _device(self) -> Any:
        self._nvml.nvmlInit()  # a second call only counts
        return self._nvml.nvmlDeviceGetHandleByUUID(self._uuid)
