"""Probes on simulated clusters, and their traces."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from layout_tuner.protocol.measurement import Breakdown
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.workers.simulation.machine import Machine
from layout_tuner.workers.simulation.simulated_cluster import SimulatedCluster, SimulatedProbe
from layout_tuner.workers.simulation.trace import step_trace

MODEL = model_preset("gpt-22b")
LAYOUT = Layout(
    num_nodes=2, tp=8, pp=2, num_microbatches=16, precision="bf16", recompute="full", zero_stage=1
)
CLUSTER = SimulatedCluster.of("frontier", num_nodes=8, seed=3)


def run(
    cluster: SimulatedCluster = CLUSTER, layout: Layout = LAYOUT, **changes: Any
) -> SimulatedProbe:
    arguments = {
        "nodes": (4, 5),
        "warmup_iterations": 2,
        "timed_iterations": 5,
        "started_s": 1000.0,
        "run_seed": 7,
        "deadline_s": 3600.0,
    }
    return cluster.run(layout, MODEL, **(arguments | changes))


def test_a_probe_tells_iterations_peaks_and_parts_that_add_up_to_the_median() -> None:
    probe = run()
    assert probe.failure is None
    assert len(probe.iteration_s) == 7
    assert probe.ended_s > 1000 + sum(probe.iteration_s)
    assert sum(probe.parts_s.values()) == pytest.approx(sorted(probe.iteration_s[2:])[2])
    Breakdown(**probe.parts_s)
    assert len(probe.peak_memory_bytes) == LAYOUT.pp
    reserved = zip(probe.peak_reserved_bytes, probe.peak_memory_bytes, strict=True)
    assert all(held >= used > 0 for held, used in reserved)


def test_equal_seeds_repeat_a_probe_and_others_do_not() -> None:
    assert run() == run(SimulatedCluster.of("frontier", num_nodes=8, seed=3))
    assert run(run_seed=8).iteration_s != run().iteration_s
    other = SimulatedCluster.of("frontier", num_nodes=8, seed=4)
    assert other.slowness != CLUSTER.slowness
    assert CLUSTER.fails_at_s != other.fails_at_s


def test_a_layout_that_does_not_fit_runs_out_of_memory() -> None:
    probe = run(layout=Layout(num_nodes=2, dp=16, precision="bf16"))
    assert probe.failure == "out_of_memory"
    assert probe.iteration_s == ()
    assert "64 GiB" in probe.message


def test_a_probe_ends_when_a_node_is_lost_and_says_which() -> None:
    lost_s = 1000 + 30.0
    failing = replace(
        CLUSTER, fails_at_s=(*CLUSTER.fails_at_s[:5], lost_s, *CLUSTER.fails_at_s[6:])
    )
    probe = run(failing)
    assert (probe.failure, probe.ended_s, probe.failed_node) == ("node_lost", lost_s, 1)
    assert len(probe.iteration_s) < 7
    assert failing.is_lost(5, lost_s)
    assert run(failing, nodes=(1, 2)).failure is None


def test_deadlines_and_hangs_end_a_probe_when_its_time_is_over() -> None:
    short = run(deadline_s=25.0)
    assert (short.failure, short.ended_s) == ("timeout", 1025.0)
    # Of the first 1,500 seeds one hangs, in this range.
    hung = [probe for seed in range(1000, 1100) if (probe := run(run_seed=seed)).failure]
    (probe,) = hung
    assert (probe.failure, probe.ended_s) == ("timeout", 1000 + 3600.0)
    assert "hung" in probe.message


def test_slow_nodes_make_slower_probes() -> None:
    even = replace(CLUSTER, slowness=(1.0,) * 8)
    slow = replace(CLUSTER, slowness=(1.0,) * 4 + (1.2,) + (1.0,) * 3)
    assert run(slow).iteration_s[3] > 1.1 * run(even).iteration_s[3]


def test_a_trace_is_json_of_streams_on_which_nothing_overlaps() -> None:
    layout = Layout(num_nodes=2, tp=4, pp=4, num_microbatches=6, schedule="zero_bubble")
    machine = Machine.of(CLUSTER_PRESETS["frontier"])
    trace = json.loads(json.dumps(step_trace(layout, MODEL, machine)))
    streams: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        if event["ph"] == "X":
            streams[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert {pid for pid, _ in streams} == set(range(4))
    for spans in streams.values():
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(sorted(spans)))


def test_unequal_stages_are_simulated_and_v_schedules_refused() -> None:
    uneven = replace(LAYOUT, pipeline_layout="Et*30|t*18L")
    equal_s, uneven_s = (sum(run(layout=each).iteration_s) for each in (LAYOUT, uneven))
    assert 1.1 < uneven_s / equal_s < 1.3  # the slowest stage has 30 of 24 layers
    first, last = run(layout=uneven).peak_memory_bytes
    assert first > run().peak_memory_bytes[0] > run().peak_memory_bytes[1] > last
    refused = run(layout=replace(LAYOUT, schedule="v_half", vpp=2))
    assert (refused.failure, refused.iteration_s) == ("unsupported", ())
    assert "schedule=v_half" in refused.message


def test_offload_is_refused_by_name_and_other_levers_run() -> None:
    refused = run(layout=replace(LAYOUT, offload="optimizer"))
    assert (refused.failure, refused.iteration_s) == ("unsupported", ())
    assert refused.message == "the simulator has no offload=optimizer; leave it out"
    for lever in (
        {"recompute": "mlp+layernorm"},
        {"recompute_layers": "12/8"},
        {"optimizer_states": "bf16"},
    ):
        probe = run(layout=replace(LAYOUT, **lever))
        assert (probe.failure, len(probe.iteration_s)) == (None, 7)
