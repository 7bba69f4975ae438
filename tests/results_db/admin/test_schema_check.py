"""`db check` compares tables, indexes, triggers and views with those of the revision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.service.postgres_server import PostgresServer
from results_db.admin.commands import db
from results_db.admin.integrity import CHECKS, check_database
from results_db.errors import DatabaseUnavailableError
from tests.results_db.migrations.test_migrate import run

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
