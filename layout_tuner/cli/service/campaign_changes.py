"""`layout-tuner campaign submit`, `import`, `update`, `clone`, `delete`."""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import click

from layout_tuner.api.formatting import budget_words, seen_by
from layout_tuner.cli.live_output import work_line
from layout_tuner.cli.options.command_options import json_option, together
from layout_tuner.cli.options.prediction_options import (
    FILE,
    campaign_cluster_option,
    cells_option,
    declared_knobs,
    knob_columns_option,
    knobs_file_option,
)
from layout_tuner.cli.options.refusals import fail, refuse
from layout_tuner.cli.service.campaign import precision_words
from layout_tuner.cli.service.service_connection import (
    answers,
    print_json,
    service_options,
    service_when_called,
)
from layout_tuner.documents.json_and_yaml import described, read_file, read_yaml
from layout_tuner.documents.reading import read_mapping, why_unreadable
from layout_tuner.errors import CampaignInvalidError, DocumentMalformedError
from layout_tuner.results_db.records import ENDED_CAMPAIGN_STATES, MAX_PRIORITY, VISIBILITIES
from layout_tuner.search_spaces.clusters.site import cluster_part
from layout_tuner.terminal.console import on_interrupt, terminal_width
from layout_tuner.terminal.plurals import counted

if TYPE_CHECKING:
    from layout_tuner.api.schemas.campaigns_and_trials import CampaignDetail, ImportRead
    from layout_tuner.client.campaigns import SharingOptions
    from layout_tuner.client.clients import Client
    from layout_tuner.predictions.belief.plan import Plan  # it imports numpy

DELETE_PATIENCE_S: Final = 180.0
"""Longest wait for workers to stop a cancelled campaign's trials; leases expire before."""
POLL_S: Final = 0.5

_BOUNDS: Final = ("trials", "node_hours", "wall_time")


budget_options: Final = together(
    click.option("--trials", type=click.IntRange(min=1), help="Trials that end, at most."),
    click.option(
        "--node-hours",
        type=click.FloatRange(min=0, min_open=True),
        help="Nodes times hours that probes hold, at most.",
    ),
    click.option("--wall-time", metavar="TIME", help="Time of search, at most: 90s, 10m, 2h."),
)


sharing_options: Final = together(
    click.option(
        "--visibility",
        type=click.Choice(VISIBILITIES),
        help="Who sees it: its owner alone, its group too, or everyone.",
    ),
    click.option("--group", metavar="NAME", help="The group that its node-hours count for."),
    click.option(
        "--priority",
        type=click.IntRange(-MAX_PRIORITY, MAX_PRIORITY),
        help="Of an owner's campaigns, those of a higher priority get devices first.",
    ),
)


def _sharing(options: dict[str, Any]) -> SharingOptions:
    """Takes the options of `sharing_options` out of a command's; those that were given."""
    taken = {name: options.pop(name) for name in ("visibility", "group", "priority")}
    return cast("SharingOptions", {k: v for k, v in taken.items() if v is not None})


@click.command()
@click.argument("file", type=FILE)
@campaign_cluster_option
@sharing_options
@click.option("--dry-run", is_flag=True, help="Print the service's plan of it, and submit nothing.")
@json_option
@service_when_called
def submit(
    file: Path,
    cluster: str | None,
    dry_run: bool,
    as_json: bool,
    service: Callable[[], Client],
    **shared: Any,
) -> None:
    """Submit the campaign in FILE (YAML, or JSON where its name ends in .json).

    The service plans with the measurements that its database holds, and for the trainer of the
    campaign's probes; `layout-tuner plan` has --calibrate-from and --software.
    """
    from layout_tuner.search_spaces.models.model_files import with_model

    document = with_model(read_file(file), file.parent)
    document = read_mapping(document, CampaignInvalidError, "the campaign")
    if cluster is not None:
        document["cluster"] = cluster_part(described(cluster))
    client = service()
    if not dry_run:
        submitted = client.create_campaign(document, **_sharing(shared))
        (print_json if as_json else print_submitted)(submitted)
        return
    from layout_tuner.predictions.belief.plan_text import plan_lines

    plan = _planned(client, document)
    if as_json:
        click.echo(json.dumps(asdict(plan), indent=2))
        return
    for line in plan_lines(plan, terminal_width(sys.stdout)):
        click.echo(line)


