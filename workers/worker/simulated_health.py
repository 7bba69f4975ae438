"""The health check of simulated nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from workers.launchers.base import Cancelled
from workers.launchers.simulated import SimulatedLauncher
from workers.ranks.rank_task import Device
from workers.worker.node_health import PRECISIONS, HealthReport


def check_simulated_nodes(
    launcher: SimulatedLauncher,
    nodes: Sequence[int],
    _cancelled: Cancelled,
    _known: Mapping[int, HealthReport],
) -> dict[int, HealthReport]:
    """What a health check shows of simulated nodes: how slow they are, or that they are lost."""
    return dict(zip(nodes, _reports(launcher, nodes), strict=True))


def _reports(launcher: SimulatedLauncher, nodes: Sequence[int]) -> Iterator[HealthReport]:
    cluster = launcher.machine.cluster
    device: Device = "cpu" if cluster.has_cpu_devices else "cuda"
    size = cluster.devices_per_node
    peaks = cluster.peak_flops_per_s
    peak_tflops = peaks.get(PRECISIONS[device], max(peaks.values())) / 1e12
    for node in nodes:
        if launcher.is_lost(node):
            yield HealthReport(device=device, num_devices=size, failure="it has failed")
            continue
        rate = peak_tflops / launcher.slowness(node)
        yield HealthReport(
            device=device,
            num_devices=size,
            num_devices_seen=size,
            memory_bytes=cluster.device_memory_bytes,
            memory_free_bytes=cluster.device_memory_bytes,
            gemm_tflops=(rate,) * size,
            peak_tflops=rate,
            peak_source=f"simulated ({cluster.name})",
        )
