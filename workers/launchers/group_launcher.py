"""The launcher over any set of nodes: from a request to an outcome."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final, Self

from search_spaces.cluster import Cluster
from search_spaces.layout import Layout, Precision
from search_spaces.outcome import (
    Environment,
    FailureReason,
    Measurement,
    Outcome,
    OutcomeState,
    ProbeRequest,
)
from workers.errors import PlacementImpossibleError, WorkerError
from workers.launchers.base import (
    Cancelled,
    Launcher,
    Node,
    NodeSet,
    OnEvent,
    TrainingEnd,
)
from workers.launchers.group import Group, GroupEnd, GroupFailure
from workers.launchers.placement import place
from workers.packing.shares import Placement, Share
from workers.rank_task import Device

_PEAK_WITHIN_S: Final = 60.0
_NO_DEADLINE_S: Final = 10 * 365 * 86400.0


def device_of(cluster: Cluster) -> Device:
    """What ranks compute on, from what the cluster says a device is."""
    return "cpu" if "cpu" in cluster.device.lower() else "cuda"


class GroupLauncher(Launcher):
    """Runs probes and training jobs on a set of nodes, any number at a time.

    Args:
        nodes: where; the launcher closes them.
        cluster: what they are nodes of.
        allow_sharing: whether more ranks than devices are allowed, and marked as oversubscribed.
    """

    def __init__(self, nodes: NodeSet, cluster: Cluster, *, allow_sharing: bool) -> None:
        self._nodes = nodes
        self._cluster = cluster
        self._device = device_of(cluster)
        self._allow_sharing = allow_sharing
        self._peaks: dict[Precision, tuple[float, str]] = {}
        self._measuring = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes, in order."""
        return self._nodes.nodes

    @property
    def device(self) -> Device:
        """What ranks compute on."""
        return self._device

    @property
    def devices_per_node(self) -> int:
        """Ranks that a node holds without sharing."""
        return self._nodes.nodes[0].capacity(self._device)

    def run(
        self,
        request: ProbeRequest,
        *,
        shares: Placement | None = None,
        on_event: OnEvent,
        cancelled: Cancelled,
    ) -> Outcome:
        """Runs a probe to its end.

        Raises:
            RanksLeftError: a process of it can't be ended; its nodes must not be used again.
        """
        try:
            tflops, source = self.peak(request.layout.precision, cancelled, shares=shares)
            end = self._run_group(
                request.layout,
                {
                    "kind": "probe",
                    "request": request.to_mapping(),
                    "peak_tflops_per_device": tflops,
                    "peak_source": source,
                },
                shares=shares,
                deadline_s=request.deadline_s,
                memory_limit_bytes=request.memory_limit_bytes,
                on_event=on_event,
                cancelled=cancelled,
            )
        except PlacementImpossibleError as error:
            return Outcome(state="failed", reason="unsupported", message=str(error))
        except _PeakFailedError as error:
            end = error.end
        return self._outcome(end)

    def train(
        self, job: Mapping[str, Any], *, on_event: OnEvent, cancelled: Cancelled
    ) -> TrainingEnd:
        """Runs a training job to its end.

        Raises:
            PlacementImpossibleError: it needs more devices than there are.
            RanksLeftError: a process of it can't be ended.
        """
        layout = Layout.from_mapping(job["layout"])
        try:
            tflops, source = self.peak(layout.precision, cancelled)
            end = self._run_group(
                layout,
                {
                    "kind": "train",
                    "job": dict(job),
                    "peak_tflops_per_device": tflops,
                    "peak_source": source,
                },
                deadline_s=_NO_DEADLINE_S,
                on_event=lambda event: None if event["event"] == "listening" else on_event(event),
                cancelled=cancelled,
            )
        except _PeakFailedError as error:
            end = error.end
        if end.failure is not None:
            return TrainingEnd(result=None, message=end.failure.message, log_tail=end.log_tail)
        return TrainingEnd(result=end.results[0]["training"])

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
        """Runs a job which is neither a probe nor a training: a rank on each device of the shares.

        Raises:
            PlacementImpossibleError: a share has devices that are none of its own.
            RanksLeftError: a process of it can't be ended.
        """
        tasks = place(
            self._nodes.nodes,
            shares,
            num_ranks=sum(len(share.devices) for share in shares),
            num_nodes=len(shares),
            device=self._device,
            job=job,
            deadline_s=deadline_s,
            rendezvous=rendezvous,
        )
        return Group(
            self._nodes, tasks, deadline_s=deadline_s, on_event=on_event, cancelled=cancelled
        ).run()

    def peak(
        self, precision: Precision, cancelled: Cancelled, *, shares: Placement | None = None
    ) -> tuple[float, str]:
        """The peak of one device in TFLOP/s and where it comes from.

        The cluster's own figure where it has one; else measured, once, on as many devices at once
        as a node has to itself, since they share its clock and its memory.

        Args:
            precision: of the matmul.
            cancelled: whether to end.
            shares: of whose devices it may be measured; None: on those of the first node.
        """
        described = self._cluster.peak_flops_per_s.get(precision)
        if described is not None:
            return described / 1e12, f"cluster description ({self._cluster.name}, {precision})"
        with self._measuring:
            if precision not in self._peaks:
                self._peaks[precision] = self._measured_peak(precision, cancelled, shares)
            return self._peaks[precision]

    def keep_measured_peak(self, precision: Precision, tflops: float, source: str) -> None:
        """Takes a peak that was measured on all devices of a node at once, unless there is one."""
        with self._measuring:
            self._peaks.setdefault(precision, (tflops, source))

    def lost(self) -> Mapping[int, str]:
        """Nodes that can't be used now, and why."""
        return self._nodes.lost()

    def recover(self, node: int) -> None:
        """Makes a lost node usable again."""
        self._nodes.recover(node)

    def close(self) -> None:
        """Ends every process on every node."""
        self._nodes.close()

    def _measured_peak(
        self, precision: Precision, cancelled: Cancelled, shares: Placement | None
    ) -> tuple[float, str]:
        end = self.run_job(
            {"kind": "peak", "precision": precision},
            shares=(self._share_for_the_peak(shares),),
            deadline_s=_PEAK_WITHIN_S,
            rendezvous=False,
            on_event=lambda _: None,
            cancelled=cancelled,
        )
        if end.failure is not None:
            raise _PeakFailedError(_of_the_peak(end, end.failure))
        results = end.results.values()
        return median(result["tflops"] for result in results), end.results[0]["source"]

    def _share_for_the_peak(self, shares: Placement | None) -> Share:
        """A whole node's cores, which no two probes share; else no device but the probe's own."""
        if shares is None:
            return Share.of_first(0, self.devices_per_node)
        if self._device == "cpu":
            node = shares[0].node
            return Share.of_first(node, self._nodes.nodes[node].capacity("cpu"))
        return shares[0]

    def _run_group(
        self,
        layout: Layout,
        job: Mapping[str, Any],
        *,
        deadline_s: float,
        on_event: OnEvent,
        cancelled: Cancelled,
        shares: Placement | None = None,
        memory_limit_bytes: int | None = None,
    ) -> GroupEnd:
        tasks = place(
            self._nodes.nodes,
            shares,
            num_ranks=layout.num_devices,
            num_nodes=layout.num_nodes,
            device=self._device,
            job=job,
            deadline_s=deadline_s,
            allow_sharing=self._allow_sharing,
        )
        group = Group(
            self._nodes,
            tasks,
            deadline_s=deadline_s,
            on_event=on_event,
            cancelled=cancelled,
            memory_limit_bytes=memory_limit_bytes,
        )
        return group.run()

    def _outcome(self, end: GroupEnd) -> Outcome:
        failure = end.failure
        if failure is None:
            result = end.results[0]
            return Outcome(
                state="completed",
                duration_s=end.duration_s,
                measurement=Measurement.from_mapping(result["measurement"]),
                environment=Environment.from_mapping(result["environment"]),
            )
        node = "" if failure.node is None else self._nodes.nodes[failure.node].name
        return Outcome(
            state=_STATES.get(failure.reason, "failed"),
            reason=failure.reason,
            message=failure.message,
            node=node,
            log_tail=end.log_tail,
            duration_s=end.duration_s,
        )


class _PeakFailedError(WorkerError):
    """The peak could not be measured: what would the probe do here?"""

    def __init__(self, end: GroupEnd) -> None:
        super().__init__(f"the matmul peak could not be measured: {end.failure}")
        self.end = end


def _of_the_peak(end: GroupEnd, failure: GroupFailure) -> GroupEnd:
    """The failed measurement of the peak as the end of a probe that it kept from running.

    A matmul that finds no memory says nothing about the layout, so it is no infeasible one.
    """
    reason = "crashed" if failure.reason == "out_of_memory" else failure.reason
    message = f"while the matmul peak was measured: {failure.message}"
    return replace(end, failure=replace(failure, reason=reason, message=message))


_STATES: Final[Mapping[FailureReason, OutcomeState]] = {
    "out_of_memory": "infeasible",
    "cancelled": "cancelled",
}