def _planned(client: Client, document: dict[str, Any]) -> Plan:
    """The service's plan; one that the driver makes is waited for."""
    from layout_tuner.predictions.belief.plan import Plan

    planned = client.plan(document)
    if isinstance(planned, Plan):
        return planned
    with work_line(sys.stderr, ticks=True) as line:
        line.say(f"the driver makes plan {planned.id}")
        while planned.state == "WAITING":
            time.sleep(POLL_S)
            planned = client.planned(planned.id)
    if planned.plan is None:
        refuse(planned.problem)
    return planned.plan


@click.command("import")
@click.argument("table", type=FILE)
@click.option("--name", help="Name of the campaign; several are numbered after it.")
@cells_option
@knob_columns_option
@knobs_file_option
@sharing_options
@answers(lambda imported: _print_imported(imported))
@service_options
def import_table(
    table: Path,
    name: str | None,
    cells: tuple[str, ...],
    knob_columns: tuple[str, ...],
    knobs_file: Path | None,
    client: Client,
    **shared: Any,
) -> ImportRead:
    """Import the measurement table TABLE (CSV): every cell becomes a campaign that has ended.

    Its trials are ranked and listed like others; `start_from: [NAME]` lets a campaign start from
    them. If a row is refused, the message names it, and nothing is imported.

    With --knob, the values of a column are settings of the rows' jobs: a campaign that starts from
    them learns what the knob does.
    """
    declared = None if knobs_file is None else declared_knobs(knobs_file)
    try:
        content = table.read_bytes()
    except OSError as error:
        refuse(f"{table}: cannot be read: {error.strerror}")
    with work_line(sys.stderr, ticks=True) as line:
        line.say(f"importing {table.name} ({len(content) / 1e6:.1f} MB)")
        sharing = _sharing(shared)
        return client.import_table(
            content, name=name, cells=cells, knobs=knob_columns, declarations=declared, **sharing
        )


def _print_imported(imported: ImportRead) -> None:
    for each in imported.campaigns:
        click.echo(f"campaign {each.name} imported: {each.message}")
    for note in imported.notes:
        click.echo(f"note: {note}", err=True)


@click.command()
@click.argument("name")
@budget_options
@click.option("--no-trials", is_flag=True, help="Remove this bound.")
@click.option("--no-node-hours", is_flag=True, help="Remove this bound.")
@click.option("--no-wall-time", is_flag=True, help="Remove this bound.")
@click.option("--notes", help="New notes, instead of the old ones.")
@click.option("--notes-file", type=FILE, help="File with the new notes.")
@sharing_options
@answers(
    lambda changed: click.echo(
        f"campaign {changed.name}: {budget_words(changed.stored.budget)}, seen by {seen_by(changed.visibility, changed.group)}"
    )
)
@service_options
def update(
    name: str, notes: str | None, notes_file: Path | None, client: Client, **bounds: Any
) -> CampaignDetail:
    """Change the budget of a campaign that has not ended, its notes and who sees it.

    Bounds that are not named stay. The driver applies changes at once. A campaign that has ended
    is not reopened: clone it.
    """
    if notes is not None and notes_file is not None:
        raise click.UsageError("--notes and --notes-file exclude each other")
    if notes_file is not None:
        notes = _read_text(notes_file)
    sharing, budget = _sharing(bounds), _changed_bounds(bounds)
    if not budget and notes is None and not sharing:
        raise click.UsageError("nothing is to be changed: name a bound, --notes or --visibility")
    return client.update_campaign(name, budget=budget or None, notes=notes, **sharing)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        refuse(f"{file}: cannot be read: {why_unreadable(error)}")


