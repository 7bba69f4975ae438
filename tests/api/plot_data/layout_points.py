"""Layouts as the plots get them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layout_tuner.api.plot_data.layout_points import PlotFacts
from layout_tuner.results_db.leaderboard.plot_points import PlotPoint
from layout_tuner.search_spaces.layouts.layout import Layout

OBJECTIVE = "tokens_per_s_per_device"


def make_point(number: int, value: float | None = None, **changes: Any) -> PlotPoint:
    """A layout; `changes` are knobs, or fields of the point."""
    fields = {
        name: changes.pop(name)
        for name in ("shortened", "peak_memory_bytes", "state", "reason")
        if name in changes
    }
    if value is None:
        fields = {"state": "FAILED", "reason": "crashed"} | fields
    return PlotPoint(
        **{
            "trial_id": 100 + number,
            "number": number,
            "state": "COMPLETED",
            "reason": None,
            "knobs": Layout(**changes).to_mapping(every_knob=True),
            "value": value,
            **fields,
        }
    )


def make_facts(points: Sequence[PlotPoint], **changes: Any) -> PlotFacts:
    """The facts of layouts; the best of them wins."""
    ranked = [p for p in points if p.value is not None and not p.shortened]
    winner = max(ranked, key=lambda p: p.value or 0.0, default=None)
    values: dict[str, Any] = {
        "objective": OBJECTIVE,
        "points": points,
        "num_layouts": len(points),
        "marks": {} if winner is None else {"winner": winner},
        "device_memory_bytes": 16 << 30,
        "model": None,
    }
    return PlotFacts(**values | changes)


def named(traces: Sequence[Any], name: str) -> Any:
    """The only trace of this name that the legend shows."""
    (found,) = [t for t in traces if t.get("name") == name and t.get("showlegend", True)]
    return found
