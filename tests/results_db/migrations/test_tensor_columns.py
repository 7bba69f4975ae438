"""Revision r006 adds tensor columns, which earlier trials do not use, to a trial's devices."""

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
    """URL of such a database that was at r005 and was upgraded."""
    migrate.downgrade(url, "r005")
    migrate.upgrade(url)
    return url


def assign(url: str, assignment: str) -> None:
    with closing(Database(url)) as database, database.write() as session:
        session.execute(text(f"UPDATE trials SET {assignment} WHERE id = 1"))


def test_earlier_trials_have_one_column(upgraded: str) -> None:
    assert check_database(upgraded).findings == ()
    with closing(Database(upgraded)) as database, database.read() as session:
        found = session.scalars(text("SELECT DISTINCT tp_columns FROM trials")).all()
        campaigns = session.scalars(text("SELECT DISTINCT campaign_id FROM trials")).all()
    assert found == [1]
    with closing(Store.connect(upgraded)) as store:
        trials = [trial for campaign in campaigns for trial in store.trials.find(campaign)]
    assert trials
    assert all(trial.layout.key == trial.layout_key for trial in trials)


def test_columns_are_a_factor_of_the_devices(upgraded: str) -> None:
    assign(upgraded, "tp_columns = 3, num_devices = num_devices * 3")
    assert check_database(upgraded).findings == ()
    with pytest.raises(IntegrityError, match="ck_trials_num_devices"):
        assign(upgraded, "tp_columns = 2")
    with pytest.raises(IntegrityError, match="ck_trials_tp_columns"):
        assign(upgraded, "tp_columns = 0, num_devices = 0")


def test_downgrades_restore_the_earlier_check(upgraded: str) -> None:
    migrate.downgrade(upgraded, "r005")
    with pytest.raises(IntegrityError, match="ck_trials_num_devices"):
        assign(upgraded, "num_devices = num_devices + 1")
    migrate.downgrade(upgraded, "r001")
    migrate.upgrade(upgraded)
    assert check_database(upgraded).findings == ()
