"""Revision r004 lets trials have layouts that earlier databases refuse."""

from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from results_db.admin.integrity import check_database
from results_db.database.database import Database
from results_db.migrations import migrate
from tests.results_db.first_weeks import write_first_weeks

NEW_COLUMNS = {"cp", "cp_comm_type", "pipeline_split"}


def assign(url: str, assignment: str) -> None:
    with closing(Database(url)) as database, database.write() as session:
        session.execute(text(f"UPDATE trials SET {assignment} WHERE id = 1"))


def rows(url: str) -> list[dict[str, object]]:
    with closing(Database(url)) as database, database.read() as session:
        found = session.execute(text("SELECT * FROM trials ORDER BY id"))
        return [dict(row) for row in found.mappings()]


def triggers(url: str) -> set[str]:
    with closing(Database(url)) as database, database.read() as session:
        query = "SELECT sql FROM sqlite_master WHERE type = 'trigger'"
        return set(session.scalars(text(query)))


@pytest.mark.parametrize("assignment", ["precision = 'fp8'", "zero_stage = 3"])
def test_values_that_r003_refused_are_stored(url: str, assignment: str) -> None:
    migrate.downgrade(url, "r004")
    before = rows(url)
    migrate.downgrade(url, "r003")
    kept = rows(url)
    assert [row | earlier for row, earlier in zip(before, kept, strict=True)] == before
    assert set(before[0]) - set(kept[0]) == NEW_COLUMNS
    with pytest.raises(IntegrityError, match=f"ck_trials_{assignment.partition(' ')[0]}"):
        assign(url, assignment)
    migrate.upgrade(url)
    assign(url, assignment)
    after = rows(url)[1:]
    assert [row | earlier for row, earlier in zip(after, before[1:], strict=True)] == after
    assert check_database(url).findings == ()


def test_values_that_cannot_be_are_refused(url: str) -> None:
    with pytest.raises(IntegrityError, match="ck_trials_precision"):
        assign(url, "precision = 'int4'")


def test_triggers_outlive_the_new_table(tmp_path: Path) -> None:
    url = write_first_weeks(tmp_path / "results.sqlite3")
    before = triggers(url)
    assert before
    migrate.downgrade(url, "r003")
    assert triggers(url) == before
    migrate.upgrade(url)
    assert triggers(url) == before
