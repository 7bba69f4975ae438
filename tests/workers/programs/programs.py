"""Programs as trainers of a worker on this machine, and what a probe with one leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil

from layout_tuner.protocol.outcome import Outcome, ProbeRequest
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.program import ProgramTrainer
from layout_tuner.workers.launchers.group_launcher import GroupLauncher
from layout_tuner.workers.launchers.launcher_nodes import NodeSet
from layout_tuner.workers.launchers.local import LocalNodes
from tests.kit.local_ranks import make_cluster, make_probe
from tests.workers.process_checks import MARK, environment_of, marked

SIZES = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 256, "seq_length": 32}
MODEL = replace(model_preset("tiny"), name="small-test", vocab_size=256, **SIZES)
TWO_CORES = make_cluster(peak_flops_per_s={"fp32": 2e12})
STEP = """
import os, signal, subprocess, sys, threading, time
from layout_tuner import report_step

RANK, STEPS = int(os.environ["RANK"]), {steps}

def meet():
    own = "{probe_directory}"
    group = os.path.dirname(own)
    open(own + "/met", "w").close()
    while not all(os.path.exists(group + "/%d/met" % n) for n in range(int("{world_size}"))):
        time.sleep(0.001)

def step(step_time_s=None, sleep_s=0.01, **figures):
    time.sleep(sleep_s)
    report_step(step_time_s=step_time_s, **figures)

def train(steps=STEPS, **figures):
    for _ in range(steps):
        step(**figures)
"""
"""The beginning of each program: what its own training loop would be."""


def python_trainer(code: str, *words: str, **fields: Any) -> ProgramTrainer:
    """A trainer whose program is this Python code, after `STEP`, with these words."""
    command = ("{python}", "-c", STEP + code, *words)
    return ProgramTrainer(**{"name": "theirs", "version": "1", "command": command, **fields})


def make_request(**changes: Any) -> ProbeRequest:
    settings = {"layout": Layout(dp=2), "iterations": 3, "deadline_s": 20.0}
    return make_probe(**{"model": MODEL, "trainer": "theirs", **settings, **changes})


def run(
    nodes: NodeSet,
    trainer: ProgramTrainer,
    *,
    on_event: Callable[[dict[str, Any]], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
    cluster: Cluster = TWO_CORES,
    **changes: Any,
) -> Outcome:
    """Runs a probe with a trainer of a worker that has it and no other."""
    launcher = GroupLauncher(nodes, cluster, allow_sharing=True, trainers={trainer.name: trainer})
    request = make_request(**{"trainer": trainer.name, **changes})
    return launcher.run(request, on_event=on_event, cancelled=cancelled)


def left_behind(nodes: LocalNodes) -> list[str]:
    """Processes below the zygote or detached from it, and directories of its probes."""
    pids = nodes.ranks.pids
    mark = environment_of(psutil.Process(pids["zygote"]))[MARK]
    processes = [each for each in marked(mark) if each.pid not in pids.values()]
    return [*map(str, processes), *map(str, nodes.ranks._scratch.glob("probe-*"))]
