"""Layouts and their figures in words."""

from __future__ import annotations

from datetime import datetime

from api.figures import layout_extras, memory, objective_figure, unit, zero
from results_db.standing import Standing
from search_spaces.layout import Layout


def short(layout: Layout) -> str:
    """A layout in a line: what differs from the plain value, and always the three degrees."""
    words = [
        f"nodes {layout.num_nodes}",
        f"tp {layout.tp}",
        f"pp {layout.pp}",
        f"dp {layout.dp}",
        f"micro-batch {layout.micro_batch_size}",
        f"micro-batches {layout.num_microbatches}",
        f"ZeRO {zero(layout)}",
        layout_extras(layout),
    ]
    return ", ".join(words)


def value(objective: str, number: float | None) -> str:
    """A figure with its unit."""
    return f"{objective_figure(objective, number)} {unit(objective)}"


def bounds(objective: str, standing: Standing) -> str:
    """The 95 % interval of a layout's value."""
    if standing.low is None or standing.high is None:
        return "no interval: one iteration was timed"
    return (
        f"{objective_figure(objective, standing.low)} to "
        f"{objective_figure(objective, standing.high)} (95 %)"
    )


def peak(standing: Standing, device_memory_bytes: int | None) -> str:
    """The peak of the fullest device, and what it leaves free."""
    measured = standing.trial.measurement
    found = None if measured is None else measured.peak_memory_bytes
    if found is None or not device_memory_bytes:
        return memory(found)
    return f"{memory(found)} of {memory(device_memory_bytes)}, {1 - found / device_memory_bytes:.0%} free"


def moment(at: datetime | None) -> str:
    """A point in time."""
    return "-" if at is None else f"{at:%Y-%m-%d %H:%M} UTC"


def machine(num_nodes: int, devices_per_node: int, device: str | None) -> str:
    """The size of a cluster, or of a worker's part of it."""
    nodes = f"{num_nodes:,} node{'s' if num_nodes > 1 else ''}"
    return f"{nodes} with {devices_per_node} x {device or 'device'}"
