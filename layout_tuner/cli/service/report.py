"""`layout-tuner report`: a campaign's report as a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from layout_tuner.cli.options.job_options import job_options
from layout_tuner.cli.options.refusals import writing
from layout_tuner.cli.service.service_connection import service_options

if TYPE_CHECKING:
    from layout_tuner.client.clients import Client
    from layout_tuner.predictions.statistics.job_duration import TrainingJob


@click.command()
@click.argument("campaign")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Where it goes: a file, by default CAMPAIGN.html, or - for the output.",
)
@click.option("--force", is_flag=True, help="Overwrite the file.")
@job_options
@service_options
def report(
    campaign: str, out: Path | None, force: bool, job: TrainingJob | None, client: Client
) -> None:
    """Write a campaign's report: one HTML document to mail or print.

    It loads nothing and runs nothing. Of a campaign that still runs it shows what there is so far.
    With --tokens it has the days of the training job with each of the best layouts.
    """
    if out == Path("-"):
        click.echo(client.report(campaign, job=job), nl=False)
        return
    target = out or Path(f"{campaign}.html")
    if target.exists() and not force:
        raise click.ClickException(f"{target} exists; choose another --out, or --force")
    document = client.report(campaign, job=job)
    with writing(target):
        target.write_text(document, encoding="utf-8")
    click.echo(f"report of {campaign}: {target}")
