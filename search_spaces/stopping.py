"""When to stop, and how sure to be: what a campaign's `stop` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from search_spaces.errors import CampaignInvalidError
from search_spaces.reading import (
    is_positive_number,
    read_mapping,
    refuse_unknown,
    shown,
    whole_number_problem,
)

DEFAULT_REMEASURE: Final = 3
MAX_REMEASURE: Final = 20
KNOWING_STRATEGIES: Final = ("guided",)
"""Strategies that say what they expect of the layouts that are left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StopSettings:
    """When probes and the campaign end by themselves, and what is measured again before they do.

    Raises:
        CampaignInvalidError: at construction, when a field is out of range.
    """

    early: bool = True
    """Whether a probe ends early once it is slower than the best with 95 % confidence."""
    converged_within: float | None = None
    """The campaign ends when what is left is expected to improve the best by less than this share.
    None: it goes on to its budget."""
    remeasure: int = DEFAULT_REMEASURE
    """How many of the best layouts, at most, are measured again before the winner is named; those that
    can be told apart from the first are not. 0: none."""

    def __post_init__(self) -> None:
        if not isinstance(self.early, bool):
            raise CampaignInvalidError(f"{shown(self.early)} is not true or false", field="early")
        share = self.converged_within
        if share is not None and not (is_positive_number(share) and share < 1):
            raise CampaignInvalidError(
                f"{shown(share)} is not a share between 0 and 1, such as 0.02",
                field="converged_within",
            )
        problem = whole_number_problem(self.remeasure, low=0, high=MAX_REMEASURE)
        if problem:
            raise CampaignInvalidError(problem, field="remeasure")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the settings by name."""
        values = read_mapping(mapping, CampaignInvalidError, "stop")
        refuse_unknown(values, [f.name for f in fields(cls)], CampaignInvalidError, "setting")
        return cls(**values)


def unheard_warning(stop: StopSettings, strategy: str, num_objectives: int) -> str | None:
    """What to tell a user whose `converged_within` nobody heeds; None where somebody does."""
    if stop.converged_within is None or (strategy in KNOWING_STRATEGIES and num_objectives == 1):
        return None
    what = "several objectives" if num_objectives > 1 else f"strategy {strategy}"
    return (
        f"stop.converged_within has no effect with {what}: nobody knows what is left to gain; the "
        "campaign goes on to its budget"
    )
