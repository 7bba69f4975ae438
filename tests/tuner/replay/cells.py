"""Made-up cells whose truth is known, for replays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from layout_tuner.search_spaces.tables import TableCell, read_table
from tests.search_spaces.tables.tables import layouts, make_row, make_text

TOKENS = 8 * 512


def make_cell(step_times_s: Sequence[float | str], **changes: Any) -> TableCell:
    """One layout a step time, in the order of the knobs; a word in its place is a status."""
    (cell,) = read_table(make_cell_text(step_times_s, **changes)).cells
    return cell


def make_cell_text(step_times_s: Sequence[float | str], **changes: Any) -> str:
    """Layouts of eight devices and eight sequences: all micro-batches, ZeRO and recomputation."""
    every = product(layouts(), (0, 1), ("none", "selective", "full"), (0, 1))
    rows = []
    for time in step_times_s:
        layout, zero, recompute, parallel = next(every)
        knobs = {"zero_stage": zero, "recompute": recompute, "sequence_parallel": parallel}
        outcome = {"status": time} if isinstance(time, str) else {"step_time_s": time}
        rows.append(make_row(**layout, **knobs, **outcome, **changes))
    return make_text(*rows)
