"""A node's memory is free again when use is as low as before a group; kernel files in a folder."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.workers.errors import MemoryNotBackError
from layout_tuner.workers.ranks.memory_watch import MemoryWatch, amd_devices
from layout_tuner.workers.ranks.rank_task import Device
from layout_tuner.workers.ranks.zygote_client import ZygoteClient
from tests.kit.python_process import start_python
from tests.kit.side_by_side import make_task
from tests.kit.waiting import wait_until
from tests.workers.process_checks import RANK_PROGRAMS

pytestmark = pytest.mark.ranks

GIB = 1 << 30
MIB = 1 << 20
UUIDS = (0x18F68E602B8A790F, 0xD7EB02CB6C1E36E4)

HOLDER = """
import os, sys
fd = os.memfd_create("held")
for _ in range(int(sys.argv[1]) >> 20):
    os.write(fd, b"x" * (1 << 20))
print("held", flush=True)
sys.stdin.read()
"""


class Machine:
    """A node of one processor and two AMD devices, as its kernel shows it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._write("sys/class/kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 64\n")
        for index, uuid in enumerate(UUIDS):
            self._write(
                f"sys/class/kfd/kfd/topology/nodes/{index + 1}/properties",
                f"simd_count 440\ndrm_render_minor {128 + index}\nunique_id {uuid}\n",
            )
            self.use(index, 10 * MIB)
        self.use_host(GIB)

    def use(self, index: int, num_bytes: int) -> None:
        path = f"sys/class/drm/renderD{128 + index}/device/mem_info_vram_used"
        self._write(path, f"{num_bytes}\n")

    def use_host(self, num_bytes: int, *, private_bytes: int = 0) -> None:
        available = 64 * GIB - num_bytes - private_bytes
        sizes = {"MemTotal": 64 * GIB, "MemAvailable": available, "AnonPages": private_bytes}
        lines = [f"{name}: {size >> 10} kB\n" for name, size in sizes.items()]
        self._write("proc/meminfo", "".join([*lines, "HugePages_Total: 0\n"]))

    def watch(self, *, wait_s: float = 0.05, **environment: str) -> MemoryWatch:
        return MemoryWatch(environment, root=self.root, nvidia_devices=lambda: (), wait_s=wait_s)

    def listed_devices(self) -> list[Path]:
        """Where the kernel lists the processor and each device."""
        return sorted((self.root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"))

    def _write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").replace(path)  # a reader sees the old text or the new one


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def watch_group(machine: Machine, device: Device = "cuda", **options: Any) -> MemoryWatch:
    """A watch of the machine's memory, with a group "a" on its first device."""
    watch = machine.watch(**options)
    watch.group_starts([make_task("a", device=device)])
    return watch


def test_memory_that_is_not_back_is_told_beyond_what_a_driver_may_keep(machine: Machine) -> None:
    watch = machine.watch()
    watch.group_starts([make_task("a", device="cuda", device_index=1)])
    watch.group_starts([make_task("b", device="cuda", device_index=1)])
    machine.use(1, 400 * MIB)
    watch.wait_until_back("a")
    machine.use(1, 10 * MIB + GIB)
    with pytest.raises(MemoryNotBackError) as missing:
        watch.wait_until_back("b")
    assert str(missing.value).startswith(
        "0.1 s after a group ended device 1 has 1 GiB more in use than before it; look for"
    )


def test_memory_that_comes_back_late_is_waited_for(machine: Machine) -> None:
    watch = watch_group(machine, wait_s=60.0)
    machine.use(0, GIB)
    waiting = threading.Thread(target=watch.wait_until_back, args=["a"])
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    machine.use(0, 10 * MIB)
    waiting.join(30)
    assert not waiting.is_alive()


def test_devices_of_other_groups_are_ignored(machine: Machine) -> None:
    watch = watch_group(machine)
    watch.group_starts([make_task("b", device="cuda", device_index=1)])
    machine.use(1, 40 * GIB)
    watch.wait_until_back("a")
    with pytest.raises(MemoryNotBackError, match="device 1 has"):
        watch.wait_until_back("b")


def test_memory_lost_in_small_steps_is_reported_in_the_end(machine: Machine) -> None:
    watch = machine.watch()
    for used in (300, 500):
        watch.group_starts([make_task("a", device="cuda")])
        machine.use(0, used * MIB)
        watch.wait_until_back("a")
    watch.group_starts([make_task("a", device="cuda")])
    machine.use(0, 700 * MIB)
    with pytest.raises(MemoryNotBackError, match="device 0 has 690 MiB more"):
        watch.wait_until_back("a")


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"ROCR_VISIBLE_DEVICES": "1"}, "1"),
        ({"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "1"}, "1"),
        ({"HIP_VISIBLE_DEVICES": f"GPU-{UUIDS[1]:016x}"}, f"GPU-{UUIDS[1]:016x}"),
    ],
)
def test_the_device_that_counts_is_the_one_that_the_rank_sees(
    machine: Machine, environment: dict[str, str], name: str
) -> None:
    watch = watch_group(machine, **environment)
    machine.use(1, GIB)
    with pytest.raises(MemoryNotBackError, match=f"device {name} has"):
        watch.wait_until_back("a")


