"""A check of a database finds what constraints cannot, and nothing where all is well."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text

from results_db.admin.integrity import RULES, check_database
from results_db.database.database import Database
from results_db.errors import DatabaseUnavailableError, SchemaNewerError, SchemaOutdatedError
from tests.results_db.database.test_constraints import fill
from tests.results_db.first_weeks import write_first_weeks
from tests.results_db.next_version import THIS, become_next_version

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
    "stages": ("INSERT INTO stage_memories (trial_id, stage, peak_memory_bytes) VALUES (1, 1, 5)",),
    "trial-costs": ("UPDATE trials SET lost_node_seconds = 3 WHERE id = 4",),
    "campaign-costs": ("UPDATE campaigns SET idle_node_seconds = 3 WHERE id = 1",),
}
"""By rule: what breaks it, and what else that breaks."""

ALSO = {
    "ended-campaigns": {"counters"},
    "trial-costs": {"campaign-costs"},
}
"""Rules that the same statements break too."""


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    fill(database_url)
    with closing(Database(database_url)) as database:
        yield database


def run(database: Database, *statements: str, unchecked: bool = False) -> None:
    """Runs statements; unchecked: without triggers and foreign keys, as a bug of the database."""
    with database.engine.connect() as connection:
        is_sqlite = connection.dialect.name == "sqlite"
        if unchecked:
            connection.rollback()
            driver = connection.connection.driver_connection
            assert driver is not None
            off = (
                "PRAGMA foreign_keys = OFF"
                if is_sqlite
                else "SET session_replication_role = replica"
            )
            driver.execute(off)
        triggers = (
            connection.execute(
                text("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
            ).all()
            if unchecked and is_sqlite
            else []
        )
        for name, _ in triggers:
            connection.exec_driver_sql(f"DROP TRIGGER {name}")
        for statement in statements:
            connection.execute(text(statement))
        for _, definition in triggers:
            connection.exec_driver_sql(definition)
        connection.commit()
        connection.invalidate()  # its settings go with it


def test_a_database_in_order_passes_every_check(database: Database, database_url: str) -> None:
    report = check_database(database_url)
    assert report.findings == ()
    assert report.checks == ("storage", "schema", "references", *RULES)


def test_every_integrity_rule_has_a_way_to_break_it() -> None:
    assert set(BROKEN) == set(RULES)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_found_with_the_rows_that_break_it(
    database: Database, database_url: str, rule: str
) -> None:
    run(database, *BROKEN[rule], unchecked=True)
    findings = {finding.check: finding for finding in check_database(database_url).findings}
    assert set(findings) == {rule} | ALSO.get(rule, set())
    assert findings[rule].num_rows == 1
    assert findings[rule].message.startswith(f"{RULES[rule][0]}, 1 of them: ")


def test_rows_that_refer_to_nothing_are_found(database: Database, database_url: str) -> None:
    run(database, "DELETE FROM trials WHERE id = 2", unchecked=True)
    messages = [
        finding.message
        for finding in check_database(database_url).findings
        if finding.check == "references"
    ]
    assert "rows of attempts that refer to no row of trials, 1 of them: 2/1" in messages


def test_long_lists_of_rows_are_shortened(database: Database, database_url: str) -> None:
    run(
        database,
        "INSERT INTO stage_memories (trial_id, stage, peak_memory_bytes) VALUES (97, 0, 1), (97, 1, 1), "
        "(97, 2, 1), (97, 3, 1), (97, 4, 1), (97, 5, 1)",
        unchecked=True,
    )
    (finding,) = (
        found for found in check_database(database_url).findings if found.check == "references"
    )
    assert finding.message.endswith(": 97/0, 97/1, 97/2, 97/3, 97/4, ...")
    assert finding.num_rows == 6


def test_other_schemas_and_no_databases_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
