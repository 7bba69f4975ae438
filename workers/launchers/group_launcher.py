"""The launcher for any set of nodes: from a request to an outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Any, Final, Self

from layout_tuner.documents.limits import acceptable_log, visible_line
from layout_tuner.errors import OutcomeInvalidError
from layout_tuner.protocol.measurement import Environment, Measurement
from layout_tuner.protocol.measurement_checks import refuse_contradictions
from layout_tuner.protocol.outcome import (
    MAX_LOG_LENGTH,
    MAX_MESSAGE_LENGTH,
    FailureReason,
    Outcome,
    OutcomeState,
    ProbeRequest,
)
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Layout, Precision
from layout_tuner.search_spaces.throughput import MEASURED_PEAK
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER
from layout_tuner.trainers.parameters import ParameterInvalidError
from layout_tuner.trainers.program import ProgramTrainer
from layout_tuner.workers.errors import PlacementImpossibleError, TrainerUnknownError, WorkerError
from layout_tuner.workers.launchers.group import GroupEnd, GroupFailure, RankGroup, Verdict
from layout_tuner.workers.launchers.launcher_nodes import Cancelled, Node, NodeSet, OnEvent
from layout_tuner.workers.launchers.placement import Processes, place
from layout_tuner.workers.packing.request import Placement, Share
from layout_tuner.workers.programs.program_run import ProgramRun, ResultRefusedError, program_task
from layout_tuner.workers.ranks.rank_task import Device
from layout_tuner.workers.trainer.product_layouts import Product, to_rows
from layout_tuner.workers.trainer.revision import GIT_REVISION

_Measured = tuple[Measurement, Environment]
_ReadMeasurement = Callable[[], _Measured]

_PEAK_WITHIN_S: Final = 60.0
_NO_DEADLINE_S: Final = 10 * 365 * 86400.0


class GroupLauncher:
    """Runs probes and training jobs on a set of nodes; failures of probes are outcomes.

    It is a `LaunchedNodes` itself. Any thread may call it. The caller ensures that groups which run
    at the same time hold disjoint shares.

    Args:
        nodes: the nodes; the launcher closes them.
        cluster: their cluster.
        allow_sharing: whether more ranks than devices are allowed, and marked as oversubscribed.
        trainers: programs that probes may run, by name.
    """

    def __init__(
        self,
        nodes: NodeSet,
        cluster: Cluster,
        *,
        allow_sharing: bool,
        trainers: Mapping[str, ProgramTrainer] = MappingProxyType({}),
    ) -> None:
        self._nodes = nodes
        self._cluster = cluster
        self.device: Device = "cpu" if cluster.has_cpu_devices else "cuda"
        """Kind of the devices."""
        self._allow_sharing = allow_sharing
        self._trainers = trainers
        self._peaks: dict[Precision, tuple[float, str]] = {}
        self._product_layouts: Mapping[Product, str] = {}
        self._measuring = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def nodes(self) -> Sequence[Node]:
        return self._nodes.nodes

    @property
    def devices_per_node(self) -> int:
        """Ranks that a node holds without sharing devices."""
        return self._nodes.nodes[0].capacity(self.device)

    def run(
        self,
        request: ProbeRequest,
        *,
        shares: Placement | None = None,
        on_event: OnEvent,
        cancelled: Cancelled,
    ) -> Outcome:
        """Runs a probe to its end; no process of it is left when this returns.

        Args:
            request: the probe.
            shares: devices that it holds meanwhile; None: the first devices, as many as it needs.
            on_event: called with {"event": "listening"} when the first rank is ready, and with each
                iteration: its "index" and "step_time_s".
            cancelled: whether it must end.

        Raises:
            RanksLeftError: a process of it can't be ended; its nodes must not be used again.
        """
        run = partial(
            self._run_layout,
            request.layout,
            shares=shares,
            deadline_s=request.deadline_s,
            memory_limit_bytes=request.memory_limit_bytes,
            cancelled=cancelled,
        )
        read_measurement: _ReadMeasurement
        try:
            if request.trainer == EMBEDDED_TRAINER:
                job = {"kind": "probe", "request": request.to_mapping()}
                end = run(self._with_product_layouts(job), on_event=on_event)
                read_measurement = partial(
                    self._measurement_of_rank_0, request.layout.precision, end
                )
            else:
                trainer = self._trainer(request.trainer)
                program = ProgramRun(request, trainer, on_event)
                end = run(
                    program_task(request, trainer).to_job(),
                    on_event=program.take,
                    processes="one_per_node" if trainer.processes_per == "node" else "all_devices",
                    verdict=partial(_verdict, program),
                )
                read_measurement = partial(
                    self._measurement_of_program, program, end, shares, cancelled
                )
        except (PlacementImpossibleError, TrainerUnknownError, ParameterInvalidError) as error:
            return _refused("unsupported", error)
        except ResultRefusedError as error:
            return _refused(error.reason, error)
        memory_bytes = request.memory_limit_bytes or self._most_memory_bytes
        return outcome_of(
            request, end, read_measurement, nodes=self._nodes.nodes, memory_bytes=memory_bytes
        )

    def _trainer(self, name: str) -> ProgramTrainer:
        if (trainer := self._trainers.get(name)) is not None:
            return trainer
        known = ", ".join(self._trainers) or "none but the embedded one"
        raise TrainerUnknownError(f"this worker has no trainer {name!r}; it has {known}")

    def _measurement_of_rank_0(self, precision: Precision, end: GroupEnd) -> _Measured:
        result = end.results[0]
        measurement = Measurement.from_mapping(result["measurement"])
        if measurement.peak_source == f"{MEASURED_PEAK} ({precision})":
            # The ranks may have measured it again. That of several threads is another peak.
            tflops = measurement.peak_tflops_per_device
            self.keep_measured_peak(precision, tflops, measurement.peak_source)
        return measurement, Environment.from_mapping(result["environment"])

    def _measurement_of_program(
        self, run: ProgramRun, end: GroupEnd, shares: Placement | None, cancelled: Cancelled
    ) -> _Measured:
        """What a program that has ended, or reported all steps before it failed, measured."""
        precision = run.request.layout.precision
        tflops, source = self.peak(precision, cancelled)
        measurement = run.measurement(
            peak_tflops=tflops,
            peak_source=source,
            peak_again=partial(self._peak_again, precision, cancelled, shares),
            oversubscribed=end.oversubscribed,
        )
        environment = Environment.described(
            host=self._nodes.nodes[end.first_node].name,
            device=self._cluster.device,
            git_revision=GIT_REVISION,
            **dict.fromkeys(("backend", "python_version", "torch_version", "numpy_version"), ""),
        )
        return measurement, environment

    def train(self, job: Mapping[str, Any], *, on_event: OnEvent, cancelled: Cancelled) -> GroupEnd:
        """Runs a training job to its end; the result of rank 0 is its "training".

        Raises:
            PlacementImpossibleError: it needs more devices than there are.
            RanksLeftError: a process of it can't be ended.
        """
        return self._run_layout(
            Layout.from_mapping(job["layout"]),
            self._with_product_layouts({"kind": "train", "job": dict(job)}),
            deadline_s=_NO_DEADLINE_S,
            on_event=lambda event: None if event["event"] == "listening" else on_event(event),
            cancelled=cancelled,
        )

    def run_job(
        self,
        job: Mapping[str, Any],
        *,
        shares: Placement,
        deadline_s: float,
        on_event: OnEvent,
        cancelled: Cancelled,
        rendezvous: bool = True,
    ) -> GroupEnd:
        """Runs a job other than a probe or a training, with a rank on each device of the shares.

        Raises:
            PlacementImpossibleError: a share has more devices than its node.
            RanksLeftError: a process of it can't be ended.
        """
        tasks = place(
            self._nodes.nodes,
            shares,
            num_ranks=sum(len(share.devices) for share in shares),
            num_nodes=len(shares),
            device=self.device,
            job=job,
            deadline_s=deadline_s,
            rendezvous=rendezvous,
        )
        return RankGroup(
            nodes=self._nodes,
            tasks=tasks,
            deadline_s=deadline_s,
            on_event=on_event,
            cancelled=cancelled,
        ).run()

    def peak(
        self, precision: Precision, cancelled: Cancelled, *, shares: Placement | None = None
    ) -> tuple[float, str]:
        """The peak of one device in TFLOP/s, and its source.

        It is the number in the cluster's description. Where there is none, it is measured once, on
        all devices of a node at the same time, since they share its clock and its memory.
        Without shares, these are those of the first node.
        """
        described = self._cluster.peak_flops_per_s.get(precision)
        if described is not None:
            return described / 1e12, f"cluster description ({self._cluster.name}, {precision})"
        with self._measuring:
            if precision not in self._peaks:
                share = self._share_for_the_peak(shares)
                self._peaks[precision] = self._measured_peak(precision, cancelled, share)
            return self._peaks[precision]

    def keep_measured_peak(self, precision: Precision, tflops: float, source: str) -> None:
        """Keeps a peak that was measured on several devices at once, unless a better one is known.

        Other load lowers a measured peak, and nothing raises it.
        """
        with self._measuring:
            known = self._peaks.get(precision, (0.0, source))
            self._peaks[precision] = max(known, (tflops, source))

    def use_product_layouts(self, layouts: Mapping[Product, str]) -> None:
        """Has the embedded trainer lay matrix products out so in what runs from now on."""
        self._product_layouts = layouts

    def lost(self) -> Mapping[int, str]:
        return self._nodes.lost()

    def agent_ends(self, node: int) -> int:
        return self._nodes.agent_ends(node)

    def recover(self, node: int) -> None:
        self._nodes.recover(node)

    def close(self) -> None:
        self._nodes.close()

    def _with_product_layouts(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**job, "product_layouts": to_rows(self._product_layouts)}

    def _peak_again(
        self, precision: Precision, cancelled: Cancelled, shares: Placement | None
    ) -> float:
        """The peak after a probe exceeded it: one that was measured is measured again.

        It is measured on the devices that the probe still holds, since other probes may run.
        """
        _, source = self.peak(precision, cancelled)
        if source.startswith(MEASURED_PEAK):
            share = shares[0] if shares else self._share_for_the_peak(None)
            again = self._measured_peak(precision, cancelled, share, again=True)
            self.keep_measured_peak(precision, *again)
        return self.peak(precision, cancelled)[0]

    def _measured_peak(
        self, precision: Precision, cancelled: Cancelled, share: Share, *, again: bool = False
    ) -> tuple[float, str]:
        end = self.run_job(
            {"kind": "peak", "precision": precision, "again": again},
            shares=(share,),
            deadline_s=_PEAK_WITHIN_S,
            rendezvous=False,
            on_event=lambda _: None,
            cancelled=cancelled,
        )
        if (failure := end.failure) is not None:
            # A matmul that runs out of memory does not make the layout infeasible.
            reason = "crashed" if failure.reason == "out_of_memory" else failure.reason
            message = f"while the matmul peak was measured: {failure.message}"
            failure = replace(failure, reason=reason, message=message)
            raise _PeakFailedError(end, failure)
        results = end.results.values()
        return median(result["tflops"] for result in results), end.results[0]["source"]

    def _share_for_the_peak(self, shares: Placement | None) -> Share:
        """The devices for measuring the peak: all cores of a node, or the probe's own GPUs."""
        if shares is None:
            return Share.of_first(0, self.devices_per_node)
        if self.device == "cpu":
            node = shares[0].node
            return Share.of_first(node, self._nodes.nodes[node].capacity("cpu"))
        return shares[0]

    def _run_layout(
        self,
        layout: Layout,
        job: Mapping[str, Any],
        *,
        deadline_s: float,
        on_event: OnEvent,
        cancelled: Cancelled,
        shares: Placement | None = None,
        memory_limit_bytes: int | None = None,
        processes: Processes = "own_device",
        verdict: Verdict = lambda: False,
    ) -> GroupEnd:
        """Runs a job of a layout, after the peak of the devices has been looked up or measured."""
        try:
            tflops, source = self.peak(layout.precision, cancelled, shares=shares)
        except _PeakFailedError as error:
            return error.end
        tasks = place(
            self._nodes.nodes,
            shares,
            num_ranks=layout.num_devices,
            num_nodes=layout.num_nodes,
            device=self.device,
            job={**job, "peak_tflops_per_device": tflops, "peak_source": source},
            deadline_s=deadline_s,
            allow_sharing=self._allow_sharing,
            processes=processes,
        )
        return RankGroup(
            nodes=self._nodes,
            tasks=tasks,
            deadline_s=deadline_s,
            on_event=on_event,
            cancelled=cancelled,
            memory_limit_bytes=memory_limit_bytes,
            verdict=verdict,
        ).run()

    @property
    def _most_memory_bytes(self) -> int:
        """The memory of a rank without a limit; on CPU cores, all memory of its node."""
        cluster = self._cluster
        shared = cluster.devices_per_node if cluster.has_cpu_devices else 1
        return cluster.device_memory_bytes * shared


