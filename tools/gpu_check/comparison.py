"""What was predicted of each layout beside what was measured, and how well they agree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from scipy.stats import kendalltau, spearmanr


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A layout of a campaign: predicted before any was measured, then measured."""

    campaign: str
    layout_key: str
    precision: str
    micro_batch_size: int
    recompute: str
    predicted_step_time_s: float | None = None
    """None: the plan did not list the layout."""
    predicted_peak_bytes: int | None = None
    predicted_fits: float | None = None
    """Probability that it fits into the device."""
    state: str = "not measured"
    reason: str | None = None
    """Why it has no figures; None: it has, or it was not measured."""
    message: str = ""
    step_time_s: float | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    """What the allocator reserved; None on a CPU."""
    tokens_per_s: float | None = None
    mfu: float | None = None

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)


def comparison(rows: Sequence[Row]) -> dict[str, Any]:
    """How predictions and measurements agree: of each campaign alone, and what fits of all.

    Kendall's tau and Spearman's rho of the step times, and medians of |predicted / measured - 1|.
    """
    names = dict.fromkeys(row.campaign for row in rows)
    ended = [row for row in rows if row.state in ("COMPLETED", "INFEASIBLE")]
    ran_out = [row for row in ended if row.reason == "out_of_memory"]
    return {
        "campaigns": {
            name: _agreement([row for row in rows if row.campaign == name]) for name in names
        },
        "all": _agreement(rows),
        "num_layouts": len(rows),
        "num_completed": sum(row.state == "COMPLETED" for row in rows),
        "num_out_of_memory": len(ran_out),
        "out_of_memory_expected": sum((row.predicted_fits or 0.0) < 0.5 for row in ran_out),
        "completed_though_not_expected": sum(
            row.state == "COMPLETED" and row.predicted_fits is not None and row.predicted_fits < 0.5
            for row in ended
        ),
    }


def _agreement(rows: Iterable[Row]) -> dict[str, Any]:
    done = [row for row in rows if row.state == "COMPLETED"]
    times = [
        (row.predicted_step_time_s, row.step_time_s)
        for row in done
        if row.predicted_step_time_s is not None and row.step_time_s is not None
    ]
    peaks = [
        (float(row.predicted_peak_bytes), float(row.peak_bytes))
        for row in done
        if row.predicted_peak_bytes is not None and row.peak_bytes is not None
    ]
    return {
        "num_compared": len(times),
        "kendall_tau": _correlation(kendalltau, times),
        "spearman_rho": _correlation(spearmanr, times),
        "step_time_median_error": _median_error(times),
        "peak_memory_median_error": _median_error(peaks),
    }


def _correlation(of: Any, pairs: Sequence[tuple[float, float]]) -> float | None:
    """None: fewer than three pairs, or all of one side are equal."""
    if len(pairs) < 3 or any(len(set(side)) < 2 for side in zip(*pairs, strict=True)):
        return None
    found = float(of(*zip(*pairs, strict=True)).statistic)
    return None if math.isnan(found) else found


def _median_error(pairs: Sequence[tuple[float, float]]) -> float | None:
    if not pairs:
        return None
    return median(abs(predicted / measured - 1) for predicted, measured in pairs)


def with_trial(row: Row, trial: Any) -> Row:
    """The row with what a trial measured, or why it did not."""
    measured = trial.measurement
    values = row.to_mapping() | {
        "state": trial.state,
        "reason": trial.reason,
        "message": trial.message,
    }
    if measured is not None and trial.state == "COMPLETED":
        reserved = measured.peak_reserved_bytes_by_stage
        values |= {
            "step_time_s": measured.step_time_s,
            "peak_bytes": measured.peak_memory_bytes,
            "reserved_bytes": max(reserved) if reserved else None,
            "tokens_per_s": measured.tokens_per_s,
            "mfu": measured.mfu,
        }
    return Row(**values)


def problems_of(rows: Sequence[Row], *, meant_to_fail: int) -> list[str]:
    """Why the measured layouts are not what the check wants; empty: they are."""
    found = [
        f"{row.campaign} {row.layout_key} is {row.state} ({row.reason}): {row.message}"
        for row in rows
        if row.state != "COMPLETED" and row.reason != "out_of_memory"
    ]
    ran_out = sum(row.reason == "out_of_memory" for row in rows)
    if ran_out < meant_to_fail:
        found.append(f"{ran_out} layouts ran out of memory, and {meant_to_fail} were meant to")
    if not any(row.state == "COMPLETED" for row in rows):
        found.append("no layout was measured")
    return found
