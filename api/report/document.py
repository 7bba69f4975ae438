"""The report: its template with the data, plots and tables of a campaign."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import yaml
from markupsafe import Markup

from api.dashboard.assets import assets
from api.dashboard.drawings.bars import PlotPart, bar, keys, stacked, step_parts, swing
from api.dashboard.drawings.layout_map import layout_map
from api.dashboard.drawings.schedule_chart import schedule_chart
from api.dashboard.rendering import document
from api.dashboard.trial_facts import figure_pairs, knob_pairs, stages_drawn
from api.report.facts import ReportFacts, facts_of
from api.report.ranking import front, history_plot, leaderboard
from api.report.reproduction import commands
from api.service.findings import REASONS, bounds, lead, peak_words, short_layout
from api.service.formatting import duration, effect_words, figure, machine, moment
from api.version import version
from results_db.campaigns.imports import IMPORTED
from results_db.records import CampaignRecord
from results_db.store import Store

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Content security policy: a browser may only show a report. The file and the answer have it."""


def report(store: Store, campaign: CampaignRecord, made_at: datetime) -> str:
    """A campaign's report: HTML without scripts or external resources."""
    facts = facts_of(store, campaign, made_at)
    return document(
        "report.html",
        policy=POLICY,
        # The style sheet of the pages: it is the project's own, and has no text from outside.
        style=Markup(assets()["dashboard.css"].content.decode()),  # noqa: S704
        facts=facts,
        campaign=campaign,
        cluster=campaign.spec["cluster"],
        objective=campaign.objective,
        counts=facts.counts,
        is_imported=campaign.strategy == IMPORTED,
        lead=list(lead(facts.finding)),
        winner=facts.winner and _winner(facts),
        leaderboard=leaderboard(facts),
        front=front(facts),
        history=history_plot(facts),
        reasons=REASONS,
        cost=None if campaign.strategy == IMPORTED else _cost(facts),
        importances=_importances(facts),
        steps=_steps(facts),
        commands="\n".join(commands(facts)),
        file=yaml.safe_dump(
            dict(campaign.spec),
            sort_keys=False,
            allow_unicode=True,
            default_flow_style=None,
            width=96,
        ),
        machine=machine,
        bounds=bounds,
        peak_words=peak_words,
        version=version(),
        short_layout=short_layout,
    )


def _winner(facts: ReportFacts) -> dict[str, Any]:
    """The knobs of the winner, its figures, and its drawings."""
    best = facts.winner
    assert best is not None
    measured, layout = best.trial.measurement, best.trial.layout
    assert measured is not None  # it is ranked
    parts = []
    compute_s = None
    if measured.breakdown is not None:
        parts = step_parts(measured.breakdown, measured.step_time_s)
        compute_s = measured.breakdown.compute_s
    return {
        "best": best,
        "knobs": list(knob_pairs(layout)),
        "figures": list(figure_pairs(facts.campaign, best.trial, best)),
        "bar": stacked(parts) + keys(parts) if parts else None,
        "map": layout_map(layout),
        "schedule": schedule_chart(layout, compute_s=compute_s) if layout.pp > 1 else None,
        "memory": stages_drawn(facts.campaign, best.trial) if layout.pp > 1 else None,
    }


def _cost(facts: ReportFacts) -> dict[str, Any]:
    """Node-hours by use, and the used part of the budget."""
    campaign = facts.campaign
    spent, budget = campaign.cost, campaign.spec["budget"]
    uses = (
        ("iterations", spent.iterations),
        ("start", spent.start),
        ("idle", spent.idle),
        ("lost", spent.lost),
    )
    parts = [
        PlotPart(
            name=use,
            size=seconds,
            says=f"{_hours(seconds)} ({seconds / spent.total:.1%})",
            kind=f"part{place}",
        )
        for place, (use, seconds) in enumerate(uses, 1)
        if seconds > 0
    ]
    trials = sum(facts.counts.values()) - facts.counts["CANCELLED"]
    bounds = (
        ("trials", f"{trials:,}", "{:,}".format, budget.get("trials")),
        (
            "node-hours",
            figure(campaign.node_seconds / 3600),
            "{:g}".format,
            budget.get("node_hours"),
        ),
        ("wall time", duration(campaign.wall_time_s), duration, budget.get("wall_time_s")),
    )
    rows = [
        (f"budget: {name}", used if most is None else f"{used} of {words(most)}")
        for name, used, words, most in bounds
    ]
    seconds_by_state = facts.node_seconds_by_state()
    states = [
        (f"{state.lower()} trials", f"{count:,}, {_hours(seconds_by_state[state])}")
        for state, count in facts.counts.items()
        if count
    ]
    if facts.num_known:
        states.append(("started from", f"{facts.num_known:,} trials of other campaigns"))
    return {
        "total": f"{_hours(spent.total)} in all; {_hours(campaign.node_seconds)} held by probes.",
        "bar": stacked(parts) + keys(parts) if parts else None,
        "budget": [
            *rows,
            ("submitted", f"{moment(campaign.created_at)} by {campaign.created_by or 'somebody'}"),
            ("first probe", moment(campaign.started_at)),
            ("ended", moment(campaign.ended_at)),
        ],
        "states": states,
    }


def _hours(seconds: float) -> str:
    return f"{figure(seconds / 3600)} node-hours"


def _importances(facts: ReportFacts) -> list[tuple[str, str, Markup]]:
    shares = {} if facts.analysis is None else facts.analysis.importances
    largest = max(shares.values(), default=0.0) or 1.0
    return [(knob, f"{share:.1%}", bar(share / largest)) for knob, share in shares.items()]


def _steps(facts: ReportFacts) -> list[tuple[Any, ...]]:
    """One step in each knob away from the winner, with its effect in words and as a bar."""
    steps = () if facts.analysis is None else facts.analysis.steps
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
