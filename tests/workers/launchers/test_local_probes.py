"""Real probes on this machine's zygote: torch, gloo and the trainer, without Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from search_spaces.protocol.outcome import Outcome
from search_spaces.spec.layout import Layout, Precision
from search_spaces.spec.presets.models import model_preset
from tests.kit.local_ranks import below_zygote, local_nodes, make_cluster, make_probe, run_probe
from tests.kit.python_process import printed_by
from tests.kit.waiting import wait_until
from tests.workers.process_checks import is_alive
from workers.commands.commands import probe_document
from workers.launchers.group_launcher import GroupLauncher
from workers.launchers.local import LocalNodes
from workers.ranks.rank_task import RANK_ENTRY
from workers.trainer.job.job import TrainJob

pytestmark = pytest.mark.ranks


TWO_CORES = make_cluster()


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalNodes]:
    with local_nodes(rank_entry=RANK_ENTRY) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def launcher(nodes: LocalNodes) -> GroupLauncher:
    return GroupLauncher(nodes, TWO_CORES, allow_sharing=True)


def ranks_of(nodes: LocalNodes) -> list[int]:
    """Pids of the ranks of the one group that runs, below its keeper."""
    zygote = nodes.ranks.pids["zygote"]
    return [process.pid for process in below_zygote(nodes) if process.ppid() != zygote]


def test_a_probe_reports_and_is_measured(launcher: GroupLauncher, nodes: LocalNodes) -> None:
    told: list[dict[str, Any]] = []
    outcome = run_probe(launcher, make_probe(), on_event=told.append)
    assert outcome.state == "completed", outcome
    measurement = outcome.measurement
    assert measurement is not None
    assert told.pop(0)["event"] == "listening"
    assert [event["index"] for event in told] == list(range(len(measurement.iterations)))
    assert sum(iteration.kind == "timed" for iteration in measurement.iterations) == 2
    assert [iteration.loss for iteration in measurement.iterations] == [e["loss"] for e in told]
    assert not measurement.oversubscribed
    assert measurement.peak_source == "measured matmul (fp32)"
    assert outcome.environment is not None
    assert outcome.environment.backend == "gloo"
    assert below_zygote(nodes) == []


def test_more_ranks_than_devices_run_and_are_marked(launcher: GroupLauncher) -> None:
    outcome = run_probe(launcher, make_probe(layout=Layout(tp=2, pp=2, num_microbatches=2)))
    assert outcome.measurement is not None, outcome
    assert outcome.measurement.oversubscribed


@pytest.mark.slow
def test_a_description_of_more_devices_than_cores_is_no_way_round_the_mark() -> None:
    cores = len(os.sched_getaffinity(0))
    described = replace(TWO_CORES, devices_per_node=4 * cores)
    nodes = LocalNodes(num_devices=described.devices_per_node)
    with GroupLauncher(nodes, described, allow_sharing=True) as launcher:
        outcome = run_probe(launcher, make_probe(layout=Layout(dp=2 * cores), iterations=1))
    assert outcome.measurement is not None, outcome
    assert outcome.measurement.oversubscribed


def test_a_described_peak_is_taken_instead_of_a_measured_one(nodes: LocalNodes) -> None:
    described = replace(TWO_CORES, peak_flops_per_s={"fp32": 2e12})
    outcome = run_probe(GroupLauncher(nodes, described, allow_sharing=True), make_probe())
    assert outcome.measurement is not None, outcome
    assert outcome.measurement.peak_tflops_per_device == 2.0
    assert outcome.measurement.peak_source == "cluster description (test-cores, fp32)"


def test_a_layout_fits_into_its_own_peak(launcher: GroupLauncher) -> None:
    layout = Layout(micro_batch_size=8, num_microbatches=2, precision="bf16")
    measured = run_probe(launcher, make_probe(layout=layout)).measurement
    assert measured is not None
    limit = measured.peak_memory_bytes
    assert run_probe(launcher, make_probe(layout=layout, memory_limit_bytes=limit)).measurement
    beyond = run_probe(launcher, make_probe(layout=layout, memory_limit_bytes=limit - 1))
    assert beyond.reason == "out_of_memory"


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_killed_rank_fails_its_probe_alone(
    launcher: GroupLauncher, nodes: LocalNodes, zero_stage: int
) -> None:
    layout = Layout(dp=2, micro_batch_size=2, num_microbatches=2, zero_stage=zero_stage)
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
    strict = GroupLauncher(nodes, TWO_CORES, allow_sharing=False)
    outcome = run_probe(strict, make_probe(layout=Layout(tp=4)))
    assert (outcome.state, outcome.reason) == ("failed", "unsupported")
    assert "4 ranks on num_nodes=1 are 4 a node" in outcome.message


def test_a_training_job_runs_on_the_same_ranks(launcher: GroupLauncher) -> None:
    told: list[dict[str, Any]] = []
    job = TrainJob(model=model_preset("tiny"), layout=Layout(dp=2, zero_stage=1), steps=3, warmup=1)
    end = launcher.train(job.to_mapping(), on_event=told.append, cancelled=lambda: False)
    assert end.failure is None, end
    result = end.results[0]["training"]
    assert [event["index"] for event in told] == [0, 1, 2]
    assert result["final_loss"] == told[-1]["loss"]
    assert result["tokens_per_s"] > 0


def test_what_the_ranks_of_a_completed_probe_printed_comes_with_its_outcome() -> None:
    nodes = LocalNodes(num_devices=2, rank_entry="tests.workers.talkative_rank:main")
    with GroupLauncher(nodes, TWO_CORES, allow_sharing=True) as launcher:
        outcome = run_probe(launcher, make_probe())
    assert outcome.state == "completed"
    printed = "a library warns rank {}\nbinary \ufffd \ufffd garbage"
    joined = "\n".join(f"--- rank {rank}\n{printed.format(rank)}" for rank in (0, 1))
    assert outcome.log_tail == joined
    assert Outcome.from_mapping(outcome.to_mapping()) == outcome
    assert probe_document(make_probe(), outcome)["log_tail"] == joined


def test_figures_of_the_embedded_trainer_that_cannot_be_true_are_a_failure() -> None:
    nodes = LocalNodes(num_devices=2, rank_entry="tests.workers.understating_rank:main")
    with GroupLauncher(nodes, TWO_CORES, allow_sharing=True) as launcher:
        outcome = run_probe(launcher, make_probe())
    assert (outcome.state, outcome.reason) == ("failed", "implausible")
    assert outcome.message.startswith("the trainer's figures: peak_memory_bytes: ")
    assert "is less than a rank of the layout certainly holds, " in outcome.message


@pytest.mark.slow
def test_twenty_probes_in_a_row_leave_nothing(launcher: GroupLauncher, nodes: LocalNodes) -> None:
    request = make_probe(iterations=1)
    for _ in range(20):
        assert run_probe(launcher, request).state == "completed"
        assert below_zygote(nodes) == []


DEVICE_LIBRARIES = """
import re, sys
from pathlib import Path
import torch

