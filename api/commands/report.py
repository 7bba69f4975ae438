"""`layout-tuner report`: a campaign's report as a file."""

from __future__ import annotations

from pathlib import Path

import click

from api.client import Client
from api.commands.connection import service_options


@click.command()
@click.argument("campaign")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Where it goes: a file, by default CAMPAIGN.html, or - for the output.",
)
@click.option("--force", is_flag=True, help="Overwrite the file.")
@service_options
def report(campaign: str, out: Path | None, force: bool, client: Client) -> None:
    """Write a campaign's report: one HTML document to mail or print.

    It loads nothing and runs nothing. Of a campaign that still runs it shows what there is so far.
    """
    if out == Path("-"):
        click.echo(client.report(campaign), nl=False)
        return
    target = out or Path(f"{campaign}.html")
    if target.exists() and not force:
        raise click.ClickException(f"{target} exists; choose another --out, or --force")
    document = client.report(campaign)
    try:
        target.write_text(document, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{target} cannot be written: {error.strerror}") from error
    click.echo(f"report of {campaign}: {target}")
