"""How often layouts were measured again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class RepeatsOfLayout:
    """How often a layout was measured again, cancelled trials apart."""

    total: int = 0
    disturbed: int = 0
    """Repeats because others took its devices during every earlier run."""
    doubted: int = 0
    """Repeats because its measurement was doubted."""
    last_ended_at: datetime | None = None
    """When the last repeat ended; None: none has."""
