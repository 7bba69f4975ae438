"""What a probe adds to the start of a training program: the same program by hand, in turns.

Run as `make bench-programs`, or `python -m benchmarks.bench_programs --record`, with nothing else
on the machine. It takes two minutes on two cores. The program is examples/trainers/torch_native.py
with two data-parallel ranks; by hand means one process for each rank with torchrun's variables.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import yaml

from benchmarks.arguments import count
from benchmarks.results_file import describe_machine, record, table
from layout_tuner.protocol.outcome import ProbeRequest
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.placeholders import filled
from layout_tuner.trainers.program import ProgramTrainer, read_trainers
from layout_tuner.workers.launchers.group_launcher import GroupLauncher
from layout_tuner.workers.launchers.local import LocalNodes
from layout_tuner.workers.programs.program_run import program_task

ROOT: Final = Path(__file__).parents[1]
TRAINERS: Final = ROOT / "examples" / "trainers" / "trainers.yaml"
ADDED_S: Final = 0.3
"""What the issue allows an adapter to add to the trainer's own start."""
CLUSTER: Final = Cluster(
    name="two-cores",
    device="CPU core",
    num_nodes=1,
    devices_per_node=2,
    device_memory_bytes=4 << 30,
    peak_flops_per_s={"fp32": 1e12},  # stated, so that no matmul is measured first
)
REQUEST: Final = ProbeRequest(
    model=model_preset("tiny"),
    layout=Layout(dp=2, num_microbatches=2),
    warmup=2,
    iterations=5,
    deadline_s=120.0,
    trainer="torch-native",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Seconds from the start of a run."""

    first_step_s: float
    end_s: float
    num_steps: int


def probed(launcher: GroupLauncher) -> Run:
    """A probe, on nodes whose zygote runs already, as a worker's does."""
    first: list[float] = []
    started = time.perf_counter()
    outcome = launcher.run(
        REQUEST,
        on_event=lambda event: (
            first.append(time.perf_counter()) if event["event"] == "iteration" else None
        ),
        cancelled=lambda: False,
    )
    ended = time.perf_counter()
    if outcome.measurement is None:
        sys.exit(f"the probe failed: {outcome.message}\n{outcome.log_tail}")
    return Run(
        first_step_s=first[0] - started,
        end_s=ended - started,
        num_steps=len(outcome.measurement.iterations),
    )


def by_hand(trainer: ProgramTrainer, num_steps: int) -> Run:
    """The same command with so many steps, one process for each rank."""
    values = {
        **program_task(REQUEST, trainer).values,
        "steps": str(num_steps),
        "python": sys.executable,
        "device": "cpu",
    }
    command = [filled(word, values) for word in trainer.command]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "layout_tuner.py").write_bytes(
            (ROOT / "layout_tuner/step_reports.py").read_bytes()
        )
        common = {
            **os.environ,
            "PYTHONPATH": folder,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "2",
        }
        started = time.perf_counter()
        ranks = [
            subprocess.Popen(
                command,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for rank in range(2)
        ]
        output = ranks[0].stdout
        assert output is not None
        while not output.readline().startswith(b"step 0"):
            if ranks[0].poll() is not None:
                sys.exit("the program failed when it was started by hand")
        first_s = time.perf_counter() - started
        output.read()
        for rank in ranks:
            rank.wait()
        return Run(first_step_s=first_s, end_s=time.perf_counter() - started, num_steps=num_steps)


def measure(rounds: int) -> list[tuple[Run, Run]]:
    """So many pairs of a probe and the same by hand; every second pair in the other order."""
    document = yaml.safe_load(TRAINERS.read_text())
    trainer = read_trainers(document, str(TRAINERS.parent))[REQUEST.trainer]
    nodes = LocalNodes(num_devices=2)
    pairs = []
    with GroupLauncher(
        nodes, CLUSTER, allow_sharing=False, trainers={trainer.name: trainer}
    ) as launcher:
        num_steps = probed(launcher).num_steps  # also fills the page cache
        for turn in range(rounds):
            if turn % 2:
                hand = by_hand(trainer, num_steps)
                probe = probed(launcher)
            else:
                probe = probed(launcher)
                hand = by_hand(trainer, probe.num_steps)
            num_steps = probe.num_steps
            pairs.append((probe, hand))
    return pairs


def report(pairs: list[tuple[Run, Run]]) -> str:
    """The table, and the machine's load before."""
    rows = []
    for name, moment in (("the first step", "first_step_s"), ("the end", "end_s")):
        probes = [getattr(probe, moment) for probe, _ in pairs]
        hands = [getattr(hand, moment) for _, hand in pairs]
        added = sorted(probe - hand for probe, hand in zip(probes, hands, strict=True))
        rows.append(
            (
                f"from the start to {name}",
                f"{median(probes):.2f} s",
                f"{median(hands):.2f} s",
                f"{median(probes) / median(hands):.2f}",
                f"{median(added):+.2f} s",
                f"{added[0]:+.2f} to {added[-1]:+.2f} s",
            )
        )
    header = ("", "as a probe", "by hand", "ratio", "added, median of pairs", "all pairs")
    return table(header, rows)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=count, default=12)
    parser.add_argument("--record", action="store_true", help="write to benchmarks/RESULTS.md")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    text = (
        f"`make bench-programs`; {describe_machine('torch')}; load of {load:.1f} before the first pair. "
        f"`examples/trainers/torch_native.py`, model tiny, dp=2, {args.rounds} "
        f"pairs in turns. A probe may add {ADDED_S:g} s to the trainer's own start.\n\n"
        f"{report(measure(args.rounds))}"
    )
    sys.stdout.write(f"{text}\n")
    if args.record:
        record("Probes with a program", text)


if __name__ == "__main__":
    main()
