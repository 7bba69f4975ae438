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
from layout_tuner.cli.options.prediction_options import FILE, calibrate_from_option
from layout_tuner.cli.options.refusals import writing
from layout_tuner.cli.options.shared_options import seq_length_option
from layout_tuner.cli.options.software_option import software_option
from layout_tuner.cli.service.service_connection import print_json, service_when_called
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
@click.option("--model", help="With --layout: a preset, or a file, also a config.json.")
@seq_length_option
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
    help="Drop a knob of the layout or the job that the trainer lacks; repeatable.",
)
@click.option(
    "--into",
    type=FILE,
    help="Launch script or configuration of yours: write a copy of it with the layout instead.",
)
@click.option("--job", "job_name", default="", help="With --into: which job, of several.")
@click.option(
    "--set",
    "stated",
    multiple=True,
    metavar="FIELD=VALUE",
    help="With --into: what a field of the file is, where it is not understood; repeatable.",
)
@click.option("--list", "lists_formats", is_flag=True, help="List the formats instead.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to write to; created if need be.  [default: here; with --into beside the file]",
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
    seq_length: int | None,
    cluster: str | None,
    software: str | None,
    calibrate_from: tuple[str, ...],
    layout_key: str | None,
    nodes: int | None,
    without: tuple[str, ...],
    into: Path | None,
    job_name: str,
    stated: tuple[str, ...],
    lists_formats: bool,
    out: Path | None,
    force: bool,
    as_json: bool,
    service: Callable[[], Client],
) -> None:
    """Write a training job's files for a campaign's best trial, or another.

    --plan FILE takes a layout of the plan that `plan FILE` prints with the same options, and
    --model, --cluster and --layout take any layout. Both need no service. They are predicted for
    --software, else for the trainer that the campaign's probes name, else for the trainer of the
    format; the files say at their top for which, and that nothing was measured.

    --into FILE writes the layout into a copy of your own file, with its format: the options of the
    layout change, and all others stay. It prints the difference. The copy is FILE-tuned, or has the
    name of FILE in --out.

    With --json the files are printed in one JSON document, and none is written. --list prints a
    table of the formats, and what each needs to run; it takes no CAMPAIGN.
    """
    if lists_formats:
        _list_formats(as_json)
        return
    predicted = (
        plan_file,
        rank,
        model,
        layout_key,
        cluster,
        seq_length,
        software,
        calibrate_from or None,
    )
    _refuse_mixed(campaign, (trial, nodes), predicted)
    predicted_as = {
        "plan_file": plan_file,
        "rank": rank or 1,
        "model": model,
        "layout_key": layout_key,
        "seq_length": seq_length,
        "cluster": cluster,
        "software": software,
        "calibrate_from": calibrate_from,
        "data_dir": click.get_current_context().params["data_dir"],
        "without": without,
    }

    def exported(trainer: str, written_as: str = "") -> tuple[ExportRead, str]:
        """The job for a trainer, in its format or in another one, and a phrase that names it."""
        if campaign is None:
            return _predicted(trainer, written_as=written_as, **predicted_as)
        asked: dict[str, Any] = {"trial": trial, "nodes": nodes, "without": without}
        found = service().export(campaign, written_as or trainer, **asked)
        return found, f"trial {found.trial} of {campaign}"

    _refuse_mixed_with_into(into, (format_name, without, as_json), (job_name, stated))
    if into is not None:
        from layout_tuner.cli.service import export_into

        export_into.write_into(
            into, exported, job_name=job_name, stated=stated, out=out, force=force
        )
        return
    if format_name is None:
        raise click.UsageError("--format is missing; --list shows the formats")
    bundle, what = exported(format_name)
    out = out or Path()
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


def _refuse_mixed_with_into(
    into: Path | None, of_format: Sequence[object], of_into: Sequence[object]
) -> None:
    if into is not None and any(of_format):
        raise click.UsageError(
            "--into has the format of its file: leave --format, --without and --json out"
        )
    if into is None and any(of_into):
        raise click.UsageError("--job and --set are for --into")


def _predicted(
    trainer: str,
    *,
    plan_file: Path | None,
    rank: int,
    model: str,
    layout_key: str,
    seq_length: int | None,
    **options: Any,
) -> tuple[ExportRead, str]:
    """A layout of a plan, or any other, predicted for a trainer; and a phrase that names it."""
    from layout_tuner.cli.service import predicted_export

    if plan_file is not None:
        found, ran_by = predicted_export.of_plan(plan_file, rank, trainer, **options)
        what = f"rank {rank} of the plan of {plan_file}"
    else:
        found, ran_by = predicted_export.of_layout(
            model, layout_key, trainer, seq_length=seq_length, **options
        )
        what = layout_key
    return found, f"{what} for {ran_by}, {PREDICTED}"


def _refuse_mixed(
    campaign: str | None, of_campaign: Sequence[object], predicted: Sequence[object]
) -> None:
    """Refuses anything but one of: a campaign, a plan's file, a layout on a cluster."""
    plan_file, rank, model, layout_key, cluster, seq_length, *_ = predicted
    of_layout = (model, layout_key)
    if campaign is not None and any(each is not None for each in predicted):
        raise click.UsageError(
            "name a CAMPAIGN, or --plan, or --layout: only one of them; --cluster, --software and "
            "--calibrate-from are for the last two"
        )
    if campaign is None and any(each is not None for each in of_campaign):
        raise click.UsageError("--trial and --nodes are for a CAMPAIGN")
    if plan_file is not None and any(each is not None for each in (*of_layout, seq_length)):
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