def _changed_bounds(bounds: Mapping[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for bound in _BOUNDS:
        if bounds[bound] is not None and bounds[f"no_{bound}"]:
            flag = bound.replace("_", "-")
            raise click.UsageError(f"--{flag} and --no-{flag} exclude each other")
        if bounds[bound] is not None or bounds[f"no_{bound}"]:
            changed[bound] = bounds[bound]
    return changed


def print_submitted(campaign: CampaignDetail) -> None:
    """Prints a campaign that `submit` or `clone` made, and its warnings."""
    click.echo(
        f"campaign {campaign.name} submitted: {counted(campaign.num_legal_layouts, campaign.stored.counted_noun)}, "
        f"precision {precision_words(campaign)}, {budget_words(campaign.stored.budget)}"
    )
    if campaign.baseline is not None:
        where = " (outside of the space)" if campaign.baseline.outside_space else ""
        click.echo(f"baseline, measured first: {campaign.baseline.layout_key}{where}")
    for warning in campaign.warnings:
        click.echo(f"warning: {warning}", err=True)


@click.command()
@click.argument("campaign")
@click.option("--name", help="Name of the clone; by default the first of NAME-2, NAME-3, ... free.")
@budget_options
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="A field of the campaign's file, as strategy=deephyper or space.tp='[1, 2]'; may be repeated.",
)
@sharing_options
@answers(print_submitted)
@service_options
def clone(
    campaign: str, name: str | None, settings: tuple[str, ...], client: Client, **bounds: Any
) -> CampaignDetail:
    """Submit a campaign like CAMPAIGN, but for what is named here.

    It is a campaign of its own, and starts from what the first one measured unless its file says
    `knowledge: none`. Those who see the first one see it, unless --visibility says otherwise.
    """
    sharing = _sharing(bounds)
    changes: dict[str, Any] = {} if name is None else {"name": name}
    budget = {bound: value for bound, value in bounds.items() if value is not None}
    if settings or budget:
        original = client.campaign(campaign)
        changes |= _changed_fields(original.spec, settings)
        if budget:
            before = asdict(original.stored.budget)
            changes["budget"] = _other_budget(changes.get("budget", before), budget)
    return client.clone_campaign(campaign, changes, **sharing)


def _other_budget(budget: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(budget, Mapping | None):
        raise click.UsageError("--set budget: give its fields, as budget.trials=40")
    kept = dict(budget or {})
    if "wall_time" in changes:
        kept.pop("wall_time_s", None)
    return {**kept, **changes}


def _changed_fields(spec: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The complete fields of the document in which a setting changes something."""
    changed: dict[str, Any] = {}
    for setting in settings:
        path, equals, written = setting.partition("=")
        top, *inner = path.split(".")
        if not equals or not all((top, *inner)):
            raise click.UsageError(
                f"--set {setting}: write it as FIELD=VALUE, as space.tp='[1, 2]'"
            )
        try:
            value = read_yaml(written.encode())
        except DocumentMalformedError as error:
            raise click.UsageError(f"--set {setting}: {error}") from error
        if not inner:
            changed[top] = value
            continue
        changed.setdefault(top, copy.deepcopy(spec.get(top, {})))
        _set_inside(changed[top], inner, value, setting)
    return changed


def _set_inside(field: Any, path: Sequence[str], value: Any, setting: str) -> None:
    *parents, last = path
    for parent in parents:
        field = field.get(parent) if isinstance(field, dict) else None
    if not isinstance(field, dict):
        raise click.UsageError(
            f"--set {setting}: the field has no fields of its own; set the whole field"
        )
    # A duration has two spellings: the stored document has the field NAME_s.
    field.pop(f"{last}_s", None)
    field[last] = value


@click.command()
@click.argument("name")
@click.option("--cancel", is_flag=True, help="Cancel it first where it has not ended.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@service_options
def delete(name: str, cancel: bool, yes: bool, client: Client) -> None:
    """Delete a campaign with its trials, measurements and logs, for good."""
    found = client.campaign(name)
    trials = sum(found.progress.trials.values())
    if not yes:
        click.confirm(
            f"delete campaign {found.name} ({found.state}) and its {counted(trials, 'trial')}?",
            abort=True,
        )
    if cancel and found.state not in ENDED_CAMPAIGN_STATES:
        client.cancel_campaign(name)
        with on_interrupt(
            f"waiting has ended: campaign {name} is cancelled, and not deleted; "
            f"`layout-tuner campaign delete {name}` deletes it"
        ):
            _wait_for_workers(client, name)
    client.delete_campaign(name)
    click.echo(f"campaign {found.name} deleted, with {counted(trials, 'trial')}")


def _wait_for_workers(client: Client, name: str) -> None:
    deadline = time.monotonic() + DELETE_PATIENCE_S
    while running := client.campaign(name).progress.trials["RUNNING"]:
        if time.monotonic() > deadline:
            fail(
                f"campaign {name} is cancelled, and workers have not stopped {running} of its trials "
                f"in {DELETE_PATIENCE_S:.0f} s; delete it once they have"
            )
        time.sleep(POLL_S)
