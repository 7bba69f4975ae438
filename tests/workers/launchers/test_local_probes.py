"""Real probes on this machine's zygote: torch, gloo and the trainer, without Ray."""

from __future__ import annotations

import json
import os
import re
import signal
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from layout_tuner.cli.processes.worker import probe_document
from layout_tuner.process_resources import usable_cores
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout, Precision
from layout_tuner.workers.launchers.group_launcher import GroupLauncher
from layout_tuner.workers.launchers.local import LocalNodes
from layout_tuner.workers.ranks.rank_task import RANK_ENTRY
from tests.kit.local_ranks import (
    NEVER_S,
    below_zygote,
    local_nodes,
    make_cluster,
    make_probe,
    run_probe,
)
from tests.kit.python_process import printed_by
from tests.kit.waiting import wait_until
from tests.workers.process_checks import is_alive

pytestmark = pytest.mark.ranks

TWO_CORES = make_cluster()
DESCRIBED = make_cluster(peak_flops_per_s={"fp32": 2e12, "bf16": 2e12})


@pytest.fixture
def launcher(nodes: LocalNodes) -> GroupLauncher:
    return GroupLauncher(nodes, DESCRIBED, allow_sharing=True)


def ranks_of(nodes: LocalNodes) -> list[int]:
    """Pids of the ranks of the one group that runs, below its keeper."""
    zygote = nodes.ranks.pids["zygote"]
    return [process.pid for process in below_zygote(nodes) if process.ppid() != zygote]


@dataclass(frozen=True, kw_only=True)
class ReportedProbe:
    """The outcome of one probe, and what it reported while it ran."""

    outcome: Outcome
    first: dict[str, Any]
    iterations: list[dict[str, Any]]
    """The events after the first."""
    left: list[psutil.Process]
    """Processes below the zygote when the probe had ended."""


@pytest.fixture(scope="module")
def reported(nodes: LocalNodes) -> ReportedProbe:
    events: list[dict[str, Any]] = []
    launcher = GroupLauncher(nodes, TWO_CORES, allow_sharing=True)
    outcome = run_probe(launcher, make_probe(), on_event=events.append)
    assert outcome.state == "completed", outcome
    first, *iterations = events
    left = below_zygote(nodes)
    return ReportedProbe(outcome=outcome, first=first, iterations=iterations, left=left)


def test_a_probe_reports_each_iteration(reported: ReportedProbe) -> None:
    measured = reported.outcome.measurement.iterations
    assert reported.first["event"] == "listening"
    assert [event["index"] for event in reported.iterations] == list(range(len(measured)))
    assert [event["loss"] for event in reported.iterations] == [each.loss for each in measured]


def test_a_probe_is_measured(reported: ReportedProbe) -> None:
    measurement = reported.outcome.measurement
    assert sum(iteration.kind == "timed" for iteration in measurement.iterations) == 2
    assert not measurement.oversubscribed
    assert measurement.peak_source == "measured matmul (fp32)"
    assert reported.outcome.environment.backend == "gloo"


def test_a_probe_leaves_no_process(reported: ReportedProbe) -> None:
    assert reported.left == []


def test_a_probe_says_that_it_had_more_ranks_than_devices(launcher: GroupLauncher) -> None:
    outcome = run_probe(launcher, make_probe(layout=Layout(tp=2, pp=2, num_microbatches=2)))
    assert outcome.measurement is not None, outcome
    assert outcome.measurement.oversubscribed
    assert outcome.measurement.peak_tflops_per_device == 2.0
    assert outcome.measurement.peak_source == "cluster description (test-cores, fp32)"


