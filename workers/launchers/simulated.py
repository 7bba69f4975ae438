"""The launcher of simulated nodes: a simulator answers the probes, and nothing is started.

It has one clock, of simulated seconds, which several launchers of one process may share: their
nodes are parts of one simulated machine. A probe is simulated in one piece when it starts; what
becomes of it counts when the clock has reached its end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import fsum
from typing import Final

from layout_tuner.predictions.statistics.early_stop import LEAST_TIMED, shows_enough
from layout_tuner.predictions.statistics.step_times import (
    MAX_EXTRA_WARMUP,
    has_settled,
    num_warmup,
    quartiles,
)
from layout_tuner.protocol.measurement import Breakdown, Environment, Iteration, Measurement
from layout_tuner.protocol.outcome import Outcome, ProbeRequest
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.throughput import Throughput
from layout_tuner.trainers.simulator import simulator_trainer
from layout_tuner.units import memory
from layout_tuner.workers.errors import RanksLeftError, WorkerError
from layout_tuner.workers.launchers.group import GroupEnd, GroupFailure
from layout_tuner.workers.launchers.group_launcher import outcome_of
from layout_tuner.workers.launchers.launcher_nodes import Node
from layout_tuner.workers.packing.request import Placement
from layout_tuner.workers.packing.topology import Topology
from layout_tuner.workers.simulation.knob_effects import HiddenEffects
from layout_tuner.workers.simulation.simulated_cluster import SimulatedCluster, SimulatedProbe
from layout_tuner.workers.trainer.revision import GIT_REVISION

MEMORY_KIND: Final = "simulated"
"""The kind of a simulated measurement's memory."""


class PeakUnknownError(WorkerError):
    """A simulated cluster's description has no peak, which no probe can measure there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedOutcome:
    """A simulated probe, from its start to its end."""

    outcome: Outcome
    """It holds from `ends_at` on."""
    ends_at: float
    """Simulated time of its end."""
    steps_end_at: tuple[float, ...]
    """Simulated times at which its iterations end."""
    steps_s: tuple[float, ...]
    """Seconds of its iterations."""

    def iterations_done(self, now: float) -> int:
        return bisect_right(self.steps_end_at, now)


class SimulatedLauncher:
    """Simulates probes on a part of a machine; PeakUnknownError if its description has no peak."""

    def __init__(
        self,
        machine: SimulatedCluster,
        *,
        first_node: int,
        num_nodes: int,
        clock: Callable[[], float],
    ) -> None:
        """Takes `num_nodes` nodes of the machine, from the position `first_node` on."""
        self.machine = machine
        self._first = first_node
        self._clock = clock
        cluster = machine.cluster
        if not cluster.peak_flops_per_s:
            raise PeakUnknownError(
                f"cluster {cluster.name} has no peak_flops_per_s, and simulated nodes cannot measure "
                "it; add it to the description of the cluster"
            )
        domains = Topology.of(cluster).most_nodes.items()
        self.nodes: tuple[Node, ...] = tuple(
            Node(
                name=f"{cluster.name}-simulated-{first_node + node:05d}",
                address="",
                num_devices=cluster.devices_per_node,
                num_cores=cluster.devices_per_node,
                core_ids=(),
                labels={name: f"{name}-{(first_node + node) // size}" for name, size in domains},
            )
            for node in range(num_nodes)
        )

    def lost(self) -> Mapping[int, str]:
        """Nodes that are lost by now, and why."""
        return {node: "it has failed" for node in range(len(self.nodes)) if self.is_lost(node)}

    def agent_ends(self, _node: int, /) -> int:
        return 0

    def recover(self, node: int, /) -> None:
        """A lost node stays lost. Raises RanksLeftError in every case."""
        raise RanksLeftError("it has failed for good", node)

    def close(self) -> None:
        """Does nothing: no process was started."""

    def is_lost(self, node: int) -> bool:
        return self.machine.is_lost(self._first + node, self._clock())

    def slowness(self, node: int) -> float:
        """Time of a node's slowest device, relative to a usual one."""
        return self.machine.slowness[self._first + node]

    def run(self, request: ProbeRequest, shares: Placement, *, run_seed: int) -> TimedOutcome:
        """Simulates a probe that starts now."""
        started_at = self._clock()
        positions = tuple(share.node for share in shares)

        def simulated(timed_iterations: int) -> SimulatedProbe:
            return self.machine.run(
                request.layout,
                request.model,
                nodes=[self._first + node for node in positions],
                warmup_iterations=request.warmup,
                timed_iterations=timed_iterations,
                started_s=started_at,
                run_seed=run_seed,
                deadline_s=request.deadline_s,
                effects=HiddenEffects(seed=request.simulation_seed or 0, trainer=request.trainer),
            )

        probe = simulated(request.iterations + MAX_EXTRA_WARMUP)
        enough = _enough(probe.iteration_s, request)
        if enough is not None:
            # It ends there, before what it may have failed at later.
            exact = probe.failure is not None
            probe = simulated(enough - request.warmup) if exact else _cut(probe, enough)
        failure = _failure(probe, request, positions, self.machine.cluster)
        end = GroupEnd(
            failure=failure,
            results={},
            log_tail="",
            duration_s=probe.ended_s - started_at,
            first_node=positions[0],
        )
        outcome = outcome_of(
            request,
            end,
            lambda: (self._measurement(probe, request), self._environment(positions[0])),
            nodes=self.nodes,
            memory_bytes=request.memory_limit_bytes or self.machine.cluster.device_memory_bytes,
        )
        later_s = [*accumulate(reversed(probe.iteration_s[1:]), initial=0.0)][::-1]
        return TimedOutcome(
            outcome=outcome,
            ends_at=probe.ended_s,
            steps_end_at=tuple(probe.ended_s - each for each in later_s[: len(probe.iteration_s)]),
            steps_s=probe.iteration_s,
        )

    def _measurement(self, probe: SimulatedProbe, request: ProbeRequest) -> Measurement:
        layout, model, cluster = request.layout, request.model, self.machine.cluster
        warmup = num_warmup(probe.iteration_s, at_least=request.warmup)
        assert warmup is not None  # it has completed
        timed_s = probe.iteration_s[warmup:]
        q25_s, step_time_s, q75_s = quartiles(timed_s)
        tokens = layout.global_batch_size * model.seq_length
        peak = cluster.peak_flops_per_s[layout.precision]
        speed = Throughput(
            model=model,
            layout=layout,
            tokens_per_s=tokens / step_time_s,
            peak_tflops_per_device=peak / 1e12,
        )
        return Measurement(
            step_time_s=step_time_s,
            step_time_q25_s=q25_s,
            step_time_q75_s=q75_s,
            tokens_per_step=tokens,
            **speed.figures,
            peak_source=f"cluster description ({cluster.name}, {layout.precision})",
            peak_memory_bytes=max(probe.peak_memory_bytes),
            peak_memory_bytes_by_stage=probe.peak_memory_bytes,
            peak_reserved_bytes_by_stage=probe.peak_reserved_bytes,
            memory_kind=MEMORY_KIND,
            oversubscribed=False,
            iterations=tuple(
                Iteration(
                    index=index,
                    kind="warmup" if index < warmup else "timed",
                    step_time_s=seconds,
                    loss=None,
                    grad_norm=None,
                )
                for index, seconds in enumerate(probe.iteration_s)
            ),
            iterations_asked=request.iterations,
            warmup_settled=has_settled(probe.iteration_s[:warmup]),
            breakdown=Breakdown(**_scaled(probe.parts_s, step_time_s)),
            shortened=len(timed_s) < request.iterations,
            trainer=simulator_trainer(self.machine.version),
            trainer_version=str(self.machine.version),
            losses_comparable=False,
        )

    def _environment(self, node: int) -> Environment:
        version, seed = self.machine.version, self.machine.seed
        return Environment.described(
            host=self.nodes[node].name,
            device=f"simulated {self.machine.cluster.device}",
            backend=f"simulator {version}, nodes of seed {seed}",
            git_revision=GIT_REVISION,
            **dict.fromkeys(("python_version", "torch_version", "numpy_version"), ""),
        )


