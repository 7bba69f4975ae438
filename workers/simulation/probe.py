"""Probes on a simulated cluster: what a worker that simulates its nodes asks.

Times are simulated seconds: `started_s` and `ended_s` are on one clock, which begins with the
allocation. Equal arguments give equal probes. Losses are not simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Literal, Self

import numpy as np

from search_spaces.spec.cluster import Cluster
from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape
from search_spaces.spec.presets.clusters import resolve_cluster
from workers.simulation.machine import Machine
from workers.simulation.memory import peak_memory_bytes
from workers.simulation.steps import step_times_s

SIMULATOR_VERSION: Final = 1
"""Changes where the same cluster, layout and seed give other figures."""

SimulatedFailure = Literal["out_of_memory", "node_lost", "timeout", "unsupported"]
"""The failures of `search_spaces.protocol.outcome` that are simulated. timeout: the probe hung, or
was too slow for its deadline."""

PARTS: Final = ("compute_s", "tp_s", "cp_s", "ep_s", "pp_s", "dp_s", "optimizer_s", "unexplained_s")
"""The parts of an iteration: the fields of `search_spaces.protocol.measurement.Breakdown`."""


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
    """`PARTS` of the median timed iteration, whose sum it is; empty with a failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedCluster:
    """Nodes of a simulated machine; slow and failing nodes are drawn from the seed.

    Build one with `of`.
    """

    cluster: Cluster
    num_nodes: int
    seed: int
    slowness: tuple[float, ...] = field(repr=False)
    """Time of each node's slowest device, relative to a usual one: what a health check shows."""
    fails_at_s: tuple[float, ...] = field(repr=False)
    """Simulated time at which each node is lost for good; infinite: it stays."""
    version: int = SIMULATOR_VERSION

    @classmethod
    def of(cls, preset: str | Cluster, *, num_nodes: int, seed: int) -> Self:
        """The machine of a seed.

        Raises:
            ClusterInvalidError: the preset is unknown.
        """
        cluster = preset if isinstance(preset, Cluster) else resolve_cluster(preset)[0]
        cluster = replace(cluster, num_nodes=num_nodes)
        rng = np.random.default_rng([seed, num_nodes])
        slow = 1.0 + np.abs(rng.normal(0.0, 0.004, num_nodes))
        slow += np.where(rng.random(num_nodes) < 0.01, rng.uniform(0.03, 0.15, num_nodes), 0.0)
        fails = rng.exponential(_NODE_LIFE_S, num_nodes)
        return cls(
            cluster=cluster,
            num_nodes=num_nodes,
            seed=seed,
            slowness=tuple(slow.tolist()),
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
        """
        machine = Machine.draw(
            self.cluster, layout.num_devices, np.random.default_rng([self.seed, 0])
        )
        peak = round(peak_memory_bytes(layout, model, machine, seed=self.seed))
        up_s = started_s + _START_S
        if peak > self.cluster.device_memory_bytes:
            message = (
                f"{peak} bytes are more than the {self.cluster.device_memory_bytes} of a device"
            )
            return SimulatedProbe(ended_s=up_s, failure="out_of_memory", message=message)
        rng = np.random.default_rng([self.seed, run_seed])
        step_s = float(step_times_s([layout], model, machine)[0])
        step_s *= max(self.slowness[node] for node in nodes)
        count = warmup_iterations + timed_iterations
        iterations = step_s * np.exp(machine.noise * rng.standard_normal(count))
        ends_s = up_s + np.cumsum(iterations)
        ended_s = float(ends_s[-1]) if count else up_s
        lost = min(range(len(nodes)), key=lambda at: self.fails_at_s[nodes[at]])
        lost_s = max(self.fails_at_s[nodes[lost]], started_s)
        stop_s = min(lost_s, started_s + deadline_s)
        done = tuple(iterations[ends_s <= stop_s].tolist())
        if stop_s < ended_s:
            is_lost = lost_s <= started_s + deadline_s
            return SimulatedProbe(
                ended_s=stop_s,
                failure="node_lost" if is_lost else "timeout",
                message="the node was lost" if is_lost else f"not done after {deadline_s:g} s",
                failed_node=lost if is_lost else None,
                iteration_s=done,
            )
        median_s = float(np.median(iterations[warmup_iterations:]))
        parts = dict.fromkeys(PARTS, 0.0) | {"compute_s": median_s}
        return SimulatedProbe(
            ended_s=ended_s,
            iteration_s=done,
            peak_memory_bytes=(peak,) * layout.pp,
            peak_reserved_bytes=(peak,) * layout.pp,
            parts_s=MappingProxyType(parts),
        )


_START_S: Final = 20.0
"""From the request to the first iteration."""
_NODE_LIFE_S: Final = 400 * 86400.0
"""Mean simulated time until a node is lost."""
