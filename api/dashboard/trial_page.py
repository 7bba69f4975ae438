"""The page of one trial. Its buttons are in `api.dashboard.campaign_actions`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fastapi import Request
from fastapi.responses import HTMLResponse
from markupsafe import Markup

from layout_tuner.api.dashboard.campaign_form import yaml_of
from layout_tuner.api.dependencies import HolderDep, StoreDep
from layout_tuner.api.formatting import REPEAT_WORDS, figure, objective_figure, step_words, unit
from layout_tuner.api.html.rendering import render
from layout_tuner.api.html.result_sentences import REASONS, bounds, short_layout
from layout_tuner.api.html.trial_facts import TrialFacts, knob_pairs
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.plot_data.plot_data import both_ends
from layout_tuner.api.plot_data.step_times import iterations
from layout_tuner.api.plots.bars import keys, stacked
from layout_tuner.api.plots.layout_map import layout_map
from layout_tuner.api.plots.static_plot import static_plot
from layout_tuner.api.report.probe_command import MODEL_FILE, probe_command
from layout_tuner.api.routes.trials import TrialPath
from layout_tuner.predictions.belief.cheap_probe_step_time import CheapProbe
from layout_tuner.results_db.leaderboard.leaderboard_records import RankedLayout
from layout_tuner.results_db.records import ENDED_CAMPAIGN_STATES
from layout_tuner.search_spaces.campaigns.fidelity import cheap_iterations
from layout_tuner.search_spaces.campaigns.stored_campaign import Damaged
from layout_tuner.terminal.plurals import capitalised

MAX_ROWS: Final = 60
"""Iterations up to which the table has all; of more it has the first and the last."""

router = LazyRouter()


@router.get("/trials/{trial_id}")
def show_trial(
    request: Request, trial_id: TrialPath, store: StoreDep, holder: HolderDep
) -> HTMLResponse:
    """A trial: its layout drawn, what it measured or why it did not, and how to run it again."""
    facts = TrialFacts.of(store, trial_id)
    trial, campaign, done = facts.trial, facts.campaign, facts.detail.iterations
    command = None
    if not isinstance(spec := campaign.stored.read, Damaged):
        command = probe_command(
            spec,
            trial.layout,
            num_layers=trial.num_layers,
            is_limited=trial.reason == "out_of_memory",
        )
    return render(
        request,
        "trial.html",
        facts=facts,
        trial=trial,
        campaign=campaign,
        detail=facts.detail,
        said="".join(_summary(facts)),
        meaning=REASONS.get(trial.reason or ""),
        knobs=list(knob_pairs(trial.layout, facts.campaign.stored.shown_knobs)),
        drawn=layout_map(trial.layout, campaign.stored.cluster),
        schedule=facts.schedule(),
        steps=_steps(facts),
        rows=[done[place] for place in both_ends(len(done), MAX_ROWS)],
        memory=facts.memory(),
        command=command,
        model_file=MODEL_FILE,
        model_text=yaml_of(command.model) if command and command.model else None,
        bar=stacked(facts.parts),
        legend=keys(facts.parts),
        may_change=holder.may_change(campaign),
        is_open=campaign.state not in ENDED_CAMPAIGN_STATES,
    )


def _summary(facts: TrialFacts) -> Iterator[str]:
    trial, ranked, objective = facts.trial, facts.ranked, facts.campaign.objective
    if trial.state == "PENDING":
        yield "It waits for a worker. "
    if trial.repeat_reason is not None:
        yield f"Its layout is repeated because {REPEAT_WORDS[trial.repeat_reason]}. "
    if trial.state == "RUNNING" and facts.detail.attempts:
        yield _running(facts)
    if ranked is not None:
        value = objective_figure(objective, ranked.value)
        yield f"Its layout runs at {value} {unit(objective)}, {bounds(ranked)}. "
        yield f"Rank {ranked.rank:,} of the leaderboard"
        if ranked.rank > 1 and ranked.tied_with_first:
            yield ", and cannot be told apart from the first with 95 % confidence"
        yield ". "
        if ranked.shortened:
            yield "Its probe was stopped early, since it was slower than the best of its time. "
        if trial.measurement and trial.measurement.is_disturbed:
            remedy = (
                "measure it again when the machine is quieter"
                if ranked.disturbed
                else "its layout stands with the runs that are not"
            )
            yield f"It is disturbed: {remedy}. "
    elif facts.cheap is not None:
        yield from _cheap(facts.cheap, facts.in_full)
    elif trial.state == "COMPLETED":
        yield "It is not ranked: its ranks shared devices, or it breaks the campaign's constraints. "
    if trial.message:
        yield f"{capitalised(trial.message).rstrip('.')}. "


def _cheap(probe: CheapProbe, in_full: RankedLayout | None) -> Iterator[str]:
    yield f"It is a cheap probe of the layout {short_layout(probe.full_layout)}: it runs {probe.runs}. "
    if probe.full_step is not None:
        yield f"From that, a step of the whole layout takes {step_words(probe.full_step)}. "
        yield "Its own figures are those of what ran, and it is not ranked. "
    if not probe.measures_memory:
        yield "With fewer layers it says nothing of the layout's memory. "
    if in_full is not None:
        step_s, number = in_full.step_time_s, in_full.trial.number
        yield f"Trial {number} measured the layout in full: {figure(step_s)} s a step. "


def _running(facts: TrialFacts) -> str:
    attempt = facts.detail.attempts[-1]
    words = {
        "waiting": "waits for devices",
        "starting": "is starting",
        "iterating": "is iterating",
        "ending": "is ending",
    }.get(attempt.phase or "", "has been leased")
    why = f" ({attempt.waiting_because})" if attempt.waiting_because else ""
    probe = facts.campaign.stored.probe
    asked = ""
    if probe is not None:
        timed = probe.iterations
        if facts.cheap is not None:
            timed = cheap_iterations(timed)
        asked = f", of about {probe.warmup + timed:,}"
    return (
        f"Attempt {attempt.attempt} {words} on {attempt.worker_name}{why}: "
        f"{facts.trial.iterations_done:,} iterations are done{asked}. "
    )


def _steps(facts: TrialFacts) -> Markup | None:
    """The plot of step times; None: there are none."""
    found, measured = facts.detail.iterations, facts.trial.measurement
    if not found:
        return None
    plot = iterations(found, None if measured is None else measured.step_time_s)
    words = "step time of each iteration in order; the table below has the numbers"
    return static_plot(plot, words).svg
