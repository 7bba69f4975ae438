"""Any program: it gets the layout as arguments and environment variables."""

from __future__ import annotations

from typing import Final

from search_spaces.trainers.base import TrainerAdapter

COMMAND: Final = TrainerAdapter(
    name="command",
    target_version="any program",
    needs="a program that takes the layout as arguments or environment variables",
)
