"""Revision r002 adds what others took of a probe's devices to databases of r001."""

from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from results_db.admin.integrity import check_database
from results_db.admin.restore import restore_into_postgresql
from results_db.database.database import Database
from results_db.migrations import migrate
from results_db.store import Store
from tests.results_db.first_weeks import write_first_weeks
from tests.results_db.sealed import sealed

ADDED = {
    "trials": ("repeat_reason",),
    "measurements": ("others_share", "throttled", "balanced_routing", "expert_load"),
}

LATER: dict[str, dict[str, object]] = {
    "trials": {
        "pipeline_split": "layers",
        "cp": 1,
        "cp_comm_type": "all_gather",
        "ep": 1,
        "etp": 1,
        "tp_columns": 1,
    }
}
"""What later revisions add, with the values of earlier rows."""


@pytest.fixture(params=["sqlite", "postgresql"])
def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database with a group's rows, at r001."""
    url = write_first_weeks(tmp_path / "results.sqlite3")
    migrate.downgrade(url, "r001")
    if request.param == "postgresql":
        migrate.upgrade(url)  # a backup is restored at the revision that it has
        url = str(request.getfixturevalue("empty_postgres_url"))
        restore_into_postgresql(sealed(tmp_path / "results.sqlite3"), url)
        migrate.downgrade(url, "r001")
    return url


def rows(url: str, table: str) -> list[dict[str, object]]:
    with closing(Database(url)) as database, database.read() as session:
        found = session.execute(text(f"SELECT * FROM {table}"))
        return sorted(map(dict, found.mappings()), key=lambda row: str(row.get("id", row)))


def test_earlier_rows_keep_their_values_and_what_they_lack_is_null(earlier: str) -> None:
    before = {table: rows(earlier, table) for table in ADDED}
    migrate.upgrade(earlier)
    for table, added in ADDED.items():
        assert before[table]
        unknown = dict.fromkeys(added)
        after = {str(row.get("id", row.get("trial_id"))): row for row in rows(earlier, table)}
        for row in before[table]:
            later = LATER.get(table, {})
            assert after[str(row.get("id", row.get("trial_id")))] == row | unknown | later
    assert check_database(earlier).findings == ()
    with closing(Store.connect(earlier)) as store:
        campaigns = {row["campaign_id"] for row in before["trials"]}
        trials = [trial for campaign in campaigns for trial in store.trials.find(campaign)]
        assert any(trial.repeat_of for trial in trials)
        assert {trial.repeat_reason for trial in trials} == {None}
        assert not any(trial.measurement.is_disturbed for trial in trials if trial.measurement)


@pytest.mark.parametrize(
    ("table", "assignment"),
    [
        ("measurements", "others_share = 1.5"),
        ("measurements", "others_share = -0.1"),
        ("trials", "repeat_reason = 'boredom'"),
    ],
)
def test_values_that_cannot_be_are_refused(earlier: str, table: str, assignment: str) -> None:
    migrate.upgrade(earlier)
    column, _, _ = assignment.partition(" ")
    with (
        closing(Database(earlier)) as database,
        pytest.raises(IntegrityError, match=f"ck_{table}_{column}"),
        database.write() as session,
    ):
        session.execute(text(f"UPDATE {table} SET {assignment}"))


def test_a_downgrade_leaves_the_schema_of_r001(earlier: str) -> None:
    migrate.upgrade(earlier)
    migrate.downgrade(earlier, "r001")
    assert migrate.revision(earlier) == "r001"
    for table, added in ADDED.items():
        assert not set(rows(earlier, table)[0]) & set(added)
