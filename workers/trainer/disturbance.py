"""The share of a probe's devices that other processes take while it runs.

Cores: the kernel counts how long each thread could run and had no core (the second number of
/proc/PID/task/TID/schedstat, in ns), and how long each core was busy (/proc/stat, in ticks). The
keeper, the worker, the service and the driver are others too; what they took is also told apart.
NVIDIA's devices: the management
library knows who uses how much of a device, and why its clock is low
(https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html). AMD's are not looked at.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

_TICK_S: Final = 1.0 / os.sysconf("SC_CLK_TCK")
_BUSY: Final = (0, 1, 2)
"""Columns of a core in /proc/stat: user, nice, system. Interrupts also serve the ranks' packets."""
_STOLEN: Final = 7
"""Column of the time in which a hypervisor ran something else on the core."""

_PROC: Final = Path("/proc")
_COMMAND: Final = "layout-tuner"
_OUR_MODULE: Final = "layout_tuner"
_ZYGOTE: Final = "layout_tuner.workers.ranks.zygote"
_MOST_OF_PYTHON: Final = 6
"""Words of a command line among which the module stands: Python, its options, the module."""

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
    own_share: float | None = None
    """The part of `others_share` that this product's other processes took, at most."""


Watch = Callable[[], Disturbance]
"""Ends the watch of a device, and says what others took of it since it began."""


class CoreReading(NamedTuple):
    """What the kernel has counted of some cores and of the probe's threads on them, in seconds."""

    at_s: float
    busy_s: float
    """The sum over the cores, of anybody's threads."""
    stolen_s: float
    """The sum over the cores, of a hypervisor."""
    threads: Mapping[int, tuple[float, float]]
    """How long each thread ran, and how long it waited for a core, by its id."""
    own: Mapping[int, tuple[float, float]]
    """The same of the threads of the product's other processes."""


class CoreWatch:
    """Watches the cores of a rank, or of a program of several processes.

    Others took of one core, between two readings,

        min(longest wait of a thread, busy - own) + stolen / number of cores.

    On cores that the probe leaves free they take nothing: then no thread of it waits. Where it has
    more threads than cores, they wait for each other, and nobody else is busy.

    Of what others took, the product's own processes took as much as they ran, at most. The kernel
    does not count on which cores that was.

    Args:
        cores: numbers of the cores.
        pids: lists the processes of the probe on them; None: this one alone.
        proc: where the kernel's files are.
        own: lists the product's other processes; None: what they took is not told apart.
    """

    def __init__(
        self,
        cores: Collection[int],
        pids: Callable[[], Iterable[int]] | None = None,
        proc: Path = _PROC,
        *,
        own: Callable[[], Iterable[int]] | None = None,
    ) -> None:
        self._cores = frozenset(cores)
        self._pids = pids or (lambda: (os.getpid(),))
        self._own = own
        self._proc = proc
        self._last = self._read()
        self.elapsed_s = self.taken_s = self.own_s = 0.0
        """Seconds from the first reading to the last one, what others took of one core then, and
        what the product's own processes took of that."""

    def __call__(self) -> Disturbance:
        """The share of a core's time that others took, of the thread that waited longest."""
        self.take()
        own = None if self._own is None else share_of(self.own_s, self.elapsed_s)
        return Disturbance(others_share=share_of(self.taken_s, self.elapsed_s), own_share=own)

    def take(self) -> None:
        """Takes a reading, and adds what others took since the last one."""
        since, self._last = self._last, self._read()
        if since is None or self._last is None:
            return
        ran_s, longest_s = _since(since.threads, self._last.threads)
        own_ran_s, _ = _since(since.own, self._last.own)
        others_s = max(self._last.busy_s - since.busy_s - ran_s, 0.0)
        stolen_s = (self._last.stolen_s - since.stolen_s) / len(self._cores)
        taken_s = min(longest_s, others_s)
        self.taken_s += taken_s + stolen_s
        self.own_s += min(taken_s, own_ran_s)
        self.elapsed_s += self._last.at_s - since.at_s

    def _read(self) -> CoreReading | None:
        """None: this kernel does not count it."""
        at_s, busy, stolen = time.monotonic(), 0, 0
        with suppress(OSError):
            for line in (self._proc / "stat").read_text().splitlines():
                name, *ticks = line.split()
                if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in self._cores:
                    busy += sum(int(ticks[column]) for column in _BUSY)
                    stolen += int(ticks[_STOLEN])
        threads = self._threads(self._pids())
        if not busy or not any(ran for ran, _ in threads.values()):
            return None
        own = {} if self._own is None else self._threads(self._own())
        return CoreReading(at_s, busy * _TICK_S, stolen * _TICK_S, threads, own)

    def _threads(self, pids: Iterable[int]) -> dict[int, tuple[float, float]]:
        """How long each thread of some processes ran, and waited for a core, by its id."""
        threads = {}
        for pid in pids:
            for path in (self._proc / str(pid) / "task").glob("*/schedstat"):
                with suppress(OSError, ValueError):  # it has ended
                    ran_ns, waited_ns, _ = map(int, path.read_text().split())
                    threads[int(path.parent.name)] = ran_ns * 1e-9, waited_ns * 1e-9
        return threads


