"""Checks whether a row's figures can be true: wrong units are often off by a factor of 1,000."""

from __future__ import annotations

import math
from typing import Final

from layout_tuner.errors import TableInvalidError
from layout_tuner.predictions.estimates.peak_memory import parts_by_stage
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.tables.table import TableCell, TableRow
from layout_tuner.units import memory

TOLERANCE: Final = 0.05
"""How far tokens_per_s * step_time_s may be off the tokens of a step: figures are rounded."""

MIN_RATIO: Final = 1e-30
"""Of figures that are this far apart it is not asked whether their units are off."""

MAX_DEVICE_MEMORY_GB: Final = 16384.0
"""No device has more; a value such as 80000 is in megabytes."""

MAX_FLOPS_PER_S: Final = 2e16
"""No device does more, in any precision; the limit where the cluster's own peak is unknown."""

MAX_SHARE_OF_PEAK: Final = 2.0
"""The peak of a preset may be for another clock; above twice the peak, the unit is wrong."""

MAX_TIMES_IDEAL: Final = 1000.0
"""The best step time of a cell is at most this many times the time at the device's peak."""

MIN_IDEAL_S: Final = 0.01
"""The limit applies to times at the peak above this one; below, launches and latencies count."""

MIN_SHARE_OF_WEIGHTS: Final = 0.25
"""A peak below this share of the mean weights of a device is in another unit."""


def refuse_impossible_row(row: TableRow, model: ModelShape, cluster: Cluster) -> None:
    """Raises TableInvalidError for figures that contradict each other, the model or the machine."""
    if row.layout.ep > 1 and not model.num_experts:
        raise TableInvalidError(f"ep={row.layout.ep} divides experts, and num_experts states none")
    if row.tokens_per_s is None or row.step_time_s is None:
        return
    _refuse_contradicting_rates(row, row.tokens_per_s, row.step_time_s, model)
    least_s = ideal_step_time_s(row.layout, model, cluster) / MAX_SHARE_OF_PEAK
    if row.step_time_s < least_s:
        raise TableInvalidError(
            f"step_time_s={row.step_time_s:g} is less than {least_s:.3g} s, which {model.name} would "
            f"take on {row.layout.num_devices} devices at twice their peak; are the units off by a "
            "thousand?"
        )
    if row.peak_memory_bytes is not None:
        _refuse_wrong_memory(row.layout, row.peak_memory_bytes, model, cluster)


def refuse_impossible_cell(cell: TableCell) -> None:
    """Raises TableInvalidError, naming the fastest row, for a cell that is 1,000 times too slow."""
    timed = [(row.step_time_s, row.number, row) for row in cell.rows if row.step_time_s is not None]
    if not timed:
        return
    step_time_s, _, best = min(timed)
    ideal_s = ideal_step_time_s(best.layout, cell.model, cell.cluster)
    known = bool(cell.cluster.peak_flops_per_s.get(best.layout.precision))
    if known and ideal_s > MIN_IDEAL_S and step_time_s > MAX_TIMES_IDEAL * ideal_s:
        raise TableInvalidError(
            f"{best.name}: step_time_s={step_time_s:g} is the fastest of its cell, and more than "
            f"{MAX_TIMES_IDEAL:g} times the {ideal_s:.3g} s at the devices' peak; are step_time_s and "
            "tokens_per_s off by a thousand?"
        )


def ideal_step_time_s(layout: Layout, model: ModelShape, cluster: Cluster) -> float:
    """Seconds of a step's model FLOPs at the devices' peak."""
    peak = cluster.peak_flops_per_s.get(layout.precision) or MAX_FLOPS_PER_S
    tokens = layout.global_batch_size * model.seq_length
    return tokens * model.model_flops_per_token / (layout.num_devices * peak)


def refuse_wrong_device_memory(gigabytes: float) -> None:
    """Raises TableInvalidError for megabytes and bytes in a column of gigabytes."""
    if gigabytes > MAX_DEVICE_MEMORY_GB:
        raise TableInvalidError(
            f"device_memory_gb={gigabytes:g} is more than any device has; is it in megabytes or "
            "bytes?"
        )


def _refuse_contradicting_rates(
    row: TableRow, tokens_per_s: float, step_time_s: float, model: ModelShape
) -> None:
    tokens = row.layout.global_batch_size * model.seq_length
    ratio = tokens_per_s * step_time_s / tokens
    if abs(ratio - 1) <= TOLERANCE:
        return
    why = ""
    # Farther off, no unit explains it, and the ratio may be 0 or infinite.
    is_near = MIN_RATIO < ratio < 1 / MIN_RATIO
    thousands = round(math.log10(ratio) / 3) * 3 if is_near else 0
    if thousands and abs(ratio / 10**thousands - 1) <= TOLERANCE:
        why = f"off by a factor of 10^{abs(thousands)}: "
        why += (
            "is step_time_s in milliseconds? "
            if thousands > 0
            else "is tokens_per_s in thousands a second? "
        )
    raise TableInvalidError(
        f"{why}tokens_per_s={tokens_per_s:g} times step_time_s={step_time_s:g} is "
        f"{tokens_per_s * step_time_s:g} tokens, and global_batch_size*seq_length="
        f"{row.layout.global_batch_size}*{model.seq_length}={tokens}"
    )


def _refuse_wrong_memory(
    layout: Layout, peak_bytes: int, model: ModelShape, cluster: Cluster
) -> None:
    if peak_bytes > 2 * cluster.device_memory_bytes:
        raise TableInvalidError(
            f"peak_memory_bytes={peak_bytes} is more than twice the device's "
            f"{memory(cluster.device_memory_bytes)}; are the units off by a thousand?"
        )
    weights = parts_by_stage(layout, model).weights.mean()
    if peak_bytes < MIN_SHARE_OF_WEIGHTS * weights:
        raise TableInvalidError(
            f"peak_memory_bytes={peak_bytes} is less than a quarter of the {memory(int(weights))} of a "
            "device's share of the weights alone; is it in kilobytes or megabytes?"
        )
