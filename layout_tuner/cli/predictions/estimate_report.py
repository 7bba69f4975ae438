"""The estimate of one layout as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any, Final

from layout_tuner.predictions.belief.peaks.trainer_hypotheses import DecidingProperty
from layout_tuner.search_spaces.layouts.layout import KNOBS
from layout_tuner.search_spaces.models.model_shape import model_title
from layout_tuner.terminal.plurals import counted, figure
from layout_tuner.units import GIB

SMALL_SHARE: Final = 0.01
"""Parts of the step below this share are added up in one line, unless all are requested."""

WIDTH: Final = 80
"""Longest line of the text, in columns."""


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


def _headline(report: dict[str, Any]) -> Iterator[str]:
    nodes = counted(report["num_nodes"], "node")
    devices = counted(report["num_devices"], "device")
    yield from _wrapped(
        f"{model_title(report['model'])} on {nodes} of {report['cluster']}, {devices}, {report['precision']}"
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
    low, peak, high = (
        report[f"peak_memory_{end}_bytes"] / GIB for end in ("low", "median", "high")
    )
    capacity = report["device_memory_bytes"] / GIB
    fullest = max(report["stages"], key=lambda stage: float(stage["median_bytes"]))["stage"]
    found = report["fits_depend_on"]
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
        (
            "peak memory",
            f"{figure(peak, 3)} GiB a device (80 %: {figure(low, 3)} to {figure(high, 3)} GiB), on "
            f"stage {fullest}",
        ),
        ("fits", f"with probability {report['fits']:.2f} into {capacity:.4g} GiB"),
        *([("", DecidingProperty(**found).words)] if found else []),
        (
            "global batch",
            f"{counted(report['global_batch_size'], 'sequence')} a step, "
            f"{report['tokens_per_step']:,} tokens",
        ),
        *([("levels", f"each axis needs {levels}")] if (levels := report.get("levels")) else []),
    ):
        yield from _wrapped(f"{label:<15}{value}", indent=15)


def _stage_lines(report: dict[str, Any]) -> Iterator[str]:
    has_mtp = "mtp_bytes" in report["stages"][0]
    parts = ("weights", "gradients", "optimizer", "activations", "backward", "head")
    names = (*parts, *(("mtp",) if has_mtp else ()), "median")
    yield "memory by stage in GiB" + (
        "; mtp is what multi-token prediction adds to the parts before it" if has_mtp else ""
    )
    yield "stage" + "".join(f"{name:>{_width(name)}}" for name in names) + "   90 %"
    for stage in report["stages"]:
        values = (f"{figure(stage[f'{name}_bytes'] / GIB, 3):>{_width(name)}}" for name in names)
        high = figure(stage["high_bytes"] / GIB, 3)
        yield f"{stage['stage']:>5}" + "".join(values) + f"{high:>7}"


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


def _wrapped(line: str, *, indent: int = 2) -> list[str]:
    return textwrap.wrap(
        line,
        WIDTH,
        subsequent_indent=" " * indent,
        drop_whitespace=True,
        replace_whitespace=False,
        break_on_hyphens=False,
    )