def device_libraries():
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    names = r"cuda|cudnn|cublas|nccl|nvidia|nvrtc|hip|hsa|rocm|rccl|miopen"
    return {name for name in mapped if re.search(names, Path(name).name)}

before = device_libraries()
import workers.ranks.zygote
workers.ranks.zygote.load_entry("workers.rank_jobs.rank:main")
print(device_libraries() - before, torch.cuda.is_initialized())
print(len(list(Path("/proc/self/task").iterdir())))
"""


def test_what_a_zygote_imports_loads_no_device_library_beyond_torchs_own() -> None:
    printed = printed_by(DEVICE_LIBRARIES, OPENBLAS_NUM_THREADS="1")
    assert printed.splitlines() == ["set() False", "1"], printed


def test_a_lost_zygote_loses_the_node_for_now(launcher: GroupLauncher, nodes: LocalNodes) -> None:
    zygote = nodes.ranks.pids["zygote"]
    outcome = run_probe(
        launcher,
        make_probe(iterations=10_000),
        on_event=lambda _: os.kill(zygote, signal.SIGKILL) if is_alive(zygote) else None,
    )
    assert (outcome.state, outcome.reason) == ("failed", "node_lost")
    assert outcome.node == nodes.nodes[0].name
    assert list(launcher.lost()) == [0]
    launcher.recover(0)
    assert run_probe(launcher, make_probe()).state == "completed"
    assert nodes.ranks.pids["zygote"] != zygote


def test_a_container_of_half_the_cores_has_half_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.launchers.local.usable_cores", lambda: 3)
    nodes = LocalNodes(num_devices=8, rank_entry="tests.workers.rank_programs:main")
    try:
        (node,) = nodes.nodes
        assert node.num_cores == 3
    finally:
        nodes.close()


RANK_FAILED = "while the matmul peak was measured: rank 0: "


@pytest.fixture(scope="module")
def failing() -> Iterator[GroupLauncher]:
    with local_nodes(1) as nodes:
        yield GroupLauncher(nodes, make_cluster(1), allow_sharing=True)


@pytest.mark.parametrize(
    ("precision", "why"),
    [
        ("fp32", "ValueError: this rank was told to fail"),
        ("bf16", "RuntimeError: DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_peak_that_could_not_be_measured_is_neither_the_probes_failure_nor_its_memory(
    failing: GroupLauncher, precision: Precision, why: str
) -> None:
    outcome = run_probe(failing, make_probe(layout=Layout(precision=precision)))
    assert (outcome.state, outcome.reason) == ("failed", "crashed")
    assert outcome.message == RANK_FAILED + why
    assert precision == "bf16" or outcome.log_tail.endswith("this rank was told to fail")


def test_a_training_job_says_it_too(failing: GroupLauncher) -> None:
    job = {"layout": Layout().to_mapping()}
    end = failing.train(job, on_event=lambda _: None, cancelled=lambda: False)
    assert end.failure is not None
    assert end.failure.message.startswith(RANK_FAILED + "ValueError")
