"""The room's subcommand: `layout-tuner db`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from results_db.database_option import database_option
from search_spaces.counting import counted

if TYPE_CHECKING:
    from results_db.integrity import Finding

# The rest of the room is imported where it is needed: `--help` answers at once.


@click.group()
def db() -> None:
    """Back up, restore, upgrade, check and prune the database."""


def _place_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --data-dir and --database: which database is meant."""
    data_dir = click.option(
        "--data-dir",
        type=click.Path(file_okay=False, path_type=Path),
        envvar="LAYOUT_TUNER_DATA_DIR",
        help="Where the service keeps its database.  [default: ~/.local/share/layout-tuner]",
    )
    return data_dir(database_option(function))


_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@contextmanager
def _refusals_as_messages() -> Iterator[None]:
    from results_db.errors import ResultsDbError

    try:
        yield
    except ResultsDbError as error:
        raise click.ClickException(str(error)) from error


def _url(data_dir: Path | None, database: str | None) -> str:
    """The URL of the database that the options name; one that is there."""
    from results_db.data_dir import DataDir
    from results_db.database_url import postgresql_url

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
    from results_db.database_url import shown

    return shown(url)


@db.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace FILE where it is there.")
@_place_options
def backup(file: Path, force: bool, data_dir: Path | None, database: str | None) -> None:
    """Write the database into FILE, as it is at one moment; the service may go on meanwhile.

    FILE is a SQLite database, whatever it was made of, and `restore` puts it into either kind. It is checked
    before it gets its name, and only you can read it.
    """
    from results_db.backup import back_up

    with _refusals_as_messages():
        report = back_up(_url(data_dir, database), file, replace=force)
    click.echo(
        f"{report.path}: {counted(report.num_campaigns, 'campaign')}, "
        f"{counted(report.num_trials, 'trial')}, "
        f"{report.num_bytes / 1e6:.1f} MB, schema {report.revision}; checked"
    )


@db.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Also where the database holds something.")
@_place_options
def restore(file: Path, force: bool, data_dir: Path | None, database: str | None) -> None:
    """Put the backup in FILE in the place of the database, upgraded to this version.

    Services and drivers must be stopped. A SQLite database that was there is kept under another name; the
    tables of a PostgreSQL are replaced in one transaction.
    """
    from results_db.data_dir import DataDir
    from results_db.restore import restore_into_data_dir, restore_into_postgresql

    with _refusals_as_messages():
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
    _warn_of(report.findings)


@db.command()
@_place_options
def upgrade(data_dir: Path | None, database: str | None) -> None:
    """Bring the database to this version's schema; a service does the same when it starts."""
    from results_db import migrate

    with _refusals_as_messages():
        url = _url(data_dir, database)
        before = migrate.revision(url)
        migrate.upgrade(url)
        after = migrate.check(url)
    if before == after:
        click.echo(f"{_shown(url)}: schema {after}, which is this version's")
    else:
        click.echo(f"{_shown(url)}: schema {before or 'none'} before, {after} now")


@db.command()
@click.option("--repair", is_flag=True, help="Make standings anew that are not what was measured.")
@_json_option
@_place_options
def check(repair: bool, as_json: bool, data_dir: Path | None, database: str | None) -> None:
    """Look whether the database is whole: its pages, its references, and what always holds between rows.

    Changes nothing without --repair; the service may run. Exit code 1 where something is wrong, and was not
    put right.
    """
    from results_db.integrity import check_database

    with _refusals_as_messages():
        url = _url(data_dir, database)
        report = check_database(url, repair=repair)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        for finding in report.findings:
            click.echo(f"{finding.check}: {finding.message}")
        number = len(report.findings)
        verdict = (
            "whole"
            if not number
            else f"{number} {'thing is' if number == 1 else 'things are'} wrong"
        )
        click.echo(
            f"{_shown(url)}: {verdict}; schema {report.revision}, {len(report.checks)} checks"
        )
    if not all(finding.is_mended for finding in report.findings):
        raise click.exceptions.Exit(1)


@db.command()
@click.option(
    "--keep",
    "settings",
    multiple=True,
    envvar="LAYOUT_TUNER_KEEP",
    show_envvar=True,
    metavar="KIND=DAYS",
    help="Days for which logs, iterations, events, audit or requests are kept; KIND=forever keeps all. "
    "[default: events=30 requests=7, all else for ever]",
)
@_place_options
def prune(settings: tuple[str, ...], data_dir: Path | None, database: str | None) -> None:
    """Let go of what is older than it is to be kept; the service may run, and does the same every hour.

    Campaigns, trials and measurements always stay. The space is used again; the file does not shrink.
    """
    from results_db.retention import KINDS, Retention
    from results_db.store import Store

    with _refusals_as_messages():
        retention = Retention.read(settings)
        url = _url(data_dir, database)
        _refuse_other_schema(url)
        with closing(Store(url)) as store:
            pruned = store.prune(retention)
    for kind in KINDS:
        days = getattr(retention, kind)
        kept = (
            "kept for ever"
            if days is None
            else f"older than {days:g} {'day' if days == 1 else 'days'}: {getattr(pruned, kind)} gone"
        )
        click.echo(f"{kind:<12}{kept}")


def _refuse_other_schema(url: str) -> None:
    from results_db import migrate

    migrate.check(url)


def _warn_of(findings: tuple[Finding, ...]) -> None:
    for finding in findings:
        click.echo(f"warning: {finding.check}: {finding.message}", err=True)
