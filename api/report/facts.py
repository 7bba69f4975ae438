"""The data of a report, read once from the store."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import numpy as np

from api.service.findings import TIES_LOOKED_AT, CampaignFinding, finding_of
from results_db.campaigns.reports import TrialPoint, WorkerShare
from results_db.leaderboard.ranked_layout import RankedLayout
from results_db.records import Analysis, CampaignRecord
from results_db.store import Store
from search_spaces.protocol.outcome import Environment
from search_spaces.protocol.worker_messages import TrialState
from search_spaces.spec.objectives import MEMORY_HEADROOM, measured_objective, pareto_front

SHOWN: Final = 20
"""Layouts of the leaderboard that are shown."""
LOG_LINES: Final = 14
"""Last lines of a failed trial's log that are shown."""
_NUMBERS_SHOWN: Final = 12
_NODES_SHOWN: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Trials without a result, for one reason."""

    reason: str
    state: TrialState
    trials: Sequence[TrialPoint]
    """In the order in which they ended."""
    log: str
    """The last lines of the log of the newest of them."""

    @property
    def nodes(self) -> str:
        """The nodes that failed first, where they are known, with their numbers of trials."""
        counted = Counter(trial.node for trial in self.trials if trial.node).most_common()
        named = [f"{node} ({times})" for node, times in counted[:_NODES_SHOWN]]
        if len(counted) > _NODES_SHOWN:
            named.append(f"{len(counted) - _NODES_SHOWN} more")
        return ", ".join(named) or "not told"

    @property
    def numbers(self) -> str:
        """The numbers of the trials in the campaign."""
        numbers = [str(trial.number) for trial in self.trials]
        if len(numbers) > _NUMBERS_SHOWN:
            more = len(numbers) - _NUMBERS_SHOWN
            return f"{', '.join(numbers[:_NUMBERS_SHOWN])} and {more} more"
        return ", ".join(numbers)

    @property
    def node_seconds(self) -> float:
        """Node-seconds that they cost."""
        return sum(trial.node_seconds for trial in self.trials)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A layout in the plane of two objectives."""

    trial: TrialPoint
    x: float
    y: float
    on_front: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportFacts:
    """The data of a campaign's report."""

    campaign: CampaignRecord
    made_at: datetime
    counts: Mapping[TrialState, int]
    finding: CampaignFinding
    best: Sequence[RankedLayout]
    """The first layouts of the leaderboard."""
    num_constrained: int
    """Completed trials that break the campaign's constraints."""
    front: frozenset[int]
    """Trials on the Pareto front over the campaign's objectives."""
    ended: Sequence[TrialPoint]
    failures: Sequence[Failure]
    """Failures of layouts or machines, the most frequent first."""
    environments: Sequence[tuple[Environment, int]]
    workers: Sequence[WorkerShare]
    analysis: Analysis | None
    source: str | None
    """The source of an imported campaign; None: it ran here."""
    num_known: int
    """Trials of other campaigns that it started from."""

    @property
    def num_ranked(self) -> int:
        """Layouts on the leaderboard."""
        return self.finding.summary.num_ranked

    @property
    def winner(self) -> RankedLayout | None:
        """The best layout; None if it was stopped early."""
        return self.finding.winner

    @property
    def tied(self) -> Sequence[RankedLayout]:
        """Layouts that are statistically tied with the winner, among the first."""
        return self.finding.tied

    @property
    def device_memory_bytes(self) -> int | None:
        """Memory of a device of the cluster."""
        found: int | None = self.campaign.spec["cluster"].get("device_memory_bytes")
        return found

    def value(self, trial: TrialPoint, objective: str) -> float | None:
        """The value of an objective that a trial measured."""
        if trial.tokens_per_s is None:
            return None
        return measured_objective(
            objective,
            trial,  # type: ignore[arg-type]  # it has all figures
            num_nodes=trial.num_nodes,
            device_memory_bytes=self.device_memory_bytes,
        )

    def node_seconds_by_state(self) -> Mapping[str, float]:
        """What ended trials cost, by their state; 0 for a state that none ended in."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for trial in self.ended:
            seconds[trial.state] += trial.node_seconds
        return seconds

    def is_ranked(self, trial: TrialPoint) -> bool:
        """Whether the leaderboard counts the trial."""
        most = self.campaign.max_peak_memory_bytes
        keeps = most is None or (trial.peak_memory_bytes or 0) <= most
        return trial.state == "COMPLETED" and not trial.oversubscribed and keeps

    def _first_runs(self) -> list[TrialPoint]:
        """The first ranked run of every layout; it is a repeat where the first run failed."""
        first: dict[str, TrialPoint] = {}
        for trial in self.ended:
            if self.is_ranked(trial):
                first.setdefault(trial.layout_key, trial)
        return list(first.values())

    @property
    def plane(self) -> tuple[str, str]:
        """The objectives of the horizontal and the vertical axis of the front."""
        objectives = self.campaign.objectives
        return (objectives[1] if len(objectives) > 1 else MEMORY_HEADROOM), objectives[0]

    def placed(self) -> list[Placed]:
        """The first run of every ranked layout in the plane."""
        across, up = self.plane
        found = [
            (trial, x, y)
            for trial in self._first_runs()
            if (x := self.value(trial, across)) is not None
            and (y := self.value(trial, up)) is not None
        ]
        if len(self.campaign.objectives) > 1:
            on_front = [trial.trial_id in self.front for trial, _x, _y in found]
        else:
            on_front = pareto_front(np.array([pair[1:] for pair in found]).reshape(-1, 2)).tolist()
        return [
            Placed(trial=trial, x=x, y=y, on_front=stands)
            for (trial, x, y), stands in zip(found, on_front, strict=True)
        ]


def facts_of(store: Store, campaign: CampaignRecord, made_at: datetime) -> ReportFacts:
    """Reads the data of a report."""
    ended = store.ended_trials(campaign.id)
    return ReportFacts(
        campaign=campaign,
        made_at=made_at,
        counts=store.count_trials(campaign.id),
        finding=finding_of(store, campaign),
        best=store.ranked_layouts(campaign.id, campaign.objective, limit=TIES_LOOKED_AT),
        num_constrained=store.count_constrained(campaign.id),
        front=store.front(campaign),
        ended=ended,
        failures=_failures(store, ended),
        environments=store.environments(campaign.id),
        workers=store.workers_of(campaign.id),
        analysis=store.analysis(campaign.id),
        source=store.import_source(campaign.id),
        num_known=store.count_known_trials(campaign),
    )


def _failures(store: Store, ended: Sequence[TrialPoint]) -> list[Failure]:
    """Failures by reason, without cancelled trials: those say nothing about their layouts."""
    by_reason: dict[tuple[TrialState, str], list[TrialPoint]] = {}
    for trial in ended:
        if trial.state in ("FAILED", "INFEASIBLE"):
            key = (trial.state, trial.reason or trial.state.lower())
            by_reason.setdefault(key, []).append(trial)
    found = [
        Failure(
            state=state,
            reason=reason,
            trials=trials,
            log="\n".join(store.log_tail(trials[-1].trial_id).splitlines()[-LOG_LINES:]),
        )
        for (state, reason), trials in by_reason.items()
    ]
    return sorted(found, key=lambda failure: -len(failure.trials))
