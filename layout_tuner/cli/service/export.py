"""`layout-tuner export`: a campaign's layout as the files of a training job; the formats."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from layout_tuner.api.schemas.campaigns_and_trials import ExportFormatPage, ExportFormatRead
from layout_tuner.cli.options.command_options import json_option
from layout_tuner.cli.options.prediction_options import (
    FILE,
    calibrate_from_option,
)
from layout_tuner.cli.options.refusals import writing
from layout_tuner.cli.options.software_option import software_option
from layout_tuner.cli.service.service_connection import print_json, service_when_called
from layout_tuner.search_spaces.layouts.layout import KNOBS
from layout_tuner.terminal.text_table import print_table
from layout_tuner.trainers.exports.export import FORMATS
from layout_tuner.trainers.exports.export_source import PREDICTED
from layout_tuner.trainers.exports.exported import ExportFileRead, ExportRead
from layout_tuner.trainers.registry import ALIASES

if TYPE_CHECKING:
    from layout_tuner.client.clients import Client


@click.command()
@click.argument("campaign", required=False)
@click.option(
    "--format",
    "format_name",
    metavar="FORMAT",
    type=click.Choice((*FORMATS, *ALIASES)),
    help=f"What trains: {', '.join(FORMATS)}; --list shows what each needs.",
)
@click.option("--trial", type=click.IntRange(min=1), help="Number of the trial; default: the best.")
@click.option(
    "--plan",
    "plan_file",
    type=FILE,
    help="Campaign file: export a layout of its plan instead, predicted and not measured.",
)
@click.option(
    "--rank", type=click.IntRange(1, 1000), help="With --plan: rank of the layout; default: 1."
)
@click.option("--model", help="With --layout: a preset, or a file.")
@click.option(
    "--cluster",
    help="With --plan: a preset, a cluster of the service or a file, for the campaign's. With "
    "--layout: what it would run on.",
)
@software_option("the trainer that the campaign names, else that of the format")
@calibrate_from_option
@click.option("--layout", "layout_key", metavar="KEY", help="Export any layout by its key instead.")
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    help="Nodes to scale the layout to, with the same global batch; default: as measured.",
)
@click.option(
    "--without",
    multiple=True,
    metavar="KNOB",
    type=click.Choice(tuple(KNOBS)),
    help="Drop a knob of the layout that the trainer lacks; repeatable.",
)
@click.option("--list", "lists_formats", is_flag=True, help="List the formats instead.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Folder to write to; created if need be.  [default: here]",
)
@click.option("--force", is_flag=True, help="Overwrite files that are there.")
@json_option
@service_when_called
def export(
    campaign: str | None,
    format_name: str | None,
    trial: int | None,
    plan_file: Path | None,
    rank: int | None,
    model: str | None,
    cluster: str | None,
    software: str | None,
    calibrate_from: tuple[str, ...],
    layout_key: str | None,
    nodes: int | None,
    without: tuple[str, ...],
    lists_formats: bool,
    out: Path,
    force: bool,
    as_json: bool,
    service: Callable[[], Client],
) -> None:
    """Write a training job's files for a campaign's best trial, or another.

    --plan FILE takes a layout of the plan that `plan FILE` prints with the same options, and
    --model, --cluster and --layout take any layout. Both need no service. They are predicted for
    --software, else for the trainer that the campaign's probes name, else for the trainer of the
    format; the files say at their top for which, and that nothing was measured.

    With --json the files are printed in one JSON document, and none is written. --list prints a
    table of the formats, and what each needs to run; it takes no CAMPAIGN.
    """
    if lists_formats:
        _list_formats(as_json)
        return
    predicted = (plan_file, rank, model, layout_key, cluster, software, calibrate_from or None)
    _refuse_mixed(campaign, (trial, nodes), predicted)
    if format_name is None:
        raise click.UsageError("--format is missing; --list shows the formats")
    if campaign is not None:
        bundle = service().export(campaign, format_name, trial=trial, nodes=nodes, without=without)
        what = f"trial {bundle.trial} of {campaign}"
    else:
        from layout_tuner.cli.service import predicted_export

        data_dir = click.get_current_context().params["data_dir"]
        kept: dict[str, Any] = {
            "cluster": cluster,
            "software": software,
            "calibrate_from": calibrate_from,
            "data_dir": data_dir,
            "without": without,
        }
        if plan_file is not None:
            bundle, ran_by = predicted_export.of_plan(plan_file, rank or 1, format_name, **kept)
            what = f"rank {rank or 1} of the plan of {plan_file}"
        else:
            bundle, ran_by = predicted_export.of_layout(
                str(model), str(layout_key), format_name, **kept
            )
            what = str(layout_key)
        what += f" for {ran_by}, {PREDICTED}"
    if as_json:
        print_json(bundle)
        return
    with writing(out, "written to"):
        _write(bundle, out, force)
    click.echo(f"{what}, as {bundle.format} ({bundle.target_version}):")
    for file in bundle.files:
        click.echo(f"  {out / file.name}")
    for command in bundle.commands:
        click.echo(f"run it {command.when}: {_command_line(command.words, bundle, out)}")
    for note in bundle.notes:
        click.echo(f"note: {note}")


def _refuse_mixed(
    campaign: str | None, of_campaign: Sequence[object], predicted: Sequence[object]
) -> None:
    """Refuses anything but one of: a campaign, a plan's file, a layout on a cluster."""
    plan_file, rank, model, layout_key, cluster, *_ = predicted
    of_layout = (model, layout_key)
    if campaign is not None and any(each is not None for each in predicted):
        raise click.UsageError(
            "name a CAMPAIGN, or --plan, or --layout: only one of them; --cluster, --software and "
            "--calibrate-from are for the last two"
        )
    if campaign is None and any(each is not None for each in of_campaign):
        raise click.UsageError("--trial and --nodes are for a CAMPAIGN")
    if plan_file is not None and any(each is not None for each in of_layout):
        raise click.UsageError("--plan has a model and layouts of its own")
    if rank is not None and plan_file is None:
        raise click.UsageError("--rank is for --plan")
    if campaign is None and plan_file is None and None in (*of_layout, cluster):
        missing = (
            "--layout needs --model and --cluster too"
            if any((*of_layout, cluster))
            else "CAMPAIGN is missing"
        )
        raise click.UsageError(f"{missing}; --list shows the formats")


