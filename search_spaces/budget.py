"""When a campaign ends by itself: the bounds of its description, and how they may be changed later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from search_spaces.duration import name_without_unit, read_duration_s
from search_spaces.errors import CampaignInvalidError
from search_spaces.reading import (
    is_positive_number,
    read_mapping,
    refuse_unknown,
    shown,
    whole_number_problem,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """When a campaign ends by itself: at whichever bound is met first.

    Raises:
        CampaignInvalidError: at construction, when a bound is out of range.
    """

    trials: int | None = None
    """Trials that ended, whatever their outcome."""
    node_hours: float | None = None
    """Nodes times hours that probes held them."""
    wall_time_s: float | None = None
    """Seconds that the campaign was running."""

    def __post_init__(self) -> None:
        if self.trials is not None:
            problem = whole_number_problem(self.trials)
            if problem:
                raise CampaignInvalidError(problem, field="trials")
        if self.node_hours is not None and not is_positive_number(self.node_hours):
            raise CampaignInvalidError(
                f"{shown(self.node_hours)} is not a number over 0", field="node_hours"
            )
        if self.wall_time_s is not None:
            seconds = read_duration_s(self.wall_time_s, field="wall_time_s")
            object.__setattr__(self, "wall_time_s", seconds)

    @property
    def is_unbounded(self) -> bool:
        """Whether no bound is set."""
        return self.trials is None and self.node_hours is None and self.wall_time_s is None

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the bounds by name; the wall time also as `wall_time: 10m`."""
        values = read_mapping(mapping, CampaignInvalidError, "the budget")
        name_without_unit(values, "wall_time")
        refuse_unknown(values, [f.name for f in fields(cls)], CampaignInvalidError, "bound")
        return cls(**values)


def changed_budget(
    budget: Mapping[str, Any], changes: Mapping[str, Any], *, strategy: str
) -> dict[str, Any]:
    """A budget with other bounds, both by name: what is not named stays, None takes a bound away.

    Raises:
        CampaignInvalidError: a bound is unknown or out of range, or none would be left.
    """
    try:
        named = read_mapping(changes, CampaignInvalidError, "the budget")
        if named.get("wall_time", ...) is None and "wall_time_s" not in named:
            named["wall_time_s"] = named.pop("wall_time")
        name_without_unit(named, "wall_time")
        after = Budget.from_mapping({**budget, **named})
    except CampaignInvalidError as error:
        raise error.within("budget") from error
    refuse_unbounded(after, strategy)
    return asdict(after)


def refuse_unbounded(budget: Budget, strategy: str) -> None:
    """Refuses a budget without bounds, unless the campaign ends by itself.

    Raises:
        CampaignInvalidError: nothing would end the campaign.
    """
    if budget.is_unbounded and strategy != "exhaustive":
        raise CampaignInvalidError(
            f"strategy {strategy!r} needs at least one bound of "
            f"{', '.join(f.name for f in fields(Budget))}",
            field="budget",
        )
