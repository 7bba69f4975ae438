"""The command `layout-tuner db`."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import closing
from pathlib import Path

import click

from layout_tuner.cli.live_output import work_line
from layout_tuner.cli.options.command_options import json_option
from layout_tuner.cli.options.database_options import database_place_options, keep_option
from layout_tuner.cli.options.refusals import refusals
from layout_tuner.terminal.plurals import counted

# Other modules are imported where they are needed, so that `--help` is fast.


@click.group()
def db() -> None:
    """Back up, restore, upgrade, check and prune the database."""


def _url(data_dir: Path | None, database: str | None) -> str:
    """The URL of the existing database that the options name."""
    from layout_tuner.results_db.database.data_dir import DataDir
    from layout_tuner.results_db.database.url import postgresql_url

    if database is not None:
        return postgresql_url(database)
    found = DataDir(data_dir) if data_dir else DataDir.default()
    if not Path(found.database_url.removeprefix("sqlite:///")).exists():
        raise click.ClickException(
            f"there is no database in {found.path}: name its folder with --data-dir, or a PostgreSQL "
            "with --database"
        )
    return found.database_url


def _shown(url: str) -> str:
    from layout_tuner.results_db.database.url import shown

    return shown(url)


@db.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace FILE where it is there.")
@database_place_options
def backup(file: Path, force: bool, data_dir: Path | None, database: str | None) -> None:
    """Write the database into FILE, as it is at one moment; the service may go on meanwhile.

    FILE is a SQLite database, whatever it was made of, and `restore` puts it into either kind. It
    is checked before it gets its name, and only you can read it.
    """
    from layout_tuner.results_db.admin.backup_file import back_up

    with refusals(), work_line(sys.stderr, ticks=True) as line:
        report = back_up(_url(data_dir, database), file, replace=force, say=line.say)
    click.echo(
        f"{report.path}: {counted(report.num_campaigns, 'campaign')}, "
        f"{counted(report.num_trials, 'trial')}, "
        f"{report.num_bytes / 1e6:.1f} MB, schema {report.revision}; checked"
    )


@db.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Also where the database holds something.")
@database_place_options
def restore(file: Path, force: bool, data_dir: Path | None, database: str | None) -> None:
    """Replace the database by the backup in FILE, upgraded to this version.

    Services and drivers must be stopped. A SQLite database that was there is kept under another
    name; the tables of a PostgreSQL are replaced in one transaction.
    """
    from layout_tuner.results_db.admin.restore import restore_into_data_dir, restore_into_postgresql
    from layout_tuner.results_db.database.data_dir import DataDir

    with refusals():
        if database is not None:
            report = restore_into_postgresql(file, database, replace=force)
            place = _shown(database)
        else:
            found = DataDir(data_dir) if data_dir else DataDir.default()
            report = restore_into_data_dir(file, found, replace=force)
            place = str(found.path)
    click.echo(
        f"{place}: {counted(report.num_campaigns, 'campaign')} and "
        f"{counted(report.num_trials, 'trial')} of {file}, "
        f"whose schema was {report.revision}"
    )
    if report.set_aside is not None:
        click.echo(f"what was there is kept as {report.set_aside}")
    for finding in report.findings:
        click.echo(f"warning: {finding.check}: {finding.message}", err=True)


@db.command()
@database_place_options
def upgrade(data_dir: Path | None, database: str | None) -> None:
    """Upgrade the database to this version's schema; a service does the same when it starts."""
    from layout_tuner.results_db.database.wait_for_server import once_it_answers
    from layout_tuner.results_db.migrations import migrate

    with refusals():
        url = _url(data_dir, database)
        before = once_it_answers(lambda: migrate.revision(url))
        once_it_answers(lambda: migrate.upgrade(url))
        after = migrate.check(url)
    if before == after:
        click.echo(f"{_shown(url)}: schema {after}, which is this version's")
    else:
        click.echo(f"{_shown(url)}: schema {before or 'none'} before, {after} now")


@db.command()
@json_option
@database_place_options
def check(as_json: bool, data_dir: Path | None, database: str | None) -> None:
    """Check the database: its pages, schema and references, and the rules between rows.

    Changes nothing; the service may run. Exit code 1 if something is wrong.
    """
    from layout_tuner.results_db.admin.integrity import check_database

    with refusals():
        url = _url(data_dir, database)
        report = check_database(url)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        for finding in report.findings:
            click.echo(f"{finding.check}: {finding.message}")
        number = len(report.findings)
        verdict = f"{number} thing{' is' if number == 1 else 's are'} wrong" if number else "whole"
        click.echo(
            f"{_shown(url)}: {verdict}; schema {report.revision}, {len(report.checks)} checks, "
            f"storage by {report.storage}"
        )
    if report.findings:
        raise click.exceptions.Exit(1)


@db.command()
@keep_option
@database_place_options
def prune(keep: tuple[str, ...], data_dir: Path | None, database: str | None) -> None:
    """Delete rows that are older than their retention; the service does the same every hour.

    Campaigns, trials and measurements always stay. The space is used again; the file does not
    shrink.
    """
    from layout_tuner.results_db.migrations import migrate
    from layout_tuner.results_db.retention import KINDS, Retention
    from layout_tuner.results_db.store import Store

    with refusals():
        retention = Retention.read(keep)
        url = _url(data_dir, database)
        migrate.check(url)
        with closing(Store(url)) as store:
            pruned = store.retention.prune(retention)
    for kind in KINDS:
        days = getattr(retention, kind)
        kept = (
            "kept for ever"
            if days is None
            else f"older than {days:g} {'day' if days == 1 else 'days'}: {getattr(pruned, kind)} gone"
        )
        click.echo(f"{kind:<12}{kept}")
