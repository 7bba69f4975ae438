"""The memory of a program as samples show it, and the kernel's out-of-memory killer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from layout_tuner.workers.launchers.launcher_nodes import Node
from layout_tuner.workers.launchers.placement import place
from layout_tuner.workers.programs.memory_sample import MemorySample
from layout_tuner.workers.ranks.rank_task import Device, RankTask
from tests.kit.waiting import wait_until

MIB = 1 << 20
NODE = Node(name="here", address="127.0.0.1", num_devices=2, num_cores=2, core_ids=(0, 1))


def task(device: Device = "cpu", **changes: object) -> RankTask:
    job = {"kind": "program"}
    placed = place([NODE], num_ranks=2, num_nodes=1, device=device, job=job, deadline_s=9.0)
    return replace(placed[0][1], **changes)


def sample(**options: object) -> MemorySample:
    return MemorySample(**{"task": task(), "num_ranks": 1, "limit_bytes": None, **options})


TAKES = """
import mmap, os, time
taken = b"x" * (40 << 20)
if os.fork() == 0:
    more = mmap.mmap(-1, 40 << 20)
    more.write(b"y" * (40 << 20))
    print("ready", flush=True)
    time.sleep(60)
time.sleep(60)
"""


def test_children_and_shared_memory_are_sampled_and_divided_among_the_ranks() -> None:
    of_one, of_two = sample(), sample(num_ranks=2)
    command = [sys.executable, "-S", "-c", TAKES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as program:
        assert program.stdout.readline() == b"ready\n"
        of_one.take(program.pid)
        of_two.take(program.pid)
        os.killpg(program.pid, signal.SIGKILL)
    # The child shares the memory of its parent, and the kernel counts it for both.
    assert 120 * MIB <= of_one.peak_bytes <= 160 * MIB
    assert 60 * MIB <= of_two.peak_bytes <= 80 * MIB


def test_samples_are_taken_ten_times_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = sample()
    looks: list[int] = []
    monkeypatch.setattr(
        "layout_tuner.workers.programs.memory_sample.process_tree",
        lambda pid: (looks.append(pid), [])[1],
    )
    for _ in range(100):
        seen.take(os.getpid())
    assert len(looks) == 1
    wait_until("a sample is due", lambda: (seen.take(os.getpid()), len(looks) == 2)[1])


def test_samples_that_take_long_are_taken_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = sample()
    looks: list[float] = []

    def look(pid: int) -> list[int]:
        looks.append(time.monotonic())
        time.sleep(0.02)
        return []

    monkeypatch.setattr("layout_tuner.workers.programs.memory_sample.process_tree", look)
    wait_until("two samples are taken", lambda: (seen.take(1), len(looks) == 2)[1])
    assert looks[1] - looks[0] >= 0.42


def test_on_a_gpu_what_was_in_use_before_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    in_use = {"4": 100, "7": 200}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr(
        "layout_tuner.workers.programs.memory_sample.devices_in_use",
        lambda names: {name: in_use[name] for name in names},
    )
    own = sample(task=task("cuda"))
    of_the_node = sample(task=task("cuda", local_rank=0, local_world_size=1))
    in_use.update({"4": 150, "7": 230})
    own.take(1)
    of_the_node.take(1)
    assert own.peak_bytes == 30
    assert of_the_node.peak_bytes == 50


@pytest.mark.parametrize(
    ("before", "now", "number", "limit_bytes", "reason"),
    [
        (3, 4, signal.SIGKILL, None, "out_of_memory"),
        (3, 4, signal.SIGKILL, 1000, "node_lost"),
        (3, 3, signal.SIGKILL, None, None),
        (3, 4, signal.SIGSEGV, None, None),
        (None, None, signal.SIGKILL, None, None),
    ],
)
def test_the_kernels_killer_is_the_cause_only_where_it_struck(
    monkeypatch: pytest.MonkeyPatch,
    before: int | None,
    now: int | None,
    number: int,
    limit_bytes: int | None,
    reason: str | None,
) -> None:
    monkeypatch.setattr("layout_tuner.workers.programs.memory_sample.oom_kills", lambda: before)
    seen = sample(limit_bytes=limit_bytes)
    monkeypatch.setattr("layout_tuner.workers.programs.memory_sample.oom_kills", lambda: now)
    killed = seen.kernel_killed(number)
    assert (None if killed is None else killed[0]) == reason
    if killed is not None:
        beside_a_gpu = sample(task=task(device="cuda"), limit_bytes=limit_bytes)
        monkeypatch.setattr(
            "layout_tuner.workers.programs.memory_sample.oom_kills", lambda: now + 1
        )
        reason_there, why = beside_a_gpu.kernel_killed(number)
        assert reason_there == "host_resource"
        assert "the host ran out of memory: give the job more memory of the host" in why
    if reason == "node_lost":
        assert "was seen with 0 KiB of the 0.9766 KiB promised" in killed[1]
