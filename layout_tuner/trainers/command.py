"""Any program: it gets the layout in its environment and in its arguments."""

from __future__ import annotations

from typing import Final

from layout_tuner.search_spaces.layouts.layout import RANK_ORDERS, SCHEDULES
from layout_tuner.trainers.adapter import TrainerAdapter
from layout_tuner.trainers.placeholders import placeholder_values

COMMAND: Final = TrainerAdapter(
    name="command",
    target_version="any program",
    needs="a program that reads LAYOUT_* in its environment, or arguments such as --tp {tp}",
    rank_orders=RANK_ORDERS,
    schedules=SCHEDULES,
    levers=lambda _layout: ("stages",),
    layout_values=placeholder_values,
    notes=lambda _job: [
        "the program must do what the layout says: nothing checks that it read LAYOUT_* or its "
        "arguments"
    ],
    has_columns=True,
    any_settings=True,
)
