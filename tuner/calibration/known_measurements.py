"""What is known before a campaign's first probe: measurements of other campaigns and tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from search_spaces.cluster import Cluster
from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape
from tuner.errors import ObservationInvalidError
from tuner.strategies.base import ObservationState, refuse_unless_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What became of one layout of some model on some cluster.

    Raises:
        ObservationInvalidError: at construction, when the state and the numbers contradict each other.
    """

    model: ModelShape
    """What was trained."""
    cluster: Cluster
    """Where it ran."""
    layout: Layout
    """How it was laid out."""
    state: ObservationState
    """Whether it ran, and if not, why."""
    step_time_s: float | None = None
    """Seconds an optimizer step; there if and only if completed."""
    peak_memory_bytes: int | None = None
    """Peak of the fullest rank, where that was measured."""
    software: str = ""
    """What ran it: measurements of equal words may be pooled; empty where nobody said."""

    def __post_init__(self) -> None:
        if (self.state == "completed") != (self.step_time_s is not None):
            raise ObservationInvalidError(
                f"state={self.state!r} does not go with step_time_s={self.step_time_s!r}; a "
                "completed sample has a step time, any other has none"
            )
        refuse_unless_positive(
            step_time_s=self.step_time_s, peak_memory_bytes=self.peak_memory_bytes
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Knowledge:
    """Samples from elsewhere, which calibrate a search before it has any of its own."""

    samples: tuple[Sample, ...] = ()
    """In the order in which they were taken."""

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)
