"""What `db check` finds in schemas and rows, and what `layout-tuner db` tells operators."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import text

from benchmarks.service.postgres_server import PostgresServer
from layout_tuner.cli.processes.database import db
from layout_tuner.results_db.admin.integrity import CHECKS, RULES, check_database
from layout_tuner.results_db.database.database import Database
from layout_tuner.results_db.errors import (
    DatabaseUnavailableError,
    SchemaNewerError,
    SchemaOutdatedError,
)
from tests.kit.python_process import printed_by
from tests.results_db.database.test_constraints import fill
from tests.results_db.first_weeks import write_first_weeks
from tests.results_db.migrations.test_migrate import run
from tests.results_db.next_version import NEXT, THIS, become_next_version

OBJECTS = {
    "the index uq_tokens_name_live is missing: restore": ("DROP INDEX uq_tokens_name_live",),
    "the index foreign_one is not part of": ("CREATE INDEX foreign_one ON audit (at, id)",),
    "the index ix_audit_actor_id is not as": (
        "DROP INDEX ix_audit_actor_id",
        "CREATE INDEX ix_audit_actor_id ON audit (id, actor)",
    ),
    "the table plans is not as revision": ("ALTER TABLE plans ADD COLUMN more INTEGER",),
}
ON_SQLITE = {
    "the trigger trials_end_once is missing": ("DROP TRIGGER trials_end_once",),
    "the trigger foreign_one is not part of": (
        "CREATE TRIGGER foreign_one AFTER UPDATE ON trials BEGIN DELETE FROM iterations; END",
    ),
    "the view foreign_view is not part of": ("CREATE VIEW foreign_view AS SELECT * FROM trials",),
}
ON_POSTGRESQL = {
    "the trigger trials_end_once of trials is missing": ("DROP TRIGGER trials_end_once ON trials",),
    "the trigger foreign_one of trials is not part of": (
        "CREATE TRIGGER foreign_one BEFORE DELETE ON trials FOR EACH ROW "
        "EXECUTE FUNCTION trials_end_once()",
    ),
    "the trigger attempts_end_once of attempts is not as": (
        "ALTER TABLE attempts DISABLE TRIGGER attempts_end_once",
    ),
    "the trigger campaigns_end_once of campaigns is not as": (
        "CREATE OR REPLACE FUNCTION campaigns_end_once() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN RETURN NEW; END'",
    ),
    "the table audit is not as": ("ALTER TABLE audit DISABLE TRIGGER ALL",),
    "the table tokens is not as": (
        "CREATE RULE foreign_one AS ON INSERT TO tokens DO INSTEAD NOTHING",
    ),
    "the table workers is not as": ("ALTER TABLE workers DROP CONSTRAINT ck_workers_state",),
    "the table trials is not as": ("ALTER TABLE trials ALTER message DROP NOT NULL",),
    "the table campaigns is not as": (
        "ALTER TABLE campaigns DROP CONSTRAINT ck_campaigns_state, ADD CONSTRAINT "
        "ck_campaigns_state CHECK (state <> '') NOT VALID",
    ),
}


def messages(url: str) -> list[str]:
    return [
        finding.message for finding in check_database(url).findings if finding.check == "schema"
    ]


def test_other_objects_than_those_of_the_revision_are_found(database_url: str) -> None:
    changes = OBJECTS | (ON_SQLITE if database_url.startswith("sqlite") else ON_POSTGRESQL)
    for statements in changes.values():
        run(database_url, *statements)
    found = messages(database_url)
    assert len(found) == len(changes)
    for said in changes:
        assert any(message.startswith(said) for message in found), said


def test_objects_of_other_programs_in_a_postgresql_are_no_finding(postgres_url: str) -> None:
    run(
        postgres_url,
        "CREATE TABLE theirs (id integer PRIMARY KEY)",
        "CREATE VIEW best AS SELECT * FROM trials",
        "CREATE FUNCTION of_theirs() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
    )
    assert check_database(postgres_url).findings == ()


def test_a_check_leaves_nothing_behind(database_url: str) -> None:
    for _ in range(2):
        report = check_database(database_url)
        assert (report.findings, report.checks) == ((), CHECKS)
    if not database_url.startswith("sqlite"):
        run(database_url, "CREATE SCHEMA layout_tuner_expected")


def test_a_check_that_needs_a_missing_table_ends_with_that(sqlite_url: str) -> None:
    run(sqlite_url, "DROP TABLE breakdowns")
    report = check_database(sqlite_url)
    assert report.checks == ("storage", "schema")
    assert "the table breakdowns is missing: restore a backup" in messages(sqlite_url)


def test_without_rights_the_schema_is_not_compared(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    name = postgres_url.split("@/")[1].split("?")[0]
    run(
        postgres_url,
        "CREATE ROLE reader LOGIN",
        "GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader",
    )
    try:
        report = check_database(postgres_server.url(name, user="reader"))
    finally:
        run(postgres_url, "DROP OWNED BY reader", "DROP ROLE reader")
    (finding,) = report.findings
    assert finding.message.startswith("the schema was not compared with that of its revision")
    assert report.checks == CHECKS


def test_two_revisions_are_one_clear_error(database_url: str) -> None:
    run(database_url, "INSERT INTO alembic_version VALUES ('r000')")
    with pytest.raises(DatabaseUnavailableError, match=r"Multiple rows were found.*is damaged"):
        check_database(database_url)


@pytest.mark.parametrize("text", [b"\xff\xfe", b"ok\xc3"])
def test_a_text_that_is_not_utf8_is_a_finding(sqlite_url: str, text: bytes) -> None:
    statement = f"INSERT INTO trial_logs VALUES (7, CAST(x'{text.hex()}' AS TEXT))"
    run(sqlite_url, statement)
    folder = str(Path(sqlite_url.removeprefix("sqlite:///")).parent)
    asked = CliRunner().invoke(db, ["check", "--json", "--data-dir", folder])
    report: dict[str, Any] = json.loads(asked.output)
    assert asked.exit_code == 1
    assert "the table trial_logs is damaged (Could not decode" in report["findings"][0]["message"]


BROKEN = {
    "measured": (
        "DELETE FROM iterations",
        "DELETE FROM stage_memories",
        "DELETE FROM breakdowns",
        "DELETE FROM measurements",
    ),
    "measurement-of-no-result": (
        "UPDATE trials SET state = 'INFEASIBLE', reason = 'out_of_memory' WHERE id = 1",
    ),
    "running": ("UPDATE attempts SET ending = 'lost', ended_at = seen_at WHERE trial_id = 3",),
    "attempts-open": (
        "INSERT INTO attempts (trial_id, attempt, worker_id, started_at, seen_at, node_seconds) "
        "SELECT 4, 1, worker_id, started_at, seen_at, 0 FROM attempts WHERE trial_id = 3",
        "UPDATE trials SET attempt = 1 WHERE id = 4",
    ),
    "attempts-counted": ("UPDATE trials SET attempt = 7 WHERE id = 2",),
    "leases": ("UPDATE workers SET ended_at = seen_at",),
    "ended-campaigns": ("UPDATE trials SET campaign_id = 2 WHERE id = 4",),
    "counters": ("UPDATE trials SET number = 99 WHERE id = 4",),
    "repeats": ("UPDATE trials SET repeat_of = 2, repeat_index = 1 WHERE id = 4",),
    "cheap-probes": ("UPDATE trials SET full_dp = 4 WHERE id = 4",),
    "job-settings": ("UPDATE trials SET job = '{\"compile\": true}' WHERE id = 4",),
    "stages": ("INSERT INTO stage_memories (trial_id, stage, peak_memory_bytes) VALUES (1, 1, 5)",),
    "trial-costs": ("UPDATE trials SET lost_node_seconds = 3 WHERE id = 4",),
    "owners": ("UPDATE campaigns SET created_by = 'nobody' WHERE id = 1",),
    "groups": ("UPDATE campaigns SET visibility = 'group', group_name = 'gone' WHERE id = 1",),
    "campaign-costs": ("UPDATE campaigns SET idle_node_seconds = 3 WHERE id = 1",),
}
"""By rule: what breaks it, and what else that breaks."""

ALSO = {"ended-campaigns": {"counters"}, "trial-costs": {"campaign-costs"}}
"""Rules that the same statements break too."""


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    fill(database_url)
    with closing(Database(database_url)) as database:
        yield database


def damage(database: Database, *statements: str) -> None:
    """Runs statements without triggers and foreign keys, as a bug of the database would."""
    with database.engine.connect() as connection:
        is_sqlite = connection.dialect.name == "sqlite"
        connection.rollback()
        driver = connection.connection.driver_connection
        off = "PRAGMA foreign_keys = OFF" if is_sqlite else "SET session_replication_role = replica"
        driver.execute(off)
        query = text("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
        triggers = connection.execute(query).all() if is_sqlite else []
        for name, _ in triggers:
            connection.exec_driver_sql(f"DROP TRIGGER {name}")
        for statement in statements:
            connection.execute(text(statement))
        for _, definition in triggers:
            connection.exec_driver_sql(definition)
        connection.commit()
        connection.invalidate()  # its settings go with it


def test_a_broken_rule_is_found_with_the_rows_that_break_it(sqlite_url: str) -> None:
    assert set(BROKEN) == set(RULES), "every rule has a way to break it"
    fill(sqlite_url)
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    whole = path.read_bytes()
    for rule in RULES:
        path.write_bytes(whole)
        with closing(Database(sqlite_url)) as database:
            damage(database, *BROKEN[rule])
            with database.read() as session:
                rows = {name: session.execute(keys).all() for name, (_, keys) in RULES.items()}
        assert {name for name, found in rows.items() if found} == {rule} | ALSO.get(rule, set())
        assert len(rows[rule]) == 1


def test_whatever_is_broken_at_once_is_found(database: Database, database_url: str) -> None:
    # Where no measurement is left, none is out of place.
    rules = [rule for rule in RULES if rule != "measured"]
    for rule in rules:
        damage(database, *BROKEN[rule])
    findings = check_database(database_url).findings
    assert [finding.check for finding in findings] == rules
    for finding in findings:
        assert finding.message.startswith(
            f"{RULES[finding.check][0]}, {finding.num_rows} of them: "
        )


def test_orphaned_rows_are_found_and_counted(database: Database, database_url: str) -> None:
    orphans = ", ".join(f"(97, {stage}, 1)" for stage in range(6))
    damage(
        database,
        "DELETE FROM trials WHERE id = 2",
        f"INSERT INTO stage_memories (trial_id, stage, peak_memory_bytes) VALUES {orphans}",
    )
    messages = {
        finding.message: finding.num_rows
        for finding in check_database(database_url).findings
        if finding.check == "references"
    }
    assert "rows of attempts that refer to no row of trials, 1 of them: 2/1" in messages
    (shortened,) = (message for message in messages if message.endswith(", ..."))
    assert shortened.endswith(": 97/0, 97/1, 97/2, 97/3, 97/4, ...")
    assert messages[shortened] == 6


def test_another_schema_or_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.sqlite3"
    write_first_weeks(path)
    become_next_version(monkeypatch)
    with pytest.raises(SchemaOutdatedError, match=rf"{THIS}.*layout-tuner db upgrade"):
        check_database(f"sqlite:///{path}")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(SchemaNewerError, match="9999"):
        check_database(f"sqlite:///{path}")
    path.write_bytes(b"no database, but long enough to be taken for one. " * 100)
    with pytest.raises(DatabaseUnavailableError, match="not a database"):
        check_database(f"sqlite:///{path}")


def run_db(*arguments: str, **environment: str) -> Result:
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
    made = run_db("backup", backup, *place)
    assert made.exit_code == 0
    assert made.output.startswith(
        f"{backup}: 7 campaigns, 35 trials, 0.5 MB, schema {THIS}; checked"
    )
    outdated = run_db("check", *place)
    assert outdated.exit_code == 1
    assert "upgrade it with `layout-tuner db upgrade`" in outdated.output
    assert f"schema {THIS} before, {NEXT} now" in run_db("upgrade", *place).output
    assert "which is this version's" in run_db("upgrade", *place).output
    assert f"whole; schema {NEXT}" in run_db("check", *place).output
    refused = run_db("restore", backup, *place)
    assert (refused.exit_code, "--force sets it aside" in refused.output) == (1, True)
    restored = run_db("restore", backup, *place, "--force")
    assert restored.exit_code == 0
    assert "what was there is kept as" in restored.output


def test_a_service_moves_from_sqlite_to_postgresql(
    place: tuple[str, str], empty_postgres_url: str, tmp_path: Path
) -> None:
    backup = str(tmp_path / "backup.sqlite3")
    run_db("backup", backup, *place)
    target = ("--database", empty_postgres_url)
    assert "7 campaigns and 35 trials" in run_db("restore", backup, *target).output
    checked = run_db("check", "--json", LAYOUT_TUNER_DATABASE_URL=empty_postgres_url)
    report = json.loads(checked.output)
    assert (checked.exit_code, report["revision"], report["findings"]) == (0, THIS, [])


def test_what_is_wrong_is_listed_and_the_exit_code_says_so(place: tuple[str, str]) -> None:
    with closing(sqlite3.connect(Path(place[1]) / "results.sqlite3")) as connection, connection:
        connection.execute("UPDATE campaigns SET idle_node_seconds = 3 WHERE id = 1")
    found = run_db("check", *place)
    assert found.exit_code == 1
    assert (
        "campaign-costs: campaigns whose cost is not that of their trials, 1 of them: 1"
        in found.output
    )
    assert "1 thing is wrong" in found.output


def test_what_is_old_goes_when_options_or_the_environment_say_so(place: tuple[str, str]) -> None:
    pruned = run_db("prune", *place, LAYOUT_TUNER_KEEP="logs=1 iterations=1")
    assert pruned.exit_code == 0
    lines = dict(line.split(maxsplit=1) for line in pruned.output.splitlines())
    assert lines["audit"] == "kept for ever"
    assert lines["logs"].startswith("older than 1 day: ")
    assert not lines["iterations"].endswith(" 0 gone")
    assert "older than 1 day: 0 gone" in run_db("prune", *place, "--keep", "logs=1").output
    assert run_db("prune", *place, "--keep", "logs=soon").exit_code == 1
    assert "whole" in run_db("check", *place).output


def test_a_folder_without_a_database_is_one_clear_error(tmp_path: Path) -> None:
    said = (
        f"Error: there is no database in {tmp_path}: name its folder with --data-dir, or a "
        "PostgreSQL with --database\n"
    )
    for command in ("check", "upgrade", "prune"):
        refused = run_db(command, "--data-dir", str(tmp_path))
        assert (refused.exit_code, refused.output) == (1, said)
    assert list(tmp_path.iterdir()) == []


def test_no_password_is_shown(postgres_server: PostgresServer, tmp_path: Path) -> None:
    url = postgres_server.url("postgres", user="nobody:hunter2")
    for command in (("check",), ("backup", str(tmp_path / "b")), ("upgrade",)):
        refused = run_db(*command, "--database", url)
        assert refused.exit_code == 1
        assert "hunter2" not in refused.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["layout_tuner.results_db.admin.restore", "layout_tuner.results_db.admin.integrity"]
)
def test_a_command_that_imports_little_knows_every_table(module: str) -> None:
    base = "from layout_tuner.results_db.models.table_base import Base; "
    count = "print(len(Base.metadata.tables)); "
    script = f"import {module}; {base}{count}import layout_tuner.results_db.store; {count}"
    known, all_of_them = printed_by(script).split()
    assert known == all_of_them