def outcome_of(
    request: ProbeRequest,
    end: GroupEnd,
    read_measurement: _ReadMeasurement,
    *,
    nodes: Sequence[Node],
    memory_bytes: int,
) -> Outcome:
    """The outcome of a group that has ended; a failure where the service would refuse it.

    `read_measurement` is called if the group completed. A rank may use `memory_bytes`.
    """
    failure, log_tail = end.failure, acceptable_log(end.log_tail, MAX_LOG_LENGTH)
    if failure is None:
        try:
            measurement, environment = read_measurement()
            refuse_contradictions(
                measurement,
                request,
                device_memory_bytes=memory_bytes,
                may_be_shortened=request.stop_above_step_time_s is not None,
            )
            return Outcome(
                state="completed",
                log_tail=log_tail,
                duration_s=end.duration_s,
                measurement=measurement,
                environment=environment,
            )
        except ResultRefusedError as error:
            failure = GroupFailure(reason=error.reason, message=str(error))
        except _PeakFailedError as error:
            failure = error.failure
        except OutcomeInvalidError as error:
            message = f"the trainer's figures: {error}"
            failure = GroupFailure(reason="implausible", message=message)
    return Outcome(
        state=_STATES.get(failure.reason, "failed"),
        reason=failure.reason,
        message=visible_line(failure.message, MAX_MESSAGE_LENGTH),
        node="" if failure.node is None else nodes[failure.node].name,
        log_tail=log_tail,
        duration_s=end.duration_s,
    )


def _refused(reason: FailureReason, error: Exception) -> Outcome:
    message = visible_line(str(error), MAX_MESSAGE_LENGTH)
    return Outcome(state="failed", reason=reason, message=message)


def _verdict(run: ProgramRun) -> GroupFailure | bool:
    """Whether a running program must end."""
    if run.is_enough:
        return True
    problem = run.problem()
    return False if problem is None else GroupFailure(reason=problem[0], message=problem[1])


class _PeakFailedError(WorkerError):
    """The peak could not be measured, so the probe is not run, or has no figures."""

    def __init__(self, end: GroupEnd, failure: GroupFailure) -> None:
        super().__init__(f"the matmul peak could not be measured: {failure}")
        self.end, self.failure = replace(end, failure=failure), failure


_STATES: Final[Mapping[FailureReason, OutcomeState]] = {
    "out_of_memory": "infeasible",
    "cancelled": "cancelled",
}
