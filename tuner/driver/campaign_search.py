"""The search of one campaign: rebuilt from the database, and updated with each ended trial."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final

from layout_tuner.predictions.belief.cheap_probe_step_time import extrapolated_step
from layout_tuner.predictions.belief.observation import (
    FAILED,
    INFEASIBLE,
    Observation,
    ObservationInvalidError,
)
from layout_tuner.predictions.estimates.prediction import Prediction
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.protocol.outcome import NOT_OF_THE_LAYOUT
from layout_tuner.results_db.campaigns.start_from import KnownTrial, knowledge_of
from layout_tuner.results_db.records import CampaignRecord, TrialRecord
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.campaigns.fidelity import Fidelity, fidelity_of
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.objectives import objective_factors
from layout_tuner.tuner.errors import CampaignBrokenError, LayoutUnknownError, TunerError
from layout_tuner.tuner.strategies.ask_and_tell import (
    NO_LIMITS,
    AskLimits,
    LayoutSearch,
    LayoutSet,
)
from layout_tuner.tuner.strategies.registry import make_strategy
from layout_tuner.tuner.strategies.search_problem import SearchProblem

_IN_A_ROW: Final = 2
"""Ended trials after which too little must be possible for a campaign to end."""

_log: Final = logging.getLogger("layout_tuner.tuner.driver.driver")


class CampaignSearch:
    """A campaign's description and strategy; errors of either become `CampaignBrokenError`."""

    def __init__(self, spec: CampaignSpec, strategy: LayoutSearch, *, layouts: LayoutSet) -> None:
        self.spec = spec
        self.layouts = layouts
        """The legal layouts, each with the settings that its job may have."""
        self.last_ended_seq = 0
        """The largest `ended_seq` of the trials that the strategy has."""
        self._uses_cheap_probes = spec.uses_cheap_probes
        self._strategy = strategy
        self._baseline_due = spec.baseline
        """The baseline while the campaign has no trial of it."""
        self._measured: dict[Layout, int] = {}
        """The first trial of each layout that completed in full."""
        self._possible: list[tuple[int, float | None]] = []
        """The last two answers of `possible_improvement`, after different trials."""

    @classmethod
    def rebuild(
        cls,
        campaign: CampaignRecord,
        trials: Iterable[TrialRecord],
        known_trials: Iterable[KnownTrial] = (),
    ) -> CampaignSearch:
        """Builds the strategy and tells it the ended trials in order, then the open ones.

        It starts from the known trials, which are of other campaigns.

        Raises:
            CampaignBrokenError: the description or the strategy cannot be used.
        """
        known = list(trials)
        with _blamed(f"campaign {campaign.name!r} cannot be opened"):
            spec = campaign.stored.spec
            layouts = spec.jobs(spec.legal_set())
            problem = SearchProblem(
                layouts=layouts,
                model=spec.model,
                cluster=spec.cluster,
                objectives=spec.objectives,
                min_memory_headroom=spec.constraints.memory_headroom,
                software=spec.software,
                knowledge=knowledge_of(known_trials),
                costs=spec.probe_costs() if spec.uses_cheap_probes else None,
            )
            for warning in problem.plausible.warnings:
                _log.warning("campaign %r: %s", campaign.name, warning)
            strategy = make_strategy(spec.strategy, problem, seed=spec.seed)
            search = cls(spec, strategy, layouts=layouts)
        for trial in sorted(known, key=lambda trial: trial.ended_seq or 0):
            if trial.ended_seq is not None:
                search.tell(trial)
        for trial in known:
            if trial.ended_seq is None:
                search.resume(trial)
        if any(trial.stands_for == spec.baseline for trial in known):
            search._baseline_due = None
        return search

    @property
    def num_layouts(self) -> int:
        return len(self.layouts)

    def take_budget(self, campaign: CampaignRecord) -> None:
        """Takes over the budget, which users may change; CampaignBrokenError if it is unusable."""
        with _blamed(f"the budget of campaign {campaign.name!r} cannot be used"):
            budget = campaign.stored.spec.budget
        if budget != self.spec.budget:
            _log.info("campaign %r: the budget is now %s", campaign.name, budget)
            self.spec = replace(self.spec, budget=budget)

    @property
    def is_outdated(self) -> bool:
        """Whether the new budget decides otherwise about cheap probes than the search knows."""
        return self.spec.uses_cheap_probes != self._uses_cheap_probes

    def ask(self, limits: AskLimits = NO_LIMITS) -> Layout | None:
        """The next layout, the baseline before all others.

        None: the legal set is exhausted, or the search is held back (`is_held_back`).
        """
        with _blamed(f"strategy {self.spec.strategy!r} failed to propose a layout"):
            baseline, self._baseline_due = self._baseline_due, None
            if baseline is None:
                return self._strategy.ask(limits)
            # Outside of the space the strategy does not know it; inside it must not propose it too.
            with suppress(LayoutUnknownError):
                self._strategy.resume(baseline)
            return baseline

    def fidelity(self, layout: Layout) -> Fidelity | None:
        """The part of the layout, which was asked for last, to be probed; None: all of it."""
        if layout == self.spec.baseline:
            return None  # The winner is compared with it.
        with _blamed(f"strategy {self.spec.strategy!r} failed to choose a fidelity"):
            return self._strategy.fidelity(layout)

    def measured_by(self, layout: Layout) -> int | None:
        """The id of the trial that a proposed layout repeats; None: not yet measured in full."""
        return self._measured.get(layout)

    @property
    def is_held_back(self) -> bool:
        """Whether the last ask proposed nothing because the budget allows nothing, at least now."""
        return self._strategy.is_held_back

    @property
    def has_measured(self) -> bool:
        """Whether some layout was measured in full."""
        return bool(self._measured)

    def predict(self, layout: Layout) -> Prediction | None:
        """What the strategy predicts of a layout now; None: nothing, or not of this one."""
        with _blamed(f"strategy {self.spec.strategy!r} failed to predict layout {layout.key}"):
            try:
                return self._strategy.predict(layout)
            except LayoutUnknownError:
                return None  # a baseline outside of the space

    def possible_improvement(self) -> float | None:
        """See `LayoutSearch.possible_improvement`; the larger one of the last two ended trials.

        One small figure may be a coincidence of the draws. None also before there are two.
        """
        if not self._possible or self._possible[-1][0] != self.last_ended_seq:
            with _blamed(f"strategy {self.spec.strategy!r} failed to predict what is left"):
                share = self._strategy.possible_improvement()
            self._possible = [*self._possible[-1:], (self.last_ended_seq, share)]
        shares = [share for _, share in self._possible if share is not None]
        return max(shares) if len(shares) == _IN_A_ROW else None

    def tell(self, trial: TrialRecord) -> None:
        """Tells the strategy the outcome of an ended trial."""
        with _blamed(f"strategy {self.spec.strategy!r} failed on trial {trial.number}"):
            try:
                self._learn(trial)
            except LayoutUnknownError as error:
                self._warn(trial, error)
        self.last_ended_seq = max(self.last_ended_seq, trial.ended_seq or 0)

    def _learn(self, trial: TrialRecord) -> None:
        try:
            observation = observe(trial, self.spec.objective)
        except ObservationInvalidError as error:
            # One invalid measurement must not end the campaign.
            self._warn(trial, error)
            observation = None
        layout, fidelity = trial.stands_for, fidelity_of_trial(trial)
        if observation is None:
            self._strategy.withdraw(layout, fidelity=fidelity)
            return
        if fidelity is not None and not fidelity.keeps_memory(self.spec.model):
            observation = replace(observation, peak_memory_bytes=None)
        self._strategy.tell(layout, observation, run=trial.id, fidelity=fidelity)
        if trial.state == "COMPLETED" and fidelity is None:
            self._measured[layout] = trial.repeat_of or trial.id

    def resume(self, trial: TrialRecord) -> None:
        """Tells the strategy about an open trial that it did not propose now."""
        try:
            self._strategy.resume(trial.stands_for, fidelity=fidelity_of_trial(trial))
        except LayoutUnknownError as error:
            self._warn(trial, error)

    def _warn(self, trial: TrialRecord, error: ObservationInvalidError | TunerError) -> None:
        if isinstance(error, LayoutUnknownError) and trial.stands_for == self.spec.baseline:
            return  # It lies outside of the space, which its users know.
        _log.warning(
            "campaign %r: trial %d teaches the search nothing: %s",
            self.spec.name,
            trial.number,
            error,
        )


