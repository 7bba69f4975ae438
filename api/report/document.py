"""The report: its template with the data, plots and tables of a campaign."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from markupsafe import Markup

from layout_tuner.api.campaigns.measured_jobs import measured_jobs
from layout_tuner.api.formatting import (
    cost_parts,
    duration,
    effect_words,
    machine,
    moment,
    node_time,
    used_words,
)
from layout_tuner.api.html.assets import assets
from layout_tuner.api.html.leaderboard_table import LeaderboardTable, leaderboard_table
from layout_tuner.api.html.rendering import document
from layout_tuner.api.html.result_sentences import REASONS, end_of_log, finding_of, lead
from layout_tuner.api.html.trial_facts import TrialFacts, knob_pairs
from layout_tuner.api.plot_data.campaign_plots import CampaignPlots, PlotChoices
from layout_tuner.api.plots.bars import PlotPart, keys, stacked, swing
from layout_tuner.api.plots.layout_map import layout_map
from layout_tuner.api.plots.static_plot import static_plot
from layout_tuner.api.report.probe_command import commands
from layout_tuner.documents.json_and_yaml import write_yaml
from layout_tuner.predictions.belief.plan_text import PROSE_WIDTH, job_lines
from layout_tuner.predictions.statistics.job_duration import TrainingJob
from layout_tuner.protocol.states import TrialState
from layout_tuner.results_db.campaigns.imported_tables import IMPORTED
from layout_tuner.results_db.campaigns.reports import TrialBrief
from layout_tuner.results_db.leaderboard.leaderboard_records import RankedLayout
from layout_tuner.results_db.records import Analysis, CampaignRecord, ProbeCount
from layout_tuner.results_db.store import Store
from layout_tuner.results_db.trials.filter import WHOLE, LeaderboardListing, TrialFilter
from layout_tuner.version import version

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Content security policy: a browser may only show a report. The file and the answer have it."""

SHOWN: Final = 20
"""Layouts of the leaderboard and of the front that are shown."""

_SLICE_WIDTH: Final = 440.0


def report(
    store: Store, campaign: CampaignRecord, made_at: datetime, job: TrainingJob | None = None
) -> str:
    """A campaign's report: HTML without scripts or external resources."""
    finding = finding_of(store, campaign)
    winner, ended = finding.winner, store.reports.ended_trials(campaign.id)
    cheap = store.trials.ended_probes(campaign.id, cheap=True)
    page = store.leaderboard.page_of_layouts(campaign.id, limit=SHOWN)
    best = page.layouts
    counts = store.campaigns.count_trials(campaign.id)
    plots = CampaignPlots(store=store, campaign=campaign, choices=PlotChoices())
    return document(
        "report.html",
        policy=POLICY,
        # The style sheet of the pages: it is the project's own, and has no text from outside.
        style=Markup(assets()["dashboard.css"].content.decode()),  # noqa: S704
        campaign=campaign,
        made_at=made_at,
        cluster=campaign.stored.cluster,
        objective=campaign.objective,
        counts=counts,
        is_imported=campaign.strategy == IMPORTED,
        source=page.source,
        finding=finding,
        lead=list(lead(finding)),
        winner=None if winner is None else _winner(store, winner),
        tied=finding.tied,
        num_constrained=page.constrained,
        cheap=cheap,
        plots=plots,
        knobs=plots.facts.knobs,
        drawn=lambda name, label, knob=None: static_plot(
            plots.data_of(name, knob), label, **({"width": _SLICE_WIDTH} if knob else {})
        ),
        front=plots.data_of("pareto"),
        shown=SHOWN,
        failures=failures(store, ended),
        reasons=REASONS,
        cost=None
        if campaign.strategy == IMPORTED
        else _cost(store, campaign, counts, ended, cheap),
        steps=_steps(plots.analysis),
        environments=store.reports.environments(campaign.id),
        workers=store.reports.workers_of(campaign.id),
        commands="\n".join(commands(campaign, None if winner is None else winner.trial.layout)),
        file=write_yaml(dict(campaign.spec), default_flow_style=None, width=96),
        machine=machine,
        job=None if job is None else _job_text(job, campaign, best),
        version=version(),
        **_leaderboard(store, campaign, plots.ranked_baseline),
    )


def _leaderboard(
    store: Store, campaign: CampaignRecord, baseline: RankedLayout | None
) -> dict[str, Any]:
    """The best layouts, and the baseline after them if it is none of these."""

    def table(listing: LeaderboardListing, columns: Sequence[str]) -> LeaderboardTable:
        return leaderboard_table(
            store, campaign, listing, objective=campaign.objective, columns=columns, offset=0
        )

    whole = table(WHOLE, ())
    rows = list(whole.lines[:SHOWN])
    if baseline is not None and baseline.rank > SHOWN:
        wanted = TrialFilter(numbers=(baseline.trial.number,))
        columns = [column.name for column in whole.columns]
        rows += table(LeaderboardListing(wanted=wanted), columns).lines
    return {"leaderboard": whole, "leaders": rows}


def _job_text(job: TrainingJob, campaign: CampaignRecord, best: Sequence[RankedLayout]) -> str:
    jobs = measured_jobs(job, campaign.stored.spec, best)
    return "\n".join(job_lines(job, jobs, PROSE_WIDTH))


