"""Figures as people write them, with their units: the same in a terminal and in a report."""

from __future__ import annotations

from search_spaces.layout import Layout
from search_spaces.objectives import MEMORY_HEADROOM


def unit(objective: str) -> str:
    """What an objective counts; its name says it, as tokens_per_s_per_device."""
    return (
        objective.replace("node_hour", "node-hour")
        .replace("_per_", "/")
        .replace("tflops", "TFLOP/s")
        .replace("_", " ")
    )


def figure(value: float | None) -> str:
    """A measured number with about four digits."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def objective_figure(name: str, value: float | None) -> str:
    """An objective's value: a share as percent, anything else as a number."""
    if name == MEMORY_HEADROOM and value is not None:
        return f"{value:.1%}"
    return figure(value)


def duration(seconds: float | None) -> str:
    """A time span as people write it."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def memory(value_bytes: int | None) -> str:
    """Bytes in the unit that fits."""
    if value_bytes is None:
        return "-"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if value_bytes >= size:
            return f"{value_bytes / size:.4g} {unit}"
    return f"{value_bytes / 1024:.4g} KiB"


def zero(layout: Layout) -> str:
    """ZeRO's stage, with the number of copies where the states are sharded over less than dp."""
    copies = f"x{layout.zero_replicas}" if layout.zero_replicas > 1 else ""
    return f"{layout.zero_stage}{copies}"


def layout_extras(layout: Layout) -> str:
    """The knobs that have no column of their own, where they are not at their plain value."""
    words = []
    if layout.vpp > 1:
        words.append(f"vpp {layout.vpp}")
    if layout.recompute != "none":
        words.append(f"recompute {layout.recompute}")
    if layout.sequence_parallel:
        words.append("sequence parallel")
    return ", ".join([*words, layout.precision])
