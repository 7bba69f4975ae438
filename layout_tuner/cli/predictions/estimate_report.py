"""The estimate of one layout as a JSON document and as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from layout_tuner.predictions.estimator import Estimator
from layout_tuner.predictions.statistics.job_duration import TrainingJob
from layout_tuner.search_spaces.layouts.layout import KNOBS, Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.throughput import Throughput
from layout_tuner.terminal.plurals import counted, figure
from layout_tuner.units import GIB

SMALL_SHARE: Final = 0.01
"""Parts of the step below this share are added up in one line, unless all are requested."""

WIDTH: Final = 80
"""Longest line of the text, in columns."""


def document(
    estimator: Estimator, layout: Layout, job: TrainingJob | None = None
) -> dict[str, Any]:
    """The estimate as plain JSON values, with that of a training job where one is described."""
    (peak,), (deviation,), (fits,) = estimator.peaks(LayoutColumns.of(layout))
    step = estimator.step(layout)
    tokens = layout.global_batch_size * estimator.model.seq_length
    return {
        "model": estimator.model.to_mapping(),
        "cluster": estimator.cluster.name,
        "constants": estimator.cluster.source,
        "layout": layout.to_mapping(),
        "precision": layout.precision,
        "num_nodes": layout.num_nodes,
        "num_devices": layout.num_devices,
        "global_batch_size": layout.global_batch_size,
        "tokens_per_step": tokens,
        **_throughput(estimator, layout, tokens / step.expected_s),
        "step_time_s": step.expected_s,
        "step_time_low_s": step.low_s,
        "step_time_high_s": step.high_s,
        "device_memory_bytes": estimator.cluster.device_memory_bytes,
        "peak_memory_bytes": float(peak),
        "peak_memory_deviation_bytes": float(deviation),
        "fits": float(fits),
        "stages": list(estimator.stages(layout)),
        "time_parts": [asdict(part) for part in estimator.time_parts(layout, step.expected_s)],
        "calibrated_on": _calibrated_on(estimator),
        "warnings": list(estimator.warnings(layout)),
        "job": None if job is None else asdict(job) | asdict(estimator.job(job, layout)),
    }


def text(report: dict[str, Any], *, all_terms: bool = False) -> str:
    """The document as text: the result, then its parts; `all_terms`: also those below 1 %."""
    lines = [
        *_headline(report),
        "",
        *_answer(report),
        "",
        *_stage_lines(report),
        "",
        *_time_lines(report, 0.0 if all_terms else SMALL_SHARE),
        *_calibration_lines(report),
    ]
    return "\n".join(lines)


def _throughput(estimator: Estimator, layout: Layout, tokens_per_s: float) -> dict[str, Any]:
    """Rates defined as in a measurement; mfu and hfu are None where the cluster states no peak."""
    peak = estimator.cluster.peak_flops_per_s.get(layout.precision)
    rate = Throughput(
        model=estimator.model,
        layout=layout,
        tokens_per_s=tokens_per_s,
        peak_tflops_per_device=(peak or 0.0) / 1e12,
    )
    return {
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": rate.tokens_per_s_per_device,
        "model_tflops_per_device": rate.model_tflops_per_device,
        "hardware_tflops_per_device": rate.hardware_tflops_per_device,
        "peak_tflops_per_device": rate.peak_tflops_per_device if peak else None,
        "mfu": rate.mfu if peak else None,
        "hfu": rate.hfu if peak else None,
    }


def _calibrated_on(estimator: Estimator) -> dict[str, Any]:
    known = estimator.calibration.knowledge
    return {
        "samples": len(known),
        "with_step_time": sum(each.step_time_s is not None for each in known),
        "with_peak_memory": sum(each.peak_memory_bytes is not None for each in known),
        "models": sorted({each.model.name for each in known}),
        "clusters": sorted({each.cluster.name for each in known}),
        "num_devices": sorted({each.layout.num_devices for each in known}),
    }


def _headline(report: dict[str, Any]) -> Iterator[str]:
    nodes = counted(report["num_nodes"], "node")
    devices = counted(report["num_devices"], "device")
    yield from _wrapped(
        f"{report['model']['name']} on {nodes} of {report['cluster']}, {devices}, {report['precision']}"
    )
    layout = report["layout"]
    knobs = [
        knob.words(layout.get(knob.name, knob.default))
        for knob in KNOBS.values()
        if knob.name not in ("num_nodes", "precision") and knob.is_shown
        if knob.heading
        or knob.name == "recompute"
        or layout.get(knob.name, knob.default) != knob.default
    ]
    yield from _wrapped(", ".join(knobs))


def _answer(report: dict[str, Any]) -> Iterator[str]:
    peak, deviation, capacity = (
        report[name] / GIB
        for name in ("peak_memory_bytes", "peak_memory_deviation_bytes", "device_memory_bytes")
    )
    fullest = max(report["stages"], key=lambda stage: float(stage["peak_bytes"]))["stage"]
    share = f"MFU unknown (no peak stated for {report['precision']})"
    if report["mfu"] is not None:
        share = f"MFU {report['mfu']:.1%} of {report['peak_tflops_per_device']:.4g}"
    for label, value in (
        (
            "tokens/s",
            f"{figure(report['tokens_per_s'])}, a device "
            f"{figure(report['tokens_per_s_per_device'])}",
        ),
        (
            "step time",
            f"{figure(report['step_time_s'])} s (95 %: {figure(report['step_time_low_s'], 3)} to "
            f"{figure(report['step_time_high_s'], 3)} s)",
        ),
        ("model TFLOP/s", f"{report['model_tflops_per_device']:.4g} a device, {share}"),
        ("peak memory", f"{peak:.3g} +- {deviation:.2g} GiB a device, on stage {fullest}"),
        ("fits", f"with probability {report['fits']:.2f} into {capacity:.4g} GiB"),
        (
            "global batch",
            f"{counted(report['global_batch_size'], 'sequence')} a step, "
            f"{report['tokens_per_step']:,} tokens",
        ),
    ):
        yield from _wrapped(f"{label:<15}{value}", indent=15)


def _stage_lines(report: dict[str, Any]) -> Iterator[str]:
    names = ("weights", "gradients", "optimizer", "activations", "backward", "head", "peak")
    yield "memory by stage in GiB"
    yield "stage" + "".join(f"{name:>{_width(name)}}" for name in names) + "     +-"
    for stage in report["stages"]:
        values = (f"{figure(stage[f'{name}_bytes'] / GIB, 3):>{_width(name)}}" for name in names)
        yield f"{stage['stage']:>5}" + "".join(values) + f"{_spread(stage['deviation_bytes']):>7}"


def _width(name: str) -> int:
    return max(len(name) + 1, 9)


def _time_lines(report: dict[str, Any], smallest: float) -> Iterator[str]:
    """The parts of the step, largest first; parts below the share `smallest` are added up."""
    total_s = report["step_time_s"]
    parts = sorted(report["time_parts"], key=lambda part: -float(part["seconds"]))
    yield "step time by part"
    small = [part for part in parts if part["seconds"] < smallest * total_s]
    shown = [(part["meaning"], part["seconds"]) for part in parts[: len(parts) - len(small)]]
    if small:
        seconds = sum(part["seconds"] for part in small)
        shown.append((f"other terms ({len(small)} below {smallest:.0%}; --all-terms)", seconds))
    for meaning, seconds in shown:
        line = f"  {figure(seconds):>10} s {seconds / total_s:>6.1%}  {meaning}"
        yield from _wrapped(line, indent=23)


def _calibration_lines(report: dict[str, Any]) -> Iterator[str]:
    known = report["calibrated_on"]
    if known["samples"]:
        yield ""
        yield from _wrapped(
            f"calibrated on {known['with_step_time']} step times and {known['with_peak_memory']} "
            f"peaks of {', '.join(known['models'][:5])} on {', '.join(known['clusters'][:5])}"
        )


def _spread(value_bytes: float) -> str:
    """A standard deviation in GiB, in at most six characters."""
    value = value_bytes / GIB
    if value < 0.001:
        return "<0.001"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _wrapped(line: str, *, indent: int = 2) -> list[str]:
    return textwrap.wrap(
        line,
        WIDTH,
        subsequent_indent=" " * indent,
        drop_whitespace=True,
        replace_whitespace=False,
        break_on_hyphens=False,
    )
