"""The problem that a strategy solves: layouts, model, cluster and objectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from layout_tuner.array_types import Ints
from layout_tuner.predictions.belief.job_knobs.knob_step_time import KnownKnobs
from layout_tuner.predictions.belief.known_measurements import Knowledge
from layout_tuner.predictions.belief.plausible_samples import PlausibleSamples, plausible_samples
from layout_tuner.search_spaces.campaigns.fidelity import ProbeCosts
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.jobs.job_knob import JobKnob, KnobEffect
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.objectives import DEFAULT_OBJECTIVES, OBJECTIVES
from layout_tuner.search_spaces.spaces.job_set import JobSet
from layout_tuner.tuner.errors import ProblemInvalidError
from layout_tuner.tuner.strategies.ask_and_tell import LayoutSet

_UNKNOWN: Final = KnobEffect(log_sd=0.25)
"""What a search expects of a value of a job knob of which nothing is stated. Published factors lie
between 0.6 and 1.3 of what a knob touches, which is 0.25 about 1, in logarithms. A narrower spread
has a search stay with the values that did well first."""


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
    knobs: Mapping[str, JobKnob] = field(default_factory=dict)
    """Declarations of the job knobs of listed layouts; a `JobSet` has its own."""
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
    def jobs(self) -> JobSet | None:
        """The layouts with the settings of their jobs; None: no job knob is searched."""
        return self.layouts if isinstance(self.layouts, JobSet) else None

    @property
    def known_knobs(self) -> KnownKnobs:
        """The declarations of the job knobs that it searches, or that its layouts have."""
        declared = self.knobs if self.jobs is None else self.jobs.choices.knobs
        return KnownKnobs(software=self.software, knobs=declared, unknown=_UNKNOWN)

    @property
    def without_jobs(self) -> LayoutSet:
        """The layouts without what is searched of their jobs."""
        return self.layouts.legal if isinstance(self.layouts, JobSet) else self.layouts

    def layout_rows(self, positions: Ints) -> Ints:
        """Positions among `without_jobs` of some of `layouts`."""
        return positions if self.jobs is None else self.jobs.layout_rows(positions)

    @property
    def allowed_memory_bytes(self) -> float:
        """The largest allowed peak of a device."""
        return self.cluster.device_memory_bytes * (1.0 - self.min_memory_headroom)
