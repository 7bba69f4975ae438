"""`layout-tuner campaign`: submit, import, show, watch, pause, ...; longer subcommands have own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from api.client import Client
from api.commands.analysis import print_analysis
from api.commands.campaign_changes import budget_words, clone, delete, update
from api.commands.campaign_list import list_campaigns
from api.commands.connection import json_option, print_json, service_options
from api.commands.watching import watch_campaign
from api.documents import read_json, read_yaml
from api.errors import DocumentMalformedError
from api.figures import duration, figure, unit
from api.schemas import CampaignDetail, CostRead
from search_spaces.counting import counted


@click.group()
def campaign() -> None:
    """Submit, follow and steer campaigns."""


for _command in (list_campaigns, update, clone, delete):
    campaign.add_command(_command)


@campaign.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option
@service_options
def submit(file: Path, as_json: bool, client: Client) -> None:
    """Submit the campaign in FILE (YAML, or JSON where its name ends in .json).

    A file that is not YAML or JSON is bad usage (exit code 2); a campaign that the service refuses
    is a failure (exit code 1).
    """
    created = client.create_campaign(read_campaign_file(file))
    if as_json:
        print_json(created)
        return
    click.echo(
        f"campaign {created.name} submitted: {counted(created.num_legal_layouts, 'legal layout')}, "
        f"{budget_words(created)}"
    )
    for warning in created.warnings:
        click.echo(f"warning: {warning}", err=True)


@campaign.command("import")
@click.argument("table", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--name", help="Name of the campaign; several are numbered after it.")
@click.option(
    "--cell",
    "cells",
    multiple=True,
    metavar="KEY=VALUE[,...]",
    help="Only the cells whose key has these values (num_devices=4|8 is either); may be repeated.",
)
@json_option
@service_options
def import_table(
    table: Path, name: str | None, cells: tuple[str, ...], as_json: bool, client: Client
) -> None:
    """Import the measurement table TABLE (CSV): every cell becomes a campaign that has ended.

    Its trials are ranked and listed as any others; `start_from: [NAME]` lets a campaign start from them.
    A table that is refused is named with the row, and nothing of it is kept.
    """
    try:
        content = table.read_bytes()
    except OSError as error:
        raise click.UsageError(f"{table} cannot be read: {error.strerror}") from error
    imported = client.import_table(content, name=name, cells=cells)
    if as_json:
        print_json(imported)
        return
    for each in imported.campaigns:
        click.echo(f"campaign {each.name} imported: {each.message}")
    for note in imported.notes:
        click.echo(f"note: {note}", err=True)


@campaign.command()
@click.argument("name")
@service_options
def table(name: str, client: Client) -> None:
    """Print all that a campaign measured as a measurement table, failures included."""
    click.echo(client.table(name), nl=False)


def read_campaign_file(file: Path) -> dict[str, Any]:
    """The document in a campaign file."""
    return read_document_file(file, "the campaign")


def read_document_file(file: Path, what: str) -> dict[str, Any]:
    """The mapping in a YAML file, or a JSON file where its name ends in .json."""
    read = read_json if file.suffix.lower() == ".json" else read_yaml
    try:
        document = read(file.read_bytes())
    except OSError as error:
        raise click.UsageError(f"{file} cannot be read: {error.strerror}") from error
    except DocumentMalformedError as error:
        raise click.UsageError(f"{file}: {error}") from error
    if not isinstance(document, dict):
        raise click.UsageError(f"{file}: {what} is not a mapping of fields to values")
    try:
        json.dumps(document, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise click.UsageError(
            f"{file}: cannot be sent ({error}): YAML reads .nan, .inf and dates where a number or a "
            "text is meant; write a number, or put the text in quotes"
        ) from error
    return document


@campaign.command()
@click.argument("name")
@json_option
@service_options
def show(name: str, as_json: bool, client: Client) -> None:
    """Show one campaign."""
    _show(client.campaign(name), as_json)


@campaign.command()
@click.argument("name")
@json_option
@service_options
def pause(name: str, as_json: bool, client: Client) -> None:
    """Hand out no more trials; those that run finish."""
    _show(client.pause_campaign(name), as_json)


@campaign.command()
@click.argument("name")
@json_option
@service_options
def resume(name: str, as_json: bool, client: Client) -> None:
    """Take a paused campaign up again."""
    _show(client.resume_campaign(name), as_json)


@campaign.command()
@click.argument("name")
@json_option
@service_options
def cancel(name: str, as_json: bool, client: Client) -> None:
    """End a campaign now; trials that run are stopped."""
    _show(client.cancel_campaign(name), as_json)


@campaign.command()
@click.argument("name")
@json_option
@service_options
def analysis(name: str, as_json: bool, client: Client) -> None:
    """Show which knobs matter, and what one step in each does to the winner."""
    found = client.analysis(name)
    if as_json:
        print_json(found)
    else:
        print_analysis(found)


@campaign.command()
@click.argument("name")
@service_options
def watch(name: str, client: Client) -> None:
    """Follow a campaign until it ends: trials done, best so far, time left.

    Exit code 0 when it completed, 1 when it failed or was cancelled.
    """
    ended = watch_campaign(client, name)
    if ended.state != "COMPLETED":
        raise click.exceptions.Exit(1)


def _show(campaign: CampaignDetail, as_json: bool) -> None:
    if as_json:
        print_json(campaign)
        return
    for label, value in _facts(campaign):
        click.echo(f"{label:<14}{value}")


def _facts(campaign: CampaignDetail) -> list[tuple[str, str]]:
    progress = campaign.progress
    states = ", ".join(f"{count} {state}" for state, count in progress.trials.items() if count)
    ended = f" ({campaign.reason})" if campaign.reason else ""
    facts = [
        ("campaign", f"{campaign.name} (id {campaign.id})"),
        ("state", f"{campaign.state}{ended}"),
        ("model", campaign.model),
        ("cluster", campaign.cluster),
        ("constants", campaign.spec["cluster"]["source"] or "of unknown origin"),
        ("strategy", _strategy(campaign)),
        ("submitted", _submitted(campaign)),
        ("budget", budget_words(campaign)),
        ("starts from", f"{counted(campaign.starts_from, 'trial')} of other campaigns"),
        ("trials", states or "none yet"),
        ("used", _used(campaign)),
        ("cost", _cost(campaign.cost)),
    ]
    if progress.best is not None:
        best = f"{figure(progress.best)} {unit(campaign.objective)}"
        facts.append(("best", f"{best}, trial {progress.best_trial}"))
        facts.append(("", str(progress.best_layout)))
    if campaign.ended_at is None and progress.seconds_left is not None:
        facts.append(("time left", f"about {duration(progress.seconds_left)}"))
    if campaign.message:
        facts.append(("message", campaign.message))
    if progress.waiting_reason:
        facts.append(("waiting", progress.waiting_reason))
    facts += [("warning", warning) for warning in campaign.warnings]
    for place, line in enumerate(campaign.notes.splitlines()):
        facts.append(("" if place else "notes", line))
    return facts


def _strategy(campaign: CampaignDetail) -> str:
    if campaign.reason == "imported":
        return f"imported: {counted(campaign.num_legal_layouts, 'layout')}"
    return f"{campaign.strategy} over {counted(campaign.num_legal_layouts, 'legal layout')}"


def _submitted(campaign: CampaignDetail) -> str:
    by = f" by {campaign.created_by}" if campaign.created_by else ""
    return f"{campaign.created_at:%Y-%m-%d %H:%M} UTC{by}"


def _used(campaign: CampaignDetail) -> str:
    return f"{duration(campaign.wall_time_s)}, {campaign.node_seconds / 3600:.3g} node-hours"


def _cost(cost: CostRead) -> str:
    """Node-hours by what they were spent on, with their shares."""
    if not cost.total:
        return "none yet"
    parts = (
        ("iterations", cost.iterations),
        ("start", cost.start),
        ("idle", cost.idle),
        ("lost", cost.lost),
    )
    shares = ", ".join(f"{name} {part / cost.total:.1%}" for name, part in parts)
    return f"{cost.total / 3600:.3g} node-hours held: {shares}"