def _enough(steps_s: Sequence[float], request: ProbeRequest) -> int | None:
    """Iterations after which a probe ends, fewer if it is slower than the best; None: too few."""
    warmup = num_warmup(steps_s, at_least=request.warmup)
    above_s = request.stop_above_step_time_s
    if warmup is None:
        return None
    timed_s = steps_s[warmup : warmup + request.iterations]
    if above_s is not None:
        for count in range(LEAST_TIMED, len(timed_s)):
            if shows_enough(timed_s[:count], above_s):
                return warmup + count
    return warmup + request.iterations if len(timed_s) == request.iterations else None


def _cut(probe: SimulatedProbe, num_steps: int) -> SimulatedProbe:
    """A probe that completed, as it is after fewer iterations."""
    return replace(
        probe,
        iteration_s=probe.iteration_s[:num_steps],
        ended_s=probe.ended_s - fsum(probe.iteration_s[num_steps:]),
    )


def _failure(
    probe: SimulatedProbe, request: ProbeRequest, positions: Sequence[int], cluster: Cluster
) -> GroupFailure | None:
    """How a probe failed; also where it needs more memory than the campaign's cluster has."""
    if request.layout.precision not in cluster.peak_flops_per_s:
        message = (
            f"cluster {cluster.name} is described without a peak in {request.layout.precision}"
        )
        return GroupFailure(reason="unsupported", message=message)
    if probe.failure is not None:
        node = None if probe.failed_node is None else positions[probe.failed_node]
        return GroupFailure(reason=probe.failure, message=probe.message, node=node)
    limit, peak = request.memory_limit_bytes, max(probe.peak_reserved_bytes, default=0)
    if limit is not None and peak > limit:
        message = f"{memory(peak)} are more than the {memory(limit)} of a device"
        return GroupFailure(reason="out_of_memory", message=message)
    return None


def _scaled(parts_s: Mapping[str, float], step_time_s: float) -> dict[str, float]:
    """The parts of an iteration, scaled to the median one, without negative zeros of rounding."""
    scale = step_time_s / fsum(parts_s.values())
    return {
        name: seconds * scale if name == "unexplained_s" else max(seconds * scale, 0.0)
        for name, seconds in parts_s.items()
    }
