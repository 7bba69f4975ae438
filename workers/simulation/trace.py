"""A walked step as a trace for Perfetto or chrome://tracing, in Chrome's trace event format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.simulation.machine import Machine
from layout_tuner.workers.simulation.steps import steps
from layout_tuner.workers.simulation.walk import TracedSpan

_NAMES: Final = ("forward", "backward", "weight gradients", "transfer")


def step_trace(layout: Layout, model: ModelShape, machine: Machine) -> dict[str, Any]:
    """The passes of a step on each pipeline rank and the transfers to it, as a JSON document."""
    spans: list[TracedSpan] = []
    step = steps([layout], model, machine, spans=spans)[0]
    return {
        "traceEvents": [*_streams(layout.pp), *_events(spans)],
        "displayTimeUnit": "ms",
        "otherData": {"layout": layout.key, "model": model.name, "simulated_step_s": step.step_s},
    }


def _streams(pp: int) -> Iterator[dict[str, Any]]:
    """A process for each pipeline rank, with a stream of passes and one a kind of message."""
    for rank in range(pp):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"stage {rank}"}}
        for stream, name in enumerate(("compute", "activations", "gradients")):
            args = {"name": name}
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": stream, "args": args}


def _events(spans: Sequence[TracedSpan]) -> Iterator[dict[str, Any]]:
    for span in spans:
        yield {
            "ph": "X",
            "name": f"{_NAMES[min(span.kind, 3)]} {span.microbatch}",
            "cat": _NAMES[min(span.kind, 3)],
            "pid": span.rank,
            "tid": max(span.kind - 2, 0),
            "ts": span.start_s * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
            "args": {"stage": span.stage, "microbatch": span.microbatch},
        }
