"""What `layout-tuner probe` prints: the outcome as one JSON object, or as text."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from search_spaces.outcome import Breakdown, Measurement, Outcome, ProbeRequest


def status_of(outcome: Outcome) -> str:
    """The outcome in a word; an infeasible layout reads as what made it so."""
    return "out_of_memory" if outcome.state == "infeasible" else outcome.state


def document(request: ProbeRequest, outcome: Outcome) -> dict[str, Any]:
    """The outcome as plain JSON values, with the lists that one compares runs by."""
    shared = {
        "status": status_of(outcome),
        "model": request.model.to_mapping(),
        "layout": request.layout.to_mapping(),
        "seed": request.seed,
        "compile": request.compile,
        "duration_s": outcome.duration_s,
        "environment": None if outcome.environment is None else asdict(outcome.environment),
    }
    measurement = outcome.measurement
    if measurement is None:
        return {
            **shared,
            "reason": outcome.reason,
            "message": outcome.message,
            "node": outcome.node,
            "log_tail": outcome.log_tail,
        }
    iterations = measurement.iterations
    return {
        **shared,
        "losses": [iteration.loss for iteration in iterations],
        "grad_norms": [iteration.grad_norm for iteration in iterations],
        "step_times_s": [i.step_time_s for i in iterations if i.kind == "timed"],
        **{name: value for name, value in asdict(measurement).items() if name != "iterations"},
    }


def text(request: ProbeRequest, outcome: Outcome) -> str:
    """The outcome for people."""
    layout = request.layout
    compiled = ", compiled," if request.compile else ""
    head = f"{request.model.name} as {layout.key}{compiled} on {layout.num_devices} devices"
    measurement = outcome.measurement
    if measurement is None:
        log = f"\n{outcome.log_tail}" if outcome.log_tail else ""
        return f"{head}: {status_of(outcome)} ({outcome.reason})\n{outcome.message}{log}"
    return "\n".join([head, *_lines(measurement)])


def _shares(breakdown: Breakdown) -> str:
    """The parts of a step in percent; those that there are none of are left out."""
    return ", ".join(f"{name} {share:.1%}" for name, share in breakdown.shares.items() if share)


def _lines(measured: Measurement) -> list[str]:
    quartiles = f"{1e3 * measured.step_time_q25_s:.2f} to {1e3 * measured.step_time_q75_s:.2f}"
    timed = sum(iteration.kind == "timed" for iteration in measured.iterations)
    rows = {
        "step time": f"{1e3 * measured.step_time_s:.2f} ms "
        f"(quartiles {quartiles}, {timed} iterations)",
        "tokens/s": f"{measured.tokens_per_s:,.0f} "
        f"({measured.tokens_per_s_per_device:,.0f} a device)",
        "model FLOPs": f"{measured.model_tflops_per_device:.4g} TFLOP/s a device, "
        f"MFU {measured.mfu:.1%} of {measured.peak_tflops_per_device:.4g} ({measured.peak_source})",
        "peak memory": f"{measured.peak_memory_bytes / 2**20:,.1f} MiB a device "
        f"({measured.memory_kind})",
        "loss": f"{measured.iterations[0].loss:.4f} to {measured.iterations[-1].loss:.4f}",
    }
    if measured.breakdown is not None:
        rows["of a step"] = _shares(measured.breakdown)
    lines = [f"  {name:<12} {value}" for name, value in rows.items()]
    if measured.warmup_settled is False:
        lines.append("  unsettled: step times still changed when timing began")
    if measured.skipped_steps == 1:
        lines.append("  1 step was skipped: its gradients overflowed")
    elif measured.skipped_steps:
        lines.append(f"  {measured.skipped_steps} steps were skipped: their gradients overflowed")
    if measured.oversubscribed:
        lines.append("  oversubscribed: ranks shared devices, so the times say nothing")
    return lines