def test_a_killed_rank_fails_its_probe_alone(launcher: GroupLauncher, nodes: LocalNodes) -> None:
    layout = Layout(dp=2, micro_batch_size=2, num_microbatches=2, zero_stage=3)
    ranks: list[int] = []

    def kill_one(event: dict[str, Any]) -> None:
        if not ranks:
            wait_until("both are forked", lambda: len(ranks_of(nodes)) == 2)
            ranks.extend(ranks_of(nodes))
            os.kill(ranks[1], signal.SIGKILL)

    probe = make_probe(iterations=10_000, layout=layout)
    outcome = run_probe(launcher, probe, on_event=kill_one)
    assert (outcome.state, outcome.reason) == ("failed", "crashed")
    assert outcome.message.startswith("rank 1 was killed by signal 9 (SIGKILL)")
    assert len(ranks) == 2
    assert not any(map(is_alive, ranks))
    assert run_probe(launcher, make_probe()).state == "completed"


def test_devices_that_are_not_there_fail_the_probe_with_the_numbers(nodes: LocalNodes) -> None:
    strict = GroupLauncher(nodes, DESCRIBED, allow_sharing=False)
    outcome = run_probe(strict, make_probe(layout=Layout(tp=4)))
    assert (outcome.state, outcome.reason) == ("failed", "unsupported")
    assert "4 ranks on num_nodes=1 are 4 a node" in outcome.message


@pytest.mark.skipif(usable_cores() < 2, reason="two threads need two cores")
@pytest.mark.slow  # two threads wait for each other where others use a core
def test_a_rank_has_two_threads_on_a_device_of_two_cores() -> None:
    layout = Layout(num_microbatches=2, job=JobSettings({"threads": 2}))
    with local_nodes(1, rank_entry=RANK_ENTRY) as nodes:
        cluster = make_cluster(devices_per_node=1)
        launcher = GroupLauncher(nodes, cluster, allow_sharing=False)
        outcomes = [
            run_probe(launcher, make_probe(layout=each, deadline_s=NEVER_S))
            for each in (layout, layout.without_job)
        ]
    assert "threads 2" in outcomes[0].log_tail
    # The peak of one thread is another one.
    sources = [each.measurement and each.measurement.peak_source for each in outcomes]
    assert sources == ["measured matmul (fp32, 2 threads)", "measured matmul (fp32)"]


def test_settings_that_ranks_cannot_have_are_unsupported(launcher: GroupLauncher) -> None:
    layout = Layout(tp=2, job=JobSettings({"threads": 1000}))
    outcome = run_probe(launcher, make_probe(layout=layout))
    assert (outcome.state, outcome.reason) == ("failed", "unsupported")
    assert "threads=1000 of each of 2 ranks are 2000 threads on a host" in outcome.message
    unknown = Layout(tp=2, job=JobSettings({"cuda_graphs": "none"}))
    outcome = run_probe(launcher, make_probe(layout=unknown))
    assert (outcome.state, outcome.reason) == ("failed", "unsupported")
    assert "the embedded trainer has no knob 'cuda_graphs'; its knobs are" in outcome.message


def test_an_outcome_has_what_the_ranks_printed(launcher: GroupLauncher, orders: Path) -> None:
    orders.write_text(json.dumps({"talks": True}))
    outcome = run_probe(launcher, make_probe())
    assert outcome.state == "completed"
    printed = "a library warns rank {}\nbinary \ufffd \ufffd garbage"
    joined = "\n".join(f"--- rank {rank}\n{printed.format(rank)}" for rank in (0, 1))
    assert outcome.log_tail == joined
    assert Outcome.from_mapping(outcome.to_mapping()) == outcome
    assert probe_document(make_probe(), outcome)["log_tail"] == joined


def test_a_rank_whose_host_has_no_more_open_files_says_which_setting_to_change(
    launcher: GroupLauncher, orders: Path
) -> None:
    orders.write_text(json.dumps({"open_files": 0}))
    outcome = run_probe(launcher, make_probe())
    assert (outcome.state, outcome.reason) == ("failed", "host_resource")
    assert outcome.message == (
        "rank 0: OSError: [Errno 24] Too many open files: '/dev/null'; the host ran out of open "
        "files: raise `ulimit -n` where workers start"
    )


def test_figures_that_cannot_be_true_are_a_failure(launcher: GroupLauncher, orders: Path) -> None:
    orders.write_text(json.dumps({"understates": True}))
    outcome = run_probe(launcher, make_probe())
    assert (outcome.state, outcome.reason) == ("failed", "implausible")
    assert outcome.message.startswith("the trainer's figures: peak_memory_bytes: ")
    assert "is less than a rank of the layout certainly holds, " in outcome.message


