"""What a strategy is given to solve: the layouts, what they train and where, and what is wanted."""

from __future__ import annotations

from dataclasses import dataclass, field

from search_spaces.cluster import Cluster
from search_spaces.model_shape import ModelShape
from search_spaces.objectives import DEFAULT_OBJECTIVES, OBJECTIVES
from tuner.errors import ProblemInvalidError
from tuner.knowledge import Knowledge
from tuner.strategies.base import LayoutSet


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SearchProblem:
    """One search, whatever the strategy.

    Raises:
        ProblemInvalidError: at construction, when no objective can rank, or the headroom is no share.
    """

    layouts: LayoutSet
    """What may be asked for."""
    model: ModelShape
    """What is trained."""
    cluster: Cluster
    """Where it runs."""
    objectives: tuple[str, ...] = DEFAULT_OBJECTIVES
    """What to maximise; several at once are traded off, and the first one ranks."""
    min_memory_headroom: float = 0.0
    """Share of a device's memory that must stay free at the peak."""
    software: str = ""
    """What runs the layouts: a table's source; empty for this project's own trainer."""
    knowledge: Knowledge = field(default_factory=Knowledge)
    """Measurements from elsewhere."""

    def __post_init__(self) -> None:
        if not self.objectives:
            raise ProblemInvalidError("there is no objective; give at least one")
        if self.objectives[0] not in OBJECTIVES:
            raise ProblemInvalidError(
                f"objectives[0]={self.objectives[0]!r} cannot rank; begin with one of the throughputs "
                f"{', '.join(OBJECTIVES)}"
            )
        if not 0.0 <= self.min_memory_headroom < 1.0:
            raise ProblemInvalidError(
                f"min_memory_headroom={self.min_memory_headroom!r} is not a share of the memory, "
                "from 0 to less than 1"
            )

    @property
    def allowed_memory_bytes(self) -> float:
        """What the peak of a device may come to."""
        return self.cluster.device_memory_bytes * (1.0 - self.min_memory_headroom)
