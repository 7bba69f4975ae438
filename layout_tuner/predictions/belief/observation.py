"""The outcome of a layout: the input of strategies, calibrations and beliefs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Self

from layout_tuner.errors import SearchSpaceError


class ObservationInvalidError(SearchSpaceError):
    """An observation contradicts itself, or its objective cannot be ranked."""


ObservationState = Literal["completed", "infeasible", "failed"]
"""infeasible: the layout ran out of memory. failed: it failed for another reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The outcome of one layout, as learnt; ObservationInvalidError if it contradicts itself."""

    state: ObservationState
    """Whether there is an objective, and if not, why."""
    objective: float | None = None
    """A throughput over 0, to be maximised; present if and only if the layout completed."""
    step_time_s: float | None = None
    """Seconds of an optimizer step; only of completed layouts, and only where measured."""
    peak_memory_bytes: int | None = None
    """Peak of the fullest rank; only of completed layouts, and only where measured."""
    nodes: tuple[str, ...] = ()
    """Names of the nodes that the layout ran on; empty where they are not known."""

    def __post_init__(self) -> None:
        if (self.state == "completed") != (self.objective is not None):
            raise ObservationInvalidError(
                f"state={self.state!r} does not go with objective={self.objective!r}; a completed "
                "observation has an objective, any other has none"
            )
        measured = {"step_time_s": self.step_time_s, "peak_memory_bytes": self.peak_memory_bytes}
        for name, value in measured.items():
            if value is not None and self.state != "completed":
                raise ObservationInvalidError(
                    f"state={self.state!r} does not go with {name}={value!r}; only a completed "
                    "observation was measured"
                )
        refuse_unless_positive(objective=self.objective, **measured)

    @classmethod
    def completed(
        cls,
        objective: float,
        *,
        step_time_s: float | None = None,
        peak_memory_bytes: int | None = None,
    ) -> Self:
        return cls(
            state="completed",
            objective=objective,
            step_time_s=step_time_s,
            peak_memory_bytes=peak_memory_bytes,
        )


def refuse_unless_positive(**values: float | None) -> None:
    """Raises ObservationInvalidError with the name of the first value not finite and over 0."""
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise ObservationInvalidError(f"{name}={value!r} is not a finite number over 0")


INFEASIBLE = Observation(state="infeasible")
"""The layout does not fit into memory."""

FAILED = Observation(state="failed")
"""The layout failed for a reason other than memory."""
