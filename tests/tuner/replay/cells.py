"""Made-up cells whose truth is known, for replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from search_spaces.tables import TableCell, read_table
from tests.search_spaces.tables.tables import layouts, make_row, make_text

TOKENS = 8 * 512


def make_cell(step_times_s: Sequence[float | str], **changes: Any) -> TableCell:
    """One layout a step time, in the order of the knobs; a word in its place is a status."""
    (cell,) = read_table(make_cell_text(step_times_s, **changes)).cells
    return cell


def make_cell_text(step_times_s: Sequence[float | str], **changes: Any) -> str:
    rows = []
    for layout, time in zip(many_layouts(len(step_times_s)), step_times_s, strict=True):
        outcome = {"status": time} if isinstance(time, str) else {"step_time_s": time}
        rows.append(make_row(**layout, **outcome, **changes))
    return make_text(*rows)


def many_layouts(number: int) -> list[dict[str, Any]]:
    """Layouts of eight devices and eight sequences: all micro-batches, ZeRO and recomputation."""
    found = [
        layout | {"zero_stage": zero, "recompute": recompute, "sequence_parallel": parallel}
        for layout in layouts()
        for zero in (0, 1)
        for recompute in ("none", "selective", "full")
        for parallel in (0, 1)
    ]
    assert number <= len(found)
    return found[:number]


def times_by(number: int, time_of: Callable[[int], float]) -> list[float]:
    return [time_of(place) for place in range(number)]
