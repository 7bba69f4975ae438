"""The problem that a strategy solves: layouts, model, cluster and objectives."""

from __future__ import annotations

from dataclasses import dataclass, field

from layout_tuner.predictions.belief.known_measurements import Knowledge
from layout_tuner.predictions.belief.plausible_samples import PlausibleSamples, plausible_samples
from layout_tuner.search_spaces.campaigns.fidelity import ProbeCosts
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.objectives import DEFAULT_OBJECTIVES, OBJECTIVES
from layout_tuner.tuner.errors import ProblemInvalidError
from layout_tuner.tuner.strategies.ask_and_tell import LayoutSet


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SearchProblem:
    """The input of a strategy; ProblemInvalidError for a wrong first objective or headroom."""

    layouts: LayoutSet
    model: ModelShape
    cluster: Cluster
    objectives: tuple[str, ...] = DEFAULT_OBJECTIVES
    """Objectives to maximise; the first one ranks, several are traded off."""
    min_memory_headroom: float = 0.0
    """Share of a device's memory that must stay free at the peak."""
    software: str = ""
    """The training software: a table's source; empty for the embedded trainer."""
    knowledge: Knowledge = field(default_factory=Knowledge)
    plausible: PlausibleSamples = field(init=False)
    """What of the knowledge calibrates the search, by the constants of the cluster."""
    costs: ProbeCosts | None = None
    """The costs by which the search chooses between cheap probes and full ones; None: every probe
    is a full one."""

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
        found = plausible_samples(self.knowledge.on(self.cluster))
        object.__setattr__(self, "plausible", found)

    @property
    def allowed_memory_bytes(self) -> float:
        """The largest allowed peak of a device."""
        return self.cluster.device_memory_bytes * (1.0 - self.min_memory_headroom)
