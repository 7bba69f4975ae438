"""Any program: it gets the layout in its environment and in its arguments."""

from __future__ import annotations

from typing import Final

from layout_tuner.search_spaces.layouts.layout import RANK_ORDERS, SCHEDULES
from layout_tuner.trainers.adapter import TrainerAdapter, TrainerJob
from layout_tuner.trainers.placeholders import placeholder_values


def _notes(_job: TrainerJob) -> list[str]:
    return [
        "the program must do what the layout says: nothing checks that it read LAYOUT_* or its "
        "arguments"
    ]


COMMAND: Final = TrainerAdapter(
    name="command",
    target_version="any program",
    needs="a program that reads LAYOUT_* in its environment, or arguments such as --tp {tp}",
    rank_orders=RANK_ORDERS,
    schedules=SCHEDULES,
    values=placeholder_values,
    notes=_notes,
    has_columns=True,
)
