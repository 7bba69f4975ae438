"""`layout-tuner campaign list`, `show`, `table`, `pause`, `resume`, `cancel`, `analysis`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, cast

import click

from layout_tuner.api.formatting import (
    baseline_words,
    budget_words,
    cheap_count_words,
    cost_parts,
    duration,
    effect_words,
    figure,
    gain_sentence,
    moment,
    node_time,
    percent,
    seen_by,
    state_words,
    unit,
    used_words,
)
from layout_tuner.api.schemas.campaigns_and_trials import CampaignPage
from layout_tuner.cli.service.service_connection import (
    answers,
    best_words,
    print_facts,
    service_options,
)
from layout_tuner.results_db.campaigns.filter import CampaignFilter
from layout_tuner.results_db.records import CAMPAIGN_STATES, VISIBILITIES, Cost, KnobStepRead
from layout_tuner.search_spaces.campaigns.campaign_settings import STRATEGIES
from layout_tuner.search_spaces.objectives import ALL_OBJECTIVES
from layout_tuner.terminal.plurals import counted
from layout_tuner.terminal.text_table import print_table

if TYPE_CHECKING:
    from layout_tuner.api.schemas.campaigns_and_trials import (
        AnalysisRead,
        CampaignDetail,
        CampaignRead,
    )
    from layout_tuner.client.clients import Client

_LIST_COLUMNS: Final = (
    *("name", "state", "model", "cluster", "by", "seen by"),
    *(">trials", ">best", "unit", ">time left"),
)


def _moment(
    _context: click.Context, _parameter: click.Parameter, written: str | None
) -> datetime | None:
    if written is None:
        return None
    try:
        at = datetime.fromisoformat(written)
    except ValueError as error:
        raise click.BadParameter(
            f"{written!r} is not a time; write 2026-08-01 or 2026-08-01T12:00+02:00"
        ) from error
    return at if at.tzinfo else at.replace(tzinfo=UTC)


@click.command("list")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(CAMPAIGN_STATES, case_sensitive=False),
    help="Only these states; may be repeated.",
)
@click.option("--model", help="Name of the model.")
@click.option("--cluster", help="Name of the cluster.")
@click.option("--strategy", type=click.Choice((*STRATEGIES, "imported")))
@click.option("--objective", type=click.Choice(ALL_OBJECTIVES), help="Any of the objectives.")
@click.option("--created-by", help="Name of its owner.")
@click.option("--visibility", type=click.Choice(VISIBILITIES), help="Who sees it.")
@click.option("--group", help="The group that its node-hours count for.")
@click.option("--name-contains", help="A part of the name, in upper or lower case.")
@click.option(
    "--created-after",
    callback=_moment,
    metavar="TIME",
    help="At this time or later, such as 2026-08-01; UTC without a zone.",
)
@click.option("--created-before", callback=_moment, metavar="TIME", help="Before this time.")
@click.option("--limit", type=click.IntRange(min=1), help="Most campaigns to list.")
@answers(lambda page: print_table(_LIST_COLUMNS, [*map(_list_row, page.campaigns)]))
@service_options
def list_campaigns(
    client: Client, limit: int | None, states: tuple[str, ...], **asked: Any
) -> CampaignPage:
    """List campaigns, the newest first: all, or those that match every option."""
    chosen = CampaignFilter(states=cast("Any", states), **asked)
    return CampaignPage(campaigns=list(islice(client.campaigns(chosen), limit)), next_cursor=None)


@click.command()
@click.argument("name")
@service_options
def table(name: str, client: Client) -> None:
    """Print all that a campaign measured as a measurement table, failures included."""
    click.echo(client.table(name), nl=False)


def _campaign_command(call: Callable[[str, Client], CampaignDetail]) -> click.Command:
    """A command that calls the service about a campaign, and shows the campaign."""
    shown = answers(lambda campaign: print_facts(_facts(campaign)))(service_options(call))
    return click.command()(click.argument("name")(shown))


@_campaign_command
def show(name: str, client: Client) -> CampaignDetail:
    """Show one campaign."""
    return client.campaign(name)


@_campaign_command
def pause(name: str, client: Client) -> CampaignDetail:
    """Hand out no more trials; those that run finish."""
    return client.pause_campaign(name)


@_campaign_command
def resume(name: str, client: Client) -> CampaignDetail:
    """Take a paused campaign up again."""
    return client.resume_campaign(name)


@_campaign_command
def cancel(name: str, client: Client) -> CampaignDetail:
    """End a campaign now; trials that run are stopped."""
    return client.cancel_campaign(name)


@click.command()
@click.argument("name")
@answers(lambda analysis: _print_analysis(analysis))
@service_options
def analysis(name: str, client: Client) -> AnalysisRead:
    """Show which knobs matter, and what one step in each does to the winner."""
    return client.analysis(name)


def _list_row(campaign: CampaignRead) -> tuple[str, ...]:
    progress = campaign.progress
    planned = "" if progress.trials_planned is None else f"/{progress.trials_planned}"
    return (
        campaign.name,
        state_words(campaign.state, campaign.reason)
        + (", simulated" if campaign.simulated else ""),
        campaign.model,
        campaign.cluster,
        campaign.created_by,
        seen_by(campaign.visibility, campaign.group),
        f"{progress.trials_ended}{planned}",
        figure(progress.best) + (", disturbed" if progress.best_disturbed else ""),
        unit(campaign.objective),
        "-" if campaign.ended_at else duration(progress.seconds_left),
    )


def _print_analysis(analysis: AnalysisRead) -> None:
    """Prints the importances, then the steps around the winner."""
    if analysis.importances:
        rows = [(each.knob, f"{each.importance:.1%}") for each in analysis.importances]
        # A title would be cut to the width of a narrow table.
        click.echo(
            f"{analysis.campaign}: share of the variation of {analysis.objective} over "
            f"{counted(analysis.num_layouts, 'layout')}"
        )
        print_table(("knob", ">importance"), rows)
    else:
        click.echo(
            f"measured: {counted(analysis.num_layouts, 'layout')}, too few to tell which knob matters"
        )
    click.echo(f"one step from the winner, trial {analysis.winner} ({analysis.winner_layout})")
    columns = ("knob", ">from", ">to", ">effect", "source", "also changed")
    print_table(columns, [_step_row(step) for step in analysis.steps])


def _step_row(step: KnobStepRead) -> tuple[str, ...]:
    effect = effect_words(step.effect, step.state, step.is_apart)
    return (step.knob, step.value, step.stepped_value, effect, step.source, ", ".join(step.also))


def _facts(campaign: CampaignDetail) -> Iterator[tuple[str, str]]:
    progress = campaign.progress
    states = ", ".join(f"{count} {state}" for state, count in progress.trials.items() if count)
    yield "campaign", f"{campaign.name} (id {campaign.id})"
    yield "state", state_words(campaign.state, campaign.reason)
    if campaign.simulated is not None:
        yield "", campaign.simulated.words
    model = campaign.stored.model
    yield "model", model.title if model else campaign.model
    yield "trainer", _trainer(campaign)
    yield "cluster", campaign.cluster
    cluster = campaign.stored.cluster
    yield "constants", (cluster and cluster.source) or "of unknown origin"
    yield "precision", precision_words(campaign)
    yield "strategy", _strategy(campaign)
    yield "submitted", f"{moment(campaign.created_at)} by {campaign.created_by}"
    yield "seen by", f"{seen_by(campaign.visibility, campaign.group)}; priority {campaign.priority}"
    yield "budget", budget_words(campaign.stored.budget)
    yield "starts from", f"{counted(campaign.starts_from, 'trial')} of other campaigns"
    yield "trials", states or "none yet"
    took = f"{duration(campaign.wall_time_s)}{' of real time' if campaign.simulated else ''}"
    yield "used", f"{took}, {used_words(campaign.node_seconds, campaign.stored.budget)}"
    yield "cost", _cost(campaign)
    if auto := campaign.stored.auto_words:
        yield "auto", auto
    if searched := campaign.stored.searched_words:
        yield "job knobs", searched
    if number := campaign.cheap_probes:
        yield "cheap probes", cheap_count_words(number, campaign.cheap_probe_node_seconds)
    if progress.best is not None:
        yield "best", f"{best_words(campaign)}, trial {progress.best_trial}"
        yield "", str(progress.best_layout)
    if (baseline := campaign.baseline) is not None:
        yield "baseline", baseline_words(baseline, campaign.objective)
        yield "", baseline.layout_key
        if baseline.gain is not None:
            yield "gain", gain_sentence(baseline.gain, baseline, campaign.objective)
    if campaign.ended_at is None and progress.seconds_left is not None:
        yield "time left", f"about {duration(progress.seconds_left)}"
    if campaign.message:
        yield "message", campaign.message
    if progress.waiting_reason:
        yield "waiting", progress.waiting_reason
    yield from (("warning", warning) for warning in campaign.warnings)
    if campaign.notes:
        yield "notes", campaign.notes.rstrip()


def precision_words(campaign: CampaignDetail) -> str:
    return ", ".join(campaign.stored.precisions)


def _trainer(campaign: CampaignDetail) -> str:
    """What trains its probes; of a simulated campaign, in place of which trainer."""
    probe = campaign.stored.probe
    if campaign.simulated is None or probe is None:
        return campaign.trainer
    return f"{campaign.trainer}, in place of {probe.trainer}"


def _strategy(campaign: CampaignDetail) -> str:
    if campaign.reason == "imported":
        return f"imported: {counted(campaign.num_legal_layouts, 'layout')}"
    return f"{campaign.strategy} over {counted(campaign.num_legal_layouts, campaign.stored.counted_noun)}"


def _cost(campaign: CampaignDetail) -> str:
    """Node-hours of ended probes with the share of each use, and those of idle allocations."""
    cost = Cost(**{use.name: getattr(campaign.cost, use.name) for use in fields(Cost)})
    parts = cost_parts(cost, campaign.node_seconds)
    beside = parts.pop("idle allocations")
    words = "no probe has ended yet"
    if total := campaign.node_seconds:
        shares = ", ".join(f"{use} {percent(seconds / total)}" for use, seconds in parts.items())
        words = f"{node_time(total)} held: {shares}"
    more = f"; {node_time(beside)} of idle allocations, which no budget counts"
    return words + (more if beside else "")
