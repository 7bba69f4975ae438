"""Revision r004 adds context parallelism, which earlier trials do not use."""

from contextlib import closing

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from results_db.admin.integrity import check_database
from results_db.database.database import Database
from results_db.migrations import migrate
from results_db.store import Store


@pytest.fixture
def upgraded(url: str) -> str:
    """URL of such a database that was at r003 and was upgraded."""
    migrate.downgrade(url, "r003")
    migrate.upgrade(url)
    return url


def test_earlier_trials_have_whole_sequences_and_spend_no_time_on_cp(upgraded: str) -> None:
    assert check_database(upgraded).findings == ()
    with closing(Database(upgraded)) as database, database.read() as session:
        found = session.execute(text("SELECT DISTINCT cp, cp_comm_type FROM trials")).all()
        parts = session.execute(text("SELECT DISTINCT cp_s FROM breakdowns")).all()
        campaigns = session.scalars(text("SELECT DISTINCT campaign_id FROM trials")).all()
    assert [tuple(row) for row in found] == [(1, "all_gather")]
    assert [tuple(row) for row in parts] == [(0.0,)]
    with closing(Store.connect(upgraded)) as store:
        trials = [trial for campaign in campaigns for trial in store.trials.find(campaign)]
    assert trials
    assert all(trial.layout.key == trial.layout_key for trial in trials)


@pytest.mark.parametrize(
    ("assignment", "check"),
    [
        ("cp = 2", "num_devices"),
        ("cp = 0", "layout_counts|num_devices"),
        ("cp_comm_type = 'pigeons'", "cp_comm_type"),
    ],
)
def test_values_that_cannot_be_are_refused(upgraded: str, assignment: str, check: str) -> None:
    with (
        closing(Database(upgraded)) as database,
        pytest.raises(IntegrityError, match=f"ck_trials_({check})"),
        database.write() as session,
    ):
        session.execute(text(f"UPDATE trials SET {assignment}"))


def test_a_layout_with_cp_is_stored_once_its_devices_are_counted(upgraded: str) -> None:
    with closing(Database(upgraded)) as database, database.write() as session:
        session.execute(text("UPDATE trials SET cp = 2, num_devices = 2 * num_devices"))


def test_downgrades_go_back_to_the_first_schema(upgraded: str) -> None:
    migrate.downgrade(upgraded, "r001")
    assert migrate.revision(upgraded) == "r001"
    migrate.upgrade(upgraded)
    assert check_database(upgraded).findings == ()