def _list_formats(as_json: bool) -> None:
    page = ExportFormatPage(
        formats=[ExportFormatRead.of(form.adapter) for form in FORMATS.values()]
    )
    if as_json:
        print_json(page)
        return
    rows = [(each.name, each.target_version, each.needs) for each in page.formats]
    print_table(("format", "written for", "needs"), rows)


def _command_line(words: list[str], bundle: ExportRead, out: Path) -> str:
    """A command for the current directory, with paths of files, quoted for a shell."""
    paths = {file.name: str(out / file.name) for file in bundle.files}
    # A path that begins with a dash would be read as an option.
    paths = {name: f"./{path}" if path.startswith("-") else path for name, path in paths.items()}
    return shlex.join(paths.get(word, word) for word in words)


def _write(bundle: ExportRead, out: Path, force: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    targets = [(_target(out, file), file) for file in bundle.files]
    taken = [target for target, _file in targets if os.path.lexists(target)]
    if taken and not force:
        raise click.ClickException(f"{taken[0]} exists; choose another --out, or --force")
    with TemporaryDirectory(dir=out) as folder:
        for target, file in targets:
            written = Path(folder) / file.name
            written.write_text(file.content, encoding="utf-8")
            written.chmod(0o755 if file.executable else 0o644)
            written.replace(target)  # a link that is there is replaced, not followed


def _target(out: Path, file: ExportFileRead) -> Path:
    """The path of a file. A name that would leave the folder is refused."""
    plain = Path(file.name).name == file.name and file.name.isprintable()
    if not plain or file.name in ("", ".", ".."):
        raise click.ClickException(f"the service sent the file name {file.name!r}; nothing written")
    return out / file.name
