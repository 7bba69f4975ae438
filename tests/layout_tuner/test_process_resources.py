"""The machine as a container sees it: the kernel's files, written out in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from layout_tuner.errors import ClusterInvalidError
from layout_tuner.process_resources import available_memory_bytes, usable_cores, usable_memory_bytes
from layout_tuner.search_spaces.clusters.cluster import detect_local_cpu
from layout_tuner.units import GIB

CORES = len(os.sched_getaffinity(0))
V2 = "0::/user.slice/job\n"
V1 = "5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n"
UNLIMITED_V1 = "9223372036854771712"


def make_machine(root: Path, *, cgroup: str = "", **files: str) -> Path:
    """A machine of 16 GiB; double underscores in the names of files stand for slashes."""
    written = {
        "proc/meminfo": "MemTotal:       16777216 kB\nMemAvailable: 2097152 kB\n",
        "proc/self/cgroup": cgroup,
        **{f"sys/fs/cgroup/{name.replace('__', '/')}": text for name, text in files.items()},
    }
    for name, text in written.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def in_group(group: str, **files: str) -> dict[str, str]:
    return {f"{group}{name.replace('_', '.', 1)}": text for name, text in files.items()}


def of_version_1(memory: str, quota: str) -> dict[str, str]:
    return {
        "memory__docker__abc__memory.limit_in_bytes": f"{memory}\n",
        "memory__memory.limit_in_bytes": f"{UNLIMITED_V1}\n",
        "cpu__docker__abc__cpu.cfs_quota_us": f"{quota}\n",
        "cpu__docker__abc__cpu.cfs_period_us": "100000\n",
    }


JOB = "user.slice__job__"


@pytest.mark.parametrize(
    ("cgroup", "files", "memory_gib", "cores"),
    [
        (V2, in_group(JOB, memory_max=f"{2 * GIB}\n", cpu_max="100000 100000\n"), 2, 1),
        # The smallest limit up the tree counts.
        (
            V2,
            {
                **in_group(JOB, memory_max="max\n", cpu_max="max 100000\n"),
                **in_group("user.slice__", memory_max=f"{GIB}\n", cpu_max="50000 100000\n"),
            },
            1,
            1,
        ),
        # A path of the host leads to the container's own group.
        ("0::/../../kubepods/pod7\n", in_group("", memory_max=f"{3 * GIB}\n"), 3, CORES),
        # A quota of more cores than there are adds none.
        (V2, in_group(JOB, cpu_max=f"{(CORES + 3) * 100000} 100000\n"), 16, CORES),
        (V1, of_version_1(str(4 * GIB), "150000"), 4, 1),
        (V1, of_version_1(UNLIMITED_V1, "-1"), 16, CORES),
    ],
    ids=["version 2", "up the tree", "of the host", "large quota", "version 1", "unlimited"],
)
def test_a_container_limits_memory_and_cores(
    tmp_path: Path, cgroup: str, files: dict[str, str], memory_gib: int, cores: int
) -> None:
    root = make_machine(tmp_path, cgroup=cgroup, **files)
    assert usable_memory_bytes(root) == memory_gib * GIB
    assert usable_cores(root) == cores


def test_the_local_cluster_and_new_processes_may_use_what_the_container_may(tmp_path: Path) -> None:
    files = in_group(JOB, memory_max=f"{GIB}\n", cpu_max="100000 100000\n")
    root = make_machine(tmp_path, cgroup=V2, **files)
    cluster = detect_local_cpu(root=root)
    assert (cluster.devices_per_node, cluster.device_memory_bytes) == (1, GIB * 3 // 4)
    assert available_memory_bytes(root) == GIB
    (root / "sys/fs/cgroup/user.slice/job/memory.max").write_text("max\n")
    assert available_memory_bytes(root) == 2 * GIB
    (root / "proc/self/cgroup").unlink()
    assert usable_memory_bytes(root) == 16 * GIB
    assert usable_cores(root) == CORES
    (root / "proc/meminfo").write_text("MemFree: 1 kB\n")
    with pytest.raises(ClusterInvalidError, match="MemTotal"):
        usable_memory_bytes(root)
