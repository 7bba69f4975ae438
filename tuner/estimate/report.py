"""One layout's estimate as a document, and as text for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from search_spaces.cluster import GIB
from search_spaces.layout import Layout
from tuner.estimate.estimator import Estimator, LayoutEstimate


def document(estimator: Estimator, layout: Layout) -> dict[str, Any]:
    """Everything, as plain JSON values."""
    estimate = estimator.layout(layout)
    tokens = layout.global_batch_size * estimator.model.seq_length
    return {
        "model": estimator.model.to_mapping(),
        "cluster": estimator.cluster.name,
        "constants": estimator.cluster.source,
        "layout": layout.to_mapping(),
        "device_memory_bytes": estimator.cluster.device_memory_bytes,
        "peak_memory_bytes": estimate.peak_bytes,
        "peak_memory_deviation_bytes": estimate.deviation_bytes,
        "fits": estimate.fits,
        "stages": [_stage(estimate, place) for place in range(len(estimate.stages))],
        "step_time_s": estimate.step_time_s,
        "step_time_low_s": estimate.step_time_low_s,
        "step_time_high_s": estimate.step_time_high_s,
        "tokens_per_s": tokens / estimate.step_time_s,
        "tokens_per_s_per_device": tokens / estimate.step_time_s / layout.num_devices,
        "time_parts": [
            {"name": part.name, "meaning": part.meaning, "seconds": part.seconds}
            for part in estimate.time_parts
        ],
        "calibrated_on": _calibrated_on(estimator),
        "warnings": list(estimator.warnings(layout)),
    }


def text(report: dict[str, Any]) -> str:
    """The document for people."""
    return "\n".join([*_memory_lines(report), "", *_time_lines(report)])


def _stage(estimate: LayoutEstimate, place: int) -> dict[str, Any]:
    stage = estimate.stages[place]
    memory = stage.memory
    return {
        "stage": memory.stage,
        "weights_bytes": memory.weights_bytes,
        "gradients_bytes": memory.gradients_bytes,
        "optimizer_bytes": memory.optimizer_bytes,
        "activations_bytes": memory.activations_bytes,
        "backward_bytes": memory.backward_bytes,
        "head_bytes": memory.head_bytes,
        "workspace_bytes": memory.workspace_bytes,
        "peak_bytes": stage.peak_bytes,
        "deviation_bytes": stage.deviation_bytes,
    }


def _calibrated_on(estimator: Estimator) -> dict[str, Any]:
    known = estimator.knowledge
    return {
        "samples": len(known),
        "with_step_time": sum(each.step_time_s is not None for each in known),
        "with_peak_memory": sum(each.peak_memory_bytes is not None for each in known),
        "models": sorted({each.model.name for each in known}),
        "clusters": sorted({each.cluster.name for each in known}),
        "num_devices": sorted({each.layout.num_devices for each in known}),
    }


def _memory_lines(report: dict[str, Any]) -> Iterator[str]:
    capacity = report["device_memory_bytes"] / GIB
    peak, deviation = (report[f"peak_memory_{name}"] / GIB for name in ("bytes", "deviation_bytes"))
    yield (
        f"{report['model']['name']} on {report['cluster']}: peak {peak:.3g} GiB, give or take "
        f"{deviation:.2g}; it fits into {capacity:.3g} GiB with probability {report['fits']:.2f}"
    )
    names = ("weights", "gradients", "optimizer", "activations", "backward", "head", "peak")
    yield "stage " + "".join(f"{name:>13}" for name in names) + "   GiB"
    for stage in report["stages"]:
        values = (stage[f"{name}_bytes"] / GIB for name in names)
        spread = f"   +- {stage['deviation_bytes'] / GIB:.2g}"
        yield f"{stage['stage']:>5} " + "".join(f"{value:>13.4g}" for value in values) + spread


def _time_lines(report: dict[str, Any]) -> Iterator[str]:
    yield (
        f"step {report['step_time_s']:.4g} s (with 95 %: {report['step_time_low_s']:.3g} to "
        f"{report['step_time_high_s']:.3g}), {report['tokens_per_s_per_device']:.4g} tokens/s a device"
    )
    for part in sorted(report["time_parts"], key=lambda part: -part["seconds"]):
        share = part["seconds"] / report["step_time_s"]
        yield f"  {part['seconds']:>10.4g} s {share:>6.1%}  {part['meaning']}"
    known = report["calibrated_on"]
    if known["samples"]:
        yield (
            f"calibrated on {known['with_step_time']} step times and {known['with_peak_memory']} "
            f"peaks of {', '.join(known['models'][:5])} on {', '.join(known['clusters'][:5])}"
        )
