"""What a layout must keep to before it is ranked: what a campaign's `constraints` say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from search_spaces.errors import CampaignInvalidError
from search_spaces.reading import is_positive_number, read_mapping, refuse_unknown, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraints:
    """Bounds on what was measured. A trial that breaks one is kept and shown, and not ranked.

    Raises:
        CampaignInvalidError: at construction, when a bound is out of range.
    """

    memory_headroom: float = 0.0
    """Share of a device's memory that must stay free at the peak; 0: all of it may be used."""

    def __post_init__(self) -> None:
        share = self.memory_headroom
        is_none = not isinstance(share, bool) and share == 0
        if not is_none and not (is_positive_number(share) and share < 1):
            raise CampaignInvalidError(
                f"{shown(share)} is not a share of the memory from 0 to under 1, such as 0.1",
                field="memory_headroom",
            )

    def allowed_memory_bytes(self, device_memory_bytes: int) -> float:
        """The largest peak of a device that is ranked."""
        return device_memory_bytes * (1.0 - self.memory_headroom)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the bounds by name."""
        values = read_mapping(mapping, CampaignInvalidError, "constraints")
        refuse_unknown(values, [f.name for f in fields(cls)], CampaignInvalidError, "constraint")
        return cls(**values)