def _winner(store: Store, best: RankedLayout) -> dict[str, Any]:
    facts, layout = TrialFacts.of(store, best.trial.id), best.trial.layout
    is_pipeline = layout.pp > 1
    return {
        "best": best,
        "knobs": list(knob_pairs(layout, facts.campaign.stored.shown_knobs)),
        "figures": facts.figures,
        "bar": stacked(facts.parts) + keys(facts.parts) if facts.parts else None,
        "map": layout_map(layout, facts.campaign.stored.cluster),
        "schedule": facts.schedule() if is_pipeline else None,
        "memory": facts.memory() if is_pipeline else None,
    }


def _cost(
    store: Store,
    campaign: CampaignRecord,
    counts: Mapping[Any, int],
    ended: Sequence[TrialBrief],
    cheap: ProbeCount,
) -> dict[str, Any]:
    """Node-hours by use, and the used part of the budget."""
    parts = [
        PlotPart(name=use, size=seconds, says=node_time(seconds), kind=f"part{place}")
        for place, (use, seconds) in enumerate(
            cost_parts(campaign.cost, campaign.node_seconds).items(), 1
        )
        if seconds > 0
    ]
    return {
        "total": f"{node_time(campaign.node_seconds)} held by probes that have ended.",
        "bar": stacked(parts) + keys(parts) if parts else None,
        "budget": [
            *_budget(campaign, sum(counts.values()) - counts["CANCELLED"]),
            ("submitted", f"{moment(campaign.created_at)} by {campaign.created_by}"),
            ("first probe", moment(campaign.started_at)),
            ("ended", moment(campaign.ended_at)),
        ],
        "states": _states(
            counts,
            ended,
            cheap,
            store.trials.ended_probes(campaign.id, cheap=False),
            store.plans.count_known_trials(campaign),
        ),
    }


def _budget(campaign: CampaignRecord, num_trials: int) -> list[tuple[str, str]]:
    budget = campaign.stored.budget
    bounds = (
        ("trials", f"{num_trials:,}", "{:,}".format, budget.trials),
        ("node-hours", used_words(campaign.node_seconds, budget), str, None),
        ("wall time", duration(campaign.wall_time_s), duration, budget.wall_time_s),
    )
    return [
        (f"budget: {name}", used if most is None else f"{used} of {words(most)}")
        for name, used, words, most in bounds
    ]


def _states(
    counts: Mapping[Any, int],
    ended: Sequence[TrialBrief],
    cheap: ProbeCount,
    full: ProbeCount,
    num_known: int,
) -> list[tuple[str, str]]:
    """The trials by state, with what those that ended cost."""
    seconds: Counter[str] = Counter()
    for trial in ended:
        seconds[trial.state] += trial.node_seconds  # type: ignore[assignment]  # it is not whole
    states = [
        (f"{state.lower()} trials", f"{count:,}, {node_time(seconds[state])}")
        for state, count in counts.items()
        if count
    ]
    if cheap.number:
        states += [
            ("of these cheap probes", f"{cheap.number:,}, {node_time(cheap.node_seconds)}"),
            ("of these in full", f"{full.number:,}, {node_time(full.node_seconds)}"),
        ]
    if num_known:
        states.append(("started from", f"{num_known:,} trials of other campaigns"))
    return states


def _steps(analysis: Analysis | None) -> list[tuple[Any, ...]]:
    """One step in each knob away from the winner, with its effect in words and as a bar."""
    steps = () if analysis is None else analysis.steps
    largest = max((abs(step.effect) for step in steps if step.effect is not None), default=0)
    return [
        (
            step.knob,
            step.value,
            step.stepped_value,
            effect_words(step.effect, step.state, step.is_apart),
            "" if step.effect is None else swing(step.effect, largest),
            step.source,
            ", ".join(step.also),
            step.layout_key,
        )
        for step in steps
    ]


_NUMBERS_SHOWN: Final = 12
_NODES_SHOWN: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Trials without a result, for one reason."""

    reason: str
    trials: Sequence[TrialBrief]
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
        return ", ".join(named) or "unknown"

    @property
    def numbers(self) -> str:
        numbers = [str(trial.number) for trial in self.trials]
        if len(numbers) > _NUMBERS_SHOWN:
            more = len(numbers) - _NUMBERS_SHOWN
            return f"{', '.join(numbers[:_NUMBERS_SHOWN])} and {more} more"
        return ", ".join(numbers)

    @property
    def node_seconds(self) -> float:
        return sum(trial.node_seconds for trial in self.trials)


def failures(store: Store, ended: Sequence[TrialBrief]) -> list[Failure]:
    """Failures by reason, the most frequent first, without cancelled trials.

    Those say nothing about their layouts.
    """
    by_reason: dict[tuple[TrialState, str], list[TrialBrief]] = {}
    for trial in ended:
        if trial.state in ("FAILED", "INFEASIBLE"):
            key = (trial.state, trial.reason or trial.state.lower())
            by_reason.setdefault(key, []).append(trial)
    found = [
        Failure(reason=reason, trials=trials, log=end_of_log(store.reports.log_tail(trials[-1].id)))
        for (_state, reason), trials in by_reason.items()
    ]
    return sorted(found, key=lambda failure: -len(failure.trials))