def test_a_device_that_tells_no_more_is_waited_for_and_one_that_never_told_is_not(
    machine: Machine,
) -> None:
    watch = watch_group(machine)
    (machine.root / "sys/class/drm/renderD129/device/mem_info_vram_used").unlink()
    watch.group_starts(
        [make_task("b", device="cuda", rank=rank, device_index=1) for rank in (0, 1)]
    )
    watch.wait_until_back("b")
    assert [device.used_bytes for device in amd_devices(machine.root)] == [10 * MIB, None]
    for path in machine.listed_devices():
        path.unlink()
    with pytest.raises(MemoryNotBackError, match="device 0 no longer reports"):
        watch.wait_until_back("a")
    watch_group(machine).wait_until_back("a")  # a machine that tells nothing from the beginning


def test_devices_that_were_not_given_to_us_have_no_number(machine: Machine) -> None:
    (machine.root / "sys/class/kfd/kfd/topology/nodes/1/properties").unlink()
    machine.use(1, GIB)
    (device,) = amd_devices(machine.root)
    assert device.names == ("0", f"GPU-{UUIDS[1]:016x}")
    assert device.used_bytes == GIB


def test_the_hosts_memory_counts_once_the_last_group_has_ended(machine: Machine) -> None:
    watch = watch_group(machine, "cpu")
    watch.group_starts([make_task("b")])
    machine.use_host(4 * GIB, private_bytes=30 * GIB)  # of living processes, which does not count
    watch.wait_until_back("a")
    why = "the host has 3 GiB more in use, by no living process, than before it"
    with pytest.raises(MemoryNotBackError, match=why):
        watch.wait_until_back("b")
    machine.use_host(GIB, private_bytes=30 * GIB)
    watch.group_starts([make_task("c")])
    watch.wait_until_back("c")


def test_a_group_that_was_lost_or_did_not_begin_here_is_not_waited_for(machine: Machine) -> None:
    watch = machine.watch()
    watch.group_starts([make_task("lost")])
    watch.forget("lost")
    machine.use_host(8 * GIB)
    watch.group_starts([make_task("a")])
    watch.wait_until_back("a")
    machine.use_host(40 * GIB)
    machine.watch().wait_until_back("of the zygote before")


def test_shared_memory_that_a_process_holds_for_real_is_missed_until_it_lets_go() -> None:
    watch = MemoryWatch(wait_s=0.3, host_slack_bytes=256 * MIB)
    watch.group_starts([make_task("a")])
    with start_python(HOLDER, str(768 * MIB)) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(MemoryNotBackError, match="the host has"):
            watch.wait_until_back("a")
        watch.group_starts([make_task("b")])
        holder.kill()
    watch.wait_until_back("b")


def test_a_group_whose_memory_is_not_back_says_so_at_its_end(machine: Machine) -> None:
    ranks = ZygoteClient(rank_entry=RANK_PROGRAMS, memory=machine.watch())
    ranks.wait_until_ready()
    ranks.start([make_task("a", kind="succeed", device="cuda")])
    wait_until(
        "it has ended", lambda: any(event["event"] == "exit" for event in ranks.poll(0.1)), 30
    )
    machine.use(0, GIB)
    with pytest.raises(MemoryNotBackError, match="device 0 has"):
        ranks.end("a")
    machine.use(0, 0)
    ranks.start([make_task("b", kind="succeed", device="cuda")])
    assert set(ranks.end("b")) == {0}
    ranks.close()