def fidelity_of_trial(trial: TrialRecord) -> Fidelity | None:
    """The part of its layout that a trial runs; None: all of it."""
    if trial.full_layout is None:
        return None
    assert trial.num_layers is not None, f"trial {trial.id} has no number of layers"
    return fidelity_of(trial.full_layout, trial.layout, trial.num_layers)


def full_probe_node_s(spec: CampaignSpec, trials: Sequence[TrialRecord]) -> float | None:
    """Node-seconds that a full probe of the best layout is expected to take.

    The best is the one whose cheap probe promises the largest objective. A step of the whole layout
    is longer than one of its part by the ratio of their estimates. None: no cheap probe completed.
    """
    costs, kernels = spec.probe_costs(), kernels_of(spec.software, spec.cluster)
    expected = []
    for trial in trials:
        fidelity = fidelity_of_trial(trial)
        if fidelity is None or trial.state != "COMPLETED" or trial.measurement is None:
            continue
        layout, measured_s = trial.stands_for, trial.measurement.step_time_s
        step_s = extrapolated_step(
            measured_s, fidelity, layout, spec.model, spec.cluster, kernels
        ).expected_s
        factor = float(objective_factors(spec.objective, LayoutColumns.of(layout), spec.model))
        expected.append((factor / step_s, costs.node_s(layout.num_nodes, step_s)))
    return max(expected)[1] if expected else None


def observe(trial: TrialRecord, objective: str) -> Observation | None:
    """The observation of an ended trial; None where the trial shows nothing about its layout.

    Cancelled trials and trials whose ranks shared devices give None. A trial that breaks the
    campaign's constraints did run, so the strategy gets its step time and peak.

    Raises:
        ObservationInvalidError: the measured objective cannot be ranked.
    """
    if trial.state == "INFEASIBLE":
        return INFEASIBLE
    if trial.state == "FAILED":
        return None if trial.reason in NOT_OF_THE_LAYOUT else FAILED
    if trial.state == "COMPLETED":
        assert trial.measurement is not None, f"trial {trial.id} is COMPLETED without a measurement"
        if not trial.measurement.oversubscribed:
            value = trial.objective(objective)
            assert value is not None, f"{objective} is a throughput"
            return Observation.completed(
                value,
                step_time_s=trial.measurement.step_time_s,
                peak_memory_bytes=trial.measurement.peak_memory_bytes,
            )
    return None


@contextmanager
def _blamed(what: str) -> Iterator[None]:
    """Turns any exception, also one of DeepHyper, into an error of this campaign alone.

    Lack of memory is no error of the campaign.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise CampaignBrokenError(f"{what}: {type(error).__name__}: {error}") from error