def test_the_process_that_forks_ranks_has_one_thread_and_no_device(
    launcher: GroupLauncher, nodes: LocalNodes
) -> None:
    """With torch and the trainer loaded: a fork of more threads than one may hang in the child."""
    seen, loaded = list[str](), set[str]()

    def look(_: dict[str, Any]) -> None:
        zygote = psutil.Process(nodes.ranks.pids["zygote"])
        for process in (zygote, *zygote.children()):
            seen.append(process.name())
            assert process.num_threads() == 1
            held = [str(fd.readlink()) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
            devices = ("/dev/kfd", "/dev/dri", "/dev/nv")
            assert not [path for path in held if path.startswith(devices)]
        loaded.update(device_libraries(Path(f"/proc/{zygote.pid}/maps").read_text()))

    run_probe(launcher, make_probe(iterations=1), on_event=look)
    assert len(seen) >= 2, "a zygote and a keeper"
    if loaded:
        torchs_own = printed_by("import torch; print(open('/proc/self/maps').read())")
        assert loaded <= device_libraries(torchs_own)


def device_libraries(maps: str) -> set[str]:
    """Libraries of devices that are mapped, except those that came with Python's packages."""
    names = r"cuda|cudnn|cublas|nccl|nvidia|nvrtc|hip|hsa|rocm|rccl|miopen"
    files = {Path(line.split()[-1]) for line in maps.splitlines()}
    ours = sysconfig.get_path("platlib")
    return {str(f) for f in files if re.search(names, f.name) and not f.is_relative_to(ours)}


def test_a_container_of_half_the_cores_has_half_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layout_tuner.workers.launchers.local.usable_cores", lambda: 3)
    nodes = LocalNodes(num_devices=8, rank_entry="tests.workers.rank_programs:main")
    nodes.close()
    assert nodes.nodes[0].num_cores == 3


RANK_FAILED = "while the matmul peak was measured: rank 0: "


@pytest.fixture(scope="module")
def one_device() -> Iterator[LocalNodes]:
    """Ranks that do what `tests.workers.rank_programs` says."""
    with local_nodes(1) as nodes:
        yield nodes


@pytest.mark.parametrize(
    ("precision", "why"),
    [
        ("fp32", "ValueError: this rank was told to fail"),
        ("bf16", "RuntimeError: DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_probe_says_why_its_peak_could_not_be_measured(
    one_device: LocalNodes, precision: Precision, why: str
) -> None:
    failing = GroupLauncher(one_device, make_cluster(1), allow_sharing=True)
    layout = Layout(precision=precision)
    outcome = run_probe(failing, make_probe(layout=layout))
    assert (outcome.state, outcome.reason) == ("failed", "crashed")
    assert outcome.message == RANK_FAILED + why
    assert precision == "bf16" or outcome.log_tail.endswith("this rank was told to fail")
    job = {"layout": layout.to_mapping()}
    failure = failing.train(job, on_event=lambda _: None, cancelled=lambda: False).failure
    assert failure.message == RANK_FAILED + why


def test_a_lost_zygote_loses_the_node_until_it_is_recovered(one_device: LocalNodes) -> None:
    launcher = GroupLauncher(one_device, DESCRIBED, allow_sharing=True)
    zygote = one_device.ranks.pids["zygote"]
    probe = make_probe(layout=Layout())
    kill = {"on_event": lambda _: os.kill(zygote, signal.SIGKILL)}
    outcome = run_probe(launcher, probe, **kill)
    assert (outcome.state, outcome.reason) == ("failed", "node_lost")
    assert outcome.node == one_device.nodes[0].name
    assert list(launcher.lost()) == [0]
    launcher.recover(0)
    assert not launcher.lost()
    cancelled = run_probe(launcher, probe, cancelled=lambda: True)
    assert cancelled.reason == "cancelled"
    assert one_device.ranks.pids["zygote"] != zygote
