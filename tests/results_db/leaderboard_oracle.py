"""The leaderboard, computed from all measurements in another way than the product does.

Tests compare the product with it. It changes only with what a leaderboard promises.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, median, variance
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import logsumexp
from scipy.stats import norm
from scipy.stats import t as student
from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.orm import Session

from layout_tuner.results_db.leaderboard.leaderboard_records import RankedLayout
from layout_tuner.results_db.models.tables import Campaign, IterationRow, MeasurementRow, Trial
from layout_tuner.results_db.records import CampaignRecord, TrialRecord
from layout_tuner.results_db.rows import WITH_MEASUREMENT, trial_record
from layout_tuner.search_spaces.objectives import OBJECTIVES, measured_objective
from layout_tuner.units import SECONDS_PER_HOUR


def standings(
    session: Session, campaign_id: int, objective: str, *, among: Collection[int] | None = None
) -> list[RankedLayout]:
    layouts = rank(_runs(session, campaign_id, objective))
    page = [
        each for each in layouts if among is None or any(run.trial_id in among for run in each.runs)
    ]
    return _standings(session, campaign_id, layouts, page)


def count_constrained(session: Session, campaign_id: int) -> int:
    query = (
        select(func.count())
        .select_from(Trial)
        .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .where(_counts(campaign_id), ~_keeps_constraints(campaign_id))
    )
    return session.scalar(query) or 0


def front(session: Session, campaign: CampaignRecord) -> frozenset[int]:
    query = (
        select(Trial, MeasurementRow)
        .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .where(_ranked(campaign.id))
        .order_by(Trial.id)
    )
    rows = session.execute(query).all()
    in_full = [(trial, measured) for trial, measured in rows if not measured.shortened]
    memory = {"device_memory_bytes": campaign.spec["cluster"].get("device_memory_bytes")}
    runs: defaultdict[str, list[tuple[float, list[float | None]]]] = defaultdict(list)
    first_id: dict[str, int] = {}
    for trial, measured in in_full or rows:
        first_id.setdefault(trial.layout_key, trial.id)
        values = [
            measured_objective(name, measured, num_nodes=trial.num_nodes, **memory)
            for name in campaign.objectives
        ]
        runs[trial.layout_key].append((measured.step_time_s, values))
    is_rate = [name in OBJECTIVES for name in campaign.objectives]
    pooled = [_pooled(of_layout, is_rate) for of_layout in runs.values()]
    values = np.array(pooled, dtype=np.float64)
    known = np.where(np.isnan(values), -math.inf, values).tolist()
    return frozenset(
        id_
        for id_, own in zip(first_id.values(), known, strict=True)
        if not any(_dominates(other, own) for other in known)
    )


def _dominates(other: list[float], own: list[float]) -> bool:
    return other != own and all(mine <= theirs for mine, theirs in zip(own, other, strict=True))


@dataclass(frozen=True, slots=True)
class Run:
    trial_id: int
    layout_key: str
    value: float
    step_time_s: float
    shortened: bool
    disturbed: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleLayout:
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def shortened(self) -> bool:
        return self.first.shortened

    @property
    def step_time_s(self) -> float:
        return median(run.step_time_s for run in self.runs)

    @property
    def value(self) -> float:
        return self.first.value * (self.first.step_time_s / self.step_time_s)


def rank(runs: Iterable[Run]) -> list[OracleLayout]:
    by_layout: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_layout[run.layout_key].append(run)
    layouts = [OracleLayout(runs=_counting(of_layout)) for of_layout in by_layout.values()]
    layouts.sort(key=lambda layout: (-layout.value, layout.first.trial_id))
    winner = next((layout for layout in layouts if not layout.shortened), None)
    if winner is not None:
        layouts.remove(winner)
        layouts.insert(0, winner)
    return layouts


def _counting(runs: Sequence[Run]) -> tuple[Run, ...]:
    in_order = sorted(runs, key=lambda run: run.trial_id)
    in_full = [run for run in in_order if not run.shortened] or in_order
    return tuple(run for run in in_full if not run.disturbed) or tuple(in_full)


def _pooled(
    runs: Sequence[tuple[float, Sequence[float | None]]], is_rate: Sequence[bool]
) -> Sequence[float | None]:
    (first_s, first), *others = runs
    if not others:
        return first
    times_longer = np.median([step_time_s for step_time_s, _ in runs]) / first_s
    values = np.array([values for _, values in runs], dtype=np.float64)
    return np.where(is_rate, values[0] / times_longer, np.median(values, axis=0)).tolist()


def _runs(session: Session, campaign_id: int, objective: str) -> list[Run]:
    query = (
        select(
            Trial.id,
            Trial.layout_key,
            _column(objective),
            MeasurementRow.step_time_s,
            MeasurementRow.shortened,
            or_(MeasurementRow.throttled, MeasurementRow.others_share >= 0.05),
        )
        .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .where(_ranked(campaign_id))
    )
    return [Run(*row) for row in session.execute(query)]


def _standings(
    session: Session,
    campaign_id: int,
    layouts: Sequence[OracleLayout],
    page: Sequence[OracleLayout],
) -> list[RankedLayout]:
    if not page:
        return []
    first = layouts[0]
    timed = _timed_iterations(session, [*page, first])
    peaks = _peaks(session, campaign_id)
    every = _first_trials(session, layouts)
    trials = {id_: _by_one_peak(trial, peaks) for id_, trial in every.items()}
    hfu = {id_: trial.measurement and trial.measurement.hfu for id_, trial in trials.items()}
    weights = _weights_of_spreads(
        _earlier_runs(session, campaign_id),
        [[run.step_time_s for run in each.runs] for each in layouts],
    )
    shrunk = math.log(first.value) - _flattery(layouts, weights)

    between = _reach_between(weights)

    @cache
    def reach(layout: OracleLayout) -> float:
        runs = [timed.get(run.trial_id) or [run.step_time_s] for run in layout.runs]
        return _reach(runs, between)

    def standing(layout: OracleLayout) -> RankedLayout:
        middle = shrunk if layout is first else math.log(layout.value)
        low, high = math.exp(middle - reach(layout)), math.exp(middle + reach(layout))
        if share := hfu.get(layout.first.trial_id):
            high = min(high, layout.value * layout.step_time_s / layout.first.step_time_s / share)
        low, high = min(low, layout.value), max(high, layout.value)
        apart = abs(middle - shrunk) > math.sqrt(reach(layout) ** 2 + reach(first) ** 2)
        return RankedLayout(
            trial=trials[layout.first.trial_id],
            rank=layouts.index(layout) + 1,
            value=layout.value,
            value_low=low,
            value_high=high,
            step_time_s=layout.step_time_s,
            step_time_low_s=layout.step_time_s / (high / layout.value),
            step_time_high_s=layout.step_time_s / (low / layout.value),
            trial_ids=tuple(run.trial_id for run in layout.runs),
            shortened=layout.shortened,
            tied_with_first=layout is first or not apart,
        )

    return [standing(layout) for layout in page]


def _earlier_runs(session: Session, campaign_id: int) -> list[list[float]]:
    """The runs of each layout of earlier campaigns, which are fewer than 20 here."""
    this = session.get_one(Campaign, campaign_id)
    found = []
    for each in session.scalars(select(Campaign).where(Campaign.ended_at <= this.created_at)):
        is_alike = (each.cluster_name, each.trainer) == (this.cluster_name, this.trainer)
        if is_alike and each.id != campaign_id:
            query = (
                select(Trial.layout_key, MeasurementRow.step_time_s)
                .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
                .where(
                    Trial.campaign_id == each.id,
                    Trial.state == "COMPLETED",
                    Trial.num_layers.is_(None),
                    ~MeasurementRow.oversubscribed,
                    ~MeasurementRow.shortened,
                )
            )
            runs = defaultdict(list)
            for key, seconds in session.execute(query):
                runs[key].append(seconds)
            found += [of_layout for of_layout in runs.values() if len(of_layout) > 1]
    return found


def _weights_of_spreads(*parts: Sequence[Sequence[float]]) -> dict[float, float]:
    """The probability of each standard deviation between runs, one by one."""
    spreads = [0.002 * 200 ** (place / 23) for place in range(24)]
    logs = {sd: norm.logpdf(math.log(sd / 0.04) / 0.8) for sd in spreads}
    repeated = [[np.log(runs) for runs in part if len(runs) > 1][:200] for part in parts]
    for sd in spreads:
        for runs in itertools.chain(*repeated):
            cases = [math.log(0.95) + _log_density(runs, [sd] * len(runs))]
            for disturbed in range(len(runs)):
                errors = [math.hypot(sd, 0.3 * (place == disturbed)) for place in range(len(runs))]
                cases.append(math.log(0.05) + _log_density(runs, errors))
            logs[sd] += float(logsumexp(cases))
    largest = max(logs.values())
    total = math.fsum(math.exp(log - largest) for log in logs.values())
    return {sd: math.exp(log - largest) / total for sd, log in logs.items()}


def _log_density(logs: Sequence[float], errors: Sequence[float]) -> float:
    """Of normal values around an unknown middle: of their differences from the first one."""
    apart = np.array(logs[1:]) - logs[0]
    covariance = np.diag(np.square(errors[1:])) + errors[0] ** 2
    _, log_determinant = np.linalg.slogdet(covariance)
    return float(-0.5 * (log_determinant + apart @ np.linalg.solve(covariance, apart)))


def _reach_between(weights: Mapping[float, float]) -> float:
    spreads, shares = (np.array(list(each)) for each in (weights.keys(), weights.values()))
    return float(brentq(lambda x: shares @ norm.cdf(x / spreads) - 0.975, 0, 4, xtol=1e-15))


def _reach(runs: Sequence[Sequence[float]], between: float) -> float:
    of_median = (math.pi / 2 if len(runs) > 2 else 1.0) / len(runs)
    found = [between * math.sqrt(of_median)]
    if min(len(run) for run in runs) > 1:
        within = fmean(math.pi / 2 * variance(map(math.log, run)) / len(run) for run in runs)
        dof = sum(len(run) - 1 for run in runs)
        found.append(student.ppf(0.975, dof) * math.sqrt(of_median * within))
    if len(runs) == 2:
        one, other = map(median, runs)
        found.append(abs(math.log(one / other)) / 2)
    return min(max(found), 50.0)


def _flattery(layouts: Sequence[OracleLayout], weights: Mapping[float, float]) -> float:
    expected = math.fsum(w * sd**2 for sd, w in weights.items())

    def error(layout: OracleLayout) -> float:
        num = len(layout.runs)
        return expected * (math.pi / 2 if num > 2 else 1.0) / num

    first = layouts[0]
    reach = 3 * math.sqrt(error(first) + expected)
    near = [
        each
        for each in layouts
        if each is first
        or (not each.shortened and math.log(first.value / each.value) <= reach + 1e-12)
    ]
    if len(near) < 3:
        return 0.0
    weight = [1 / error(each) for each in near]
    values = [math.log(each.value) for each in near]
    mean = np.average(values, weights=weight)
    squares = sum(w * (v - mean) ** 2 for w, v in zip(weight, values, strict=True))
    scale = sum(weight) - sum(w * w for w in weight) / sum(weight)
    between = max((squares - len(near) + 1) / scale, 0.0)
    return float(max((values[0] - mean) * error(first) / (between + error(first)), 0.0))


def _timed_iterations(
    session: Session, layouts: Sequence[OracleLayout]
) -> Mapping[int, list[float]]:
    ids = {run.trial_id for layout in layouts for run in layout.runs}
    query = select(IterationRow.trial_id, IterationRow.step_time_s).where(
        IterationRow.trial_id.in_(ids), IterationRow.kind == "timed"
    )
    found: defaultdict[int, list[float]] = defaultdict(list)
    for trial_id, seconds in session.execute(query):
        found[trial_id].append(seconds)
    return found


def _first_trials(session: Session, page: Sequence[OracleLayout]) -> Mapping[int, TrialRecord]:
    query = select(Trial).where(Trial.id.in_([layout.first.trial_id for layout in page]))
    rows = session.scalars(query.options(WITH_MEASUREMENT))
    return {row.id: trial_record(row) for row in rows}


def _peaks(session: Session, campaign_id: int) -> Mapping[str, set[tuple[float, str]]]:
    """The peaks of the completed runs by precision, with their sources."""
    query = select(Trial).where(Trial.campaign_id == campaign_id, Trial.state == "COMPLETED")
    found: defaultdict[str, set[tuple[float, str]]] = defaultdict(set)
    for row in session.scalars(query.options(WITH_MEASUREMENT)):
        measured = trial_record(row).measurement
        if measured is not None and measured.peak_tflops_per_device is not None:
            peak = (measured.peak_tflops_per_device, str(measured.peak_source))
            found[row.precision].add(peak)
    return found


def _by_one_peak(trial: TrialRecord, peaks: Mapping[str, set[tuple[float, str]]]) -> TrialRecord:
    measured, of_precision = trial.measurement, peaks.get(trial.layout.precision, set())
    if measured is None or measured.mfu is None or len(of_precision) < 2:
        return trial
    tflops, source = max(of_precision)
    by_peak = replace(
        measured,
        mfu=measured.model_tflops_per_device / tflops,
        hfu=measured.hardware_tflops_per_device / tflops,
        peak_tflops_per_device=tflops,
        peak_source=source,
    )
    return replace(trial, measurement=by_peak)


def _ranked(campaign_id: int) -> ColumnElement[bool]:
    return and_(_counts(campaign_id), _keeps_constraints(campaign_id))


def _counts(campaign_id: int) -> ColumnElement[bool]:
    return and_(
        MeasurementRow.campaign_id == campaign_id,
        MeasurementRow.oversubscribed.is_(False),
        Trial.state == "COMPLETED",
    )


def _keeps_constraints(campaign_id: int) -> ColumnElement[bool]:
    bound = select(Campaign.max_peak_memory_bytes).where(Campaign.id == campaign_id)
    allowed = bound.scalar_subquery()
    return or_(allowed.is_(None), MeasurementRow.peak_memory_bytes <= allowed)


def _column(objective: str) -> ColumnElement[Any]:
    if objective == "tokens_per_node_hour":
        return MeasurementRow.tokens_per_s * SECONDS_PER_HOUR / Trial.num_nodes
    return getattr(MeasurementRow, objective)
