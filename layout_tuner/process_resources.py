"""The cores and the memory that this process may use.

A container, a batch job or a systemd slice may have less than the machine. The limits are those of
control groups, and the smallest one up the tree counts (Linux, Documentation/
admin-guide/cgroup-v2.rst and cgroup-v1/).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from layout_tuner.errors import ClusterInvalidError

ROOT: Final = Path("/")
_GROUPS: Final = "sys/fs/cgroup"


def usable_cores(root: Path = ROOT) -> int:
    """Cores that this process may use, at least 1: the smaller of its affinity mask and its quota.

    A quota is rounded down, because a rank needs a whole core.
    """
    quotas = [quota for group in _groups(root, "cpu") for quota in _quotas(group)]
    return max(int(min([len(os.sched_getaffinity(0)), *quotas])), 1)


def use_one_blas_thread() -> None:
    """Keeps numpy and scipy to one thread; to be called before they are imported.

    The matrices of a search are small. Further threads of a BLAS would only spin, on cores that
    probes may have. A number of threads that the environment states already stays.
    """
    for library in ("OPENBLAS", "MKL"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")


def available_memory_bytes(root: Path = ROOT) -> int:
    """Memory that is free for new processes, at most the container's limit."""
    usable_bytes = usable_memory_bytes(root)
    for line in kernel_text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, usable_bytes)
    return usable_bytes


def usable_memory_bytes(root: Path = ROOT) -> int:
    """The installed memory, or a container's smaller limit; ClusterInvalidError if not stated."""
    limits = [limit for group in _groups(root, "memory") for limit in _memory_limits(group)]
    return min([_installed_bytes(root), *limits])


def _installed_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise ClusterInvalidError("/proc/meminfo has no MemTotal; give device_memory_bytes")


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the control groups of this process, up to the root of each hierarchy.

    In a container the path may be that of the host, which does not exist there. The root of the
    hierarchy is then the container's own group.
    """
    listing = kernel_text(root / "proc/self/cgroup")
    for line in listing.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # The one hierarchy of version 2 names no controller; those of version 1 have a folder each.
        top = root / _GROUPS / controller if controllers else root / _GROUPS
        inside = PurePosixPath(path.lstrip("/"))
        yield from (top / part for part in (inside, *inside.parents) if ".." not in part.parts)


def _quotas(group: Path) -> Iterator[float]:
    """The quota of a group in cores; nothing where it has none."""
    words = kernel_text(group / "cpu.max").split()
    if not words:
        words = [kernel_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if all(word.isdecimal() for word in words):  # "max", -1 and an absent file are no quota
        yield int(words[0]) / int(words[1])


def _memory_limits(group: Path) -> Iterator[int]:
    """The memory limit of a group; nothing where it has none (version 1: a huge number)."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        word = kernel_text(group / name).strip()
        if word.isdecimal():
            yield int(word)


def kernel_text(path: Path) -> str:
    """The text of a file of the kernel; empty where it does not exist or cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
