"""Probes on a simulated cluster: what a worker that simulates its nodes asks.

One iteration is walked in full; the others repeat it with noise. Times are simulated seconds:
`started_s` and `ended_s` are on one clock, which begins with the allocation.
Equal arguments give equal probes. Losses are not simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Literal, Self

import numpy as np

from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import resolve_cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.simulator import SIMULATOR_VERSION
from layout_tuner.units import memory
from layout_tuner.workers.simulation.knob_effects import NO_EFFECTS, HiddenEffects
from layout_tuner.workers.simulation.machine import Machine, node_slowness
from layout_tuner.workers.simulation.simulated_peaks import device_bytes, rank_memory
from layout_tuner.workers.simulation.steps import steps

SimulatedFailure = Literal["out_of_memory", "node_lost", "timeout", "unsupported"]
"""The failures of `protocol.outcome` that are simulated. timeout: the probe hung, or
was too slow for its deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedProbe:
    """How a simulated probe ended."""

    ended_s: float
    """Simulated time of its end; at most `started_s + deadline_s`."""
    failure: SimulatedFailure | None = None
    """None: it completed."""
    message: str = ""
    """One sentence about the failure."""
    failed_node: int | None = None
    """Position in `nodes` of the node where it went wrong."""
    iteration_s: tuple[float, ...] = ()
    """Seconds of each iteration, warm-up first; with a failure those that had ended."""
    peak_memory_bytes: tuple[int, ...] = ()
    """Largest peak of any rank of each pipeline stage, in use; of the stages' ranks that fit."""
    peak_reserved_bytes: tuple[int, ...] = ()
    """The same, as reserved by the allocator."""
    parts_s: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """`workers.simulation.steps.PARTS` of the median timed iteration, whose sum it is; empty with a
    failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedCluster:
    """Nodes of a simulated machine; slow and failing nodes are drawn from the seed.

    Build one with `of`.
    """

    cluster: Cluster
    seed: int
    slowness: tuple[float, ...] = field(repr=False)
    """Time of each node's slowest device, relative to a usual one: what a health check shows."""
    fails_at_s: tuple[float, ...] = field(repr=False)
    """Simulated time at which each node is lost for good; infinite: it stays."""
    version: int = SIMULATOR_VERSION

    @classmethod
    def of(cls, preset: str | Cluster, *, num_nodes: int, seed: int) -> Self:
        """The machine of a seed; ClusterInvalidError if the preset is unknown."""
        cluster = preset if isinstance(preset, Cluster) else resolve_cluster(preset)[0]
        cluster = replace(cluster, num_nodes=num_nodes)
        rng = np.random.default_rng([seed, num_nodes])
        slow = node_slowness(num_nodes, rng)
        fails = rng.exponential(_NODE_LIFE_S, num_nodes)
        return cls(
            cluster=cluster,
            seed=seed,
            slowness=tuple(slow),
            fails_at_s=tuple(fails.tolist()),
        )

    def is_lost(self, node: int, at_s: float) -> bool:
        """Whether a node has been lost by a simulated time."""
        return at_s >= self.fails_at_s[node]

    def run(
        self,
        layout: Layout,
        model: ModelShape,
        *,
        nodes: Sequence[int],
        warmup_iterations: int,
        timed_iterations: int,
        started_s: float,
        run_seed: int,
        deadline_s: float,
        effects: HiddenEffects = NO_EFFECTS,
    ) -> SimulatedProbe:
        """Runs a probe.

        Args:
            layout: the layout, `layout.num_nodes` of nodes, as many as there are in `nodes`.
            model: the model.
            nodes: the nodes that its ranks are on, in order, counted from 0.
            warmup_iterations: untimed iterations.
            timed_iterations: timed iterations.
            started_s: simulated time of its start.
            run_seed: of its noise and its hangs.
            deadline_s: seconds from its start until it is ended.
            effects: what the job knobs of the layout do.
        """
        if layout.is_v_shaped:
            message = f"the simulator has no schedule={layout.schedule}, which has the shape of a V"
            return SimulatedProbe(ended_s=started_s, failure="unsupported", message=message)
        if layout.offload != "none":
            message = f"the simulator has no offload={layout.offload}; leave it out"
            return SimulatedProbe(ended_s=started_s, failure="unsupported", message=message)
        machine = Machine.of(self.cluster)
        peaks = rank_memory(layout, model, machine, seed=self.seed, effects=effects)
        up_s = min(started_s + _START_S, started_s + deadline_s)
        fullest = max(device_bytes(layout, machine, rank) for rank in peaks)
        if fullest > self.cluster.device_memory_bytes:
            has = memory(self.cluster.device_memory_bytes)
            message = f"a rank needs {memory(round(fullest))} of a device's {has}"
            return SimulatedProbe(ended_s=up_s, failure="out_of_memory", message=message)
        slowness = [self.slowness[node] for node in nodes]
        step = steps([layout], model, machine, node_slowness=slowness, effects=effects)[0]
        rng = np.random.default_rng([self.seed, run_seed])
        count = warmup_iterations + timed_iterations
        iteration_s = step.step_s * np.exp(machine.noise * rng.standard_normal(count))
        iteration_s[: min(warmup_iterations, 1)] *= _FIRST_ITERATION
        hangs = rng.random() < _HANGS
        ends_s = up_s + np.cumsum(iteration_s)
        last_s = started_s + deadline_s
        lost = min(range(len(nodes)), key=lambda at: self.fails_at_s[nodes[at]])
        lost_s = max(self.fails_at_s[nodes[lost]], started_s)
        hung_s = ends_s[int(rng.integers(count))] if hangs and count else np.inf
        done = tuple(iteration_s[ends_s < min(hung_s, lost_s, last_s)].tolist())
        ended_s = float(ends_s[-1]) if count else up_s
        if lost_s <= min(last_s, np.inf if hangs else ended_s):
            return SimulatedProbe(
                ended_s=lost_s,
                failure="node_lost",
                message=f"node {nodes[lost]} was lost in iteration {len(done)}",
                failed_node=lost,
                iteration_s=done,
            )
        if hangs or ended_s > last_s:
            what = "hung" if hangs else "was not done"
            message = f"{what} in iteration {len(done)} when the {deadline_s:g} s were over"
            return SimulatedProbe(
                ended_s=last_s, failure="timeout", message=message, iteration_s=done
            )
        scale = float(np.median(iteration_s[warmup_iterations:])) / step.step_s
        return SimulatedProbe(
            ended_s=ended_s,
            iteration_s=done,
            peak_memory_bytes=tuple(round(rank.allocated_bytes) for rank in peaks),
            peak_reserved_bytes=tuple(round(rank.reserved_bytes) for rank in peaks),
            # Noise is in all parts alike.
            parts_s=MappingProxyType({name: scale * part for name, part in step.parts_s.items()}),
        )


_START_S: Final = 20.0
"""From the request to the first iteration."""
_NODE_LIFE_S: Final = 400 * 86400.0
"""Mean simulated time until a node is lost: of 9,408 nodes one an hour."""
_FIRST_ITERATION: Final = 1.5
"""Time of the first iteration, relative to the others."""
_HANGS: Final = 0.002
"""Share of the probes that hang."""
