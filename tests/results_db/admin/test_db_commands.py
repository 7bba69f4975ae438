"""`layout-tuner db`: what operators type, and what they are told."""

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from benchmarks.service.postgres_server import PostgresServer
from results_db.admin.commands import db
from tests.results_db.first_weeks import write_first_weeks
from tests.results_db.next_version import NEXT, THIS, become_next_version


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner(env={"LAYOUT_TUNER_DATABASE_URL": None, **environment}).invoke(db, arguments)


@pytest.fixture
def place(tmp_path: Path) -> tuple[str, str]:
    """The options of a data directory whose database holds a group's first weeks."""
    folder = tmp_path / "data"
    folder.mkdir()
    write_first_weeks(folder / "results.sqlite3")
    return "--data-dir", str(folder)


def test_an_operator_upgrades_and_restores(
    place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become_next_version(monkeypatch)
    backup = str(tmp_path / "backup.sqlite3")
    made = run("backup", backup, *place)
    assert made.exit_code == 0
    assert made.output.startswith(
        f"{backup}: 7 campaigns, 35 trials, 0.4 MB, schema {THIS}; checked"
    )
    outdated = run("check", *place)
    assert outdated.exit_code == 1
    assert "upgrade it with `layout-tuner db upgrade`" in outdated.output
    assert f"schema {THIS} before, {NEXT} now" in run("upgrade", *place).output
    assert "which is this version's" in run("upgrade", *place).output
    assert f"whole; schema {NEXT}" in run("check", *place).output
    refused = run("restore", backup, *place)
    assert (refused.exit_code, "--force sets it aside" in refused.output) == (1, True)
    restored = run("restore", backup, *place, "--force")
    assert restored.exit_code == 0
    assert "what was there is kept as" in restored.output


def test_a_service_moves_from_sqlite_to_postgresql(
    place: tuple[str, str], empty_postgres_url: str, tmp_path: Path
) -> None:
    backup = str(tmp_path / "backup.sqlite3")
    run("backup", backup, *place)
    target = ("--database", empty_postgres_url)
    assert "7 campaigns and 35 trials" in run("restore", backup, *target).output
    checked = run("check", "--json", LAYOUT_TUNER_DATABASE_URL=empty_postgres_url)
    report = json.loads(checked.output)
    assert (checked.exit_code, report["revision"], report["findings"]) == (0, THIS, [])


def test_what_is_wrong_is_listed_and_the_exit_code_says_so(place: tuple[str, str]) -> None:
    with closing(sqlite3.connect(Path(place[1]) / "results.sqlite3")) as connection, connection:
        connection.execute("UPDATE campaigns SET idle_node_seconds = 3 WHERE id = 1")
    found = run("check", *place)
    assert found.exit_code == 1
    assert (
        "campaign-costs: campaigns whose cost is not that of their trials, 1 of them: 1"
        in found.output
    )
    assert "1 thing is wrong" in found.output


def test_what_is_old_goes_when_options_or_the_environment_say_so(place: tuple[str, str]) -> None:
    pruned = run("prune", *place, LAYOUT_TUNER_KEEP="logs=1 iterations=1")
    assert pruned.exit_code == 0
    lines = dict(line.split(maxsplit=1) for line in pruned.output.splitlines())
    assert lines["audit"] == "kept for ever"
    assert lines["logs"].startswith("older than 1 day: ")
    assert not lines["iterations"].endswith(" 0 gone")
    assert "older than 1 day: 0 gone" in run("prune", *place, "--keep", "logs=1").output
    assert run("prune", *place, "--keep", "logs=soon").exit_code == 1
    assert "whole" in run("check", *place).output


def test_a_folder_without_a_database_is_one_clear_error(tmp_path: Path) -> None:
    said = (
        f"Error: there is no database in {tmp_path}: name its folder with --data-dir, or a "
        "PostgreSQL with --database\n"
    )
    for command in ("check", "upgrade", "prune"):
        refused = run(command, "--data-dir", str(tmp_path))
        assert (refused.exit_code, refused.output) == (1, said)
    assert list(tmp_path.iterdir()) == []


def test_no_password_is_shown(postgres_server: PostgresServer, tmp_path: Path) -> None:
    url = postgres_server.url("postgres", user="nobody:hunter2")
    for command in (("check",), ("backup", str(tmp_path / "b")), ("upgrade",)):
        refused = run(*command, "--database", url)
        assert refused.exit_code == 1
        assert "hunter2" not in refused.output


@pytest.mark.slow
@pytest.mark.parametrize("module", ["results_db.admin.restore", "results_db.admin.integrity"])
def test_a_command_that_imports_little_knows_every_table(module: str) -> None:
    count = "len(__import__('results_db.models.base').models.base.Base.metadata.tables)"
    script = f"import {module}; print({count}); import results_db.store; print({count})"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    known, all_of_them = ran.stdout.split()
    assert known == all_of_them
