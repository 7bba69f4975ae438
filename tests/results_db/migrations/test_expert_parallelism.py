"""Revision r005 adds expert parallelism, which earlier trials do not use."""

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
    """URL of such a database that was at r004 and was upgraded."""
    migrate.downgrade(url, "r004")
    migrate.upgrade(url)
    return url


def test_the_experts_of_earlier_trials_are_not_divided(upgraded: str) -> None:
    assert check_database(upgraded).findings == ()
    with closing(Database(upgraded)) as database, database.read() as session:
        found = session.execute(text("SELECT DISTINCT ep, etp FROM trials")).all()
        parts = session.execute(text("SELECT DISTINCT ep_s FROM breakdowns")).all()
        campaigns = session.scalars(text("SELECT DISTINCT campaign_id FROM trials")).all()
    assert [tuple(row) for row in found] == [(1, 1)]
    assert [tuple(row) for row in parts] == [(0.0,)]
    with closing(Store.connect(upgraded)) as store:
        trials = [trial for campaign in campaigns for trial in store.trials.find(campaign)]
    assert trials
    assert all(trial.layout.key == trial.layout_key for trial in trials)


@pytest.mark.parametrize("knob", ["ep", "etp"])
def test_degrees_below_one_are_refused(upgraded: str, knob: str) -> None:
    with (
        closing(Database(upgraded)) as database,
        pytest.raises(IntegrityError, match=f"ck_trials_{knob}"),
        database.write() as session,
    ):
        session.execute(text(f"UPDATE trials SET {knob} = 0"))


def test_downgrades_go_back_to_the_first_schema(upgraded: str) -> None:
    migrate.downgrade(upgraded, "r001")
    assert migrate.revision(upgraded) == "r001"
    migrate.upgrade(upgraded)
    assert check_database(upgraded).findings == ()