def _since(
    before: Mapping[int, tuple[float, float]], now: Mapping[int, tuple[float, float]]
) -> tuple[float, float]:
    """How long threads ran between two readings in all, and how long one waited at the most."""
    ran_s, longest_s = 0.0, 0.0
    for thread, (ran, waited) in now.items():
        ran_before, waited_before = before.get(thread, (0.0, 0.0))
        ran_s += ran - ran_before
        longest_s = max(longest_s, waited - waited_before)
    return ran_s, longest_s


def own_processes(proc: Path = _PROC) -> set[int]:
    """Processes of this product, of Ray below it too, but no ranks: those are what is measured.

    A command line tells them, whoever started them, and all processes below are the product's too.
    It takes some milliseconds.
    """
    parents, modules = {}, {}
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError, ValueError):  # it has ended
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rpartition(")")[2].split()[1]
            )
            modules[int(folder.name)] = _module_of(words)
    forked = {pid for pid, module in modules.items() if module == modules.get(parents[pid])}
    # The zygote forks keepers, which fork ranks: those have its command line, and so have their
    # parents and grandparents.
    ranks = {pid for pid in forked if modules[pid] == _ZYGOTE and parents[pid] in forked}

    def is_own(pid: int) -> bool:
        while pid in parents and pid not in ranks:
            if modules[pid]:
                return True
            pid = parents[pid]
        return False

    return {pid for pid in parents if is_own(pid)}


def _module_of(words: Sequence[bytes]) -> str:
    """The product's module or command that a command line runs; empty: another program."""
    names = [os.fsdecode(word) for word in words[:_MOST_OF_PYTHON]]
    if "-m" in names[:-1]:
        module = names[names.index("-m") + 1]
        return module if module.partition(".")[0] == _OUR_MODULE else ""
    return next((_COMMAND for name in names[:2] if Path(name).name == _COMMAND), "")


def share_of(taken_s: float, elapsed_s: float) -> float | None:
    """What others took as a share from 0 to 1; None: no time has passed."""
    return min(max(taken_s / elapsed_s, 0.0), 1.0) if elapsed_s > 0 else None


class NvidiaWatch:
    """Watches one of NVIDIA's devices; what its driver does not say is not known.

    Args:
        uuid: of the device.
        nvml: the functions of the management library, as in pynvml.
        pid: of the process whose device it is; None: this one.
    """

    def __init__(self, uuid: str, nvml: Any, pid: int | None = None) -> None:
        self._nvml, self._uuid, self._pid = nvml, uuid, pid or os.getpid()
        self._since_us = int(time.time() * 1e6)
        self._reasons = self._answer("CurrentClocksThrottleReasons")

    def __call__(self) -> Disturbance:
        """The others' mean use of its multiprocessors, and whether heat or power slowed it."""
        mask = sum(getattr(self._nvml, f"nvmlClocksThrottleReason{name}") for name in _SLOWED)
        both = (self._reasons, self._answer("CurrentClocksThrottleReasons"))
        known = [bool(reasons & mask) for reasons in both if reasons is not None]
        throttled = any(known) if known else None
        return Disturbance(others_share=self._others_share(), throttled=throttled)

    def _others_share(self) -> float | None:
        pids = {each.pid for each in self._answer("ComputeRunningProcesses") or ()}
        if self._pid not in pids:  # in a container, the driver knows it by another number
            return None
        if len(pids) == 1:
            return 0.0
        samples = self._answer("ProcessUtilization", self._since_us)
        if samples is None:
            return None
        used: defaultdict[int, list[float]] = defaultdict(list)
        for each in samples:
            used[each.pid].append(each.smUtil / 100)
        used.pop(self._pid, None)
        return min(sum(sum(shares) / len(shares) for shares in used.values()), 1.0)

    def _answer(self, about: str, *arguments: int) -> Any:
        """The driver's answer; None: there is none."""
        nvml = self._nvml
        try:
            nvml.nvmlInit()  # a second call only counts
            device = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            return getattr(nvml, f"nvmlDeviceGet{about}")(device, *arguments)
        except nvml.NVMLError:
            return None
