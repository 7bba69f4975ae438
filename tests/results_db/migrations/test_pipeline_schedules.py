"""Revision r007 adds the pipeline's schedule: of earlier trials 1F1B."""

from contextlib import closing
from dataclasses import replace

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from results_db.admin.integrity import check_database
from results_db.database.database import Database
from results_db.migrations import migrate
from results_db.store import Store
from search_spaces.spec.layout import Layout
from tests.kit.store import make_campaign, make_worker, run_trial


def test_trials_of_r006_have_the_default_schedule(url: str) -> None:
    migrate.downgrade(url, "r006")
    with closing(Database(url)) as database, database.read() as session:
        assert "schedule" not in session.execute(text("SELECT * FROM trials")).keys()  # noqa: SIM118
    migrate.upgrade(url)
    assert check_database(url).findings == ()
    with closing(Store.connect(url)) as store:
        trials = [
            each for campaign in store.campaigns.find() for each in store.trials.find(campaign.id)
        ]
    assert {each.layout.schedule for each in trials} == {"1f1b"}


def test_a_trial_of_another_schedule_is_stored_and_no_other_word_is(url: str) -> None:
    late = Layout(pp=2, num_microbatches=4, schedule="zero_bubble")
    with closing(Store.connect(url)) as store:
        campaign = make_campaign(store, "late")
        make_worker(store, "w", num_nodes=1, devices_per_node=2)
        for layout in (late, replace(late, schedule="1f1b")):
            run_trial(store, campaign, layout)
        first, second = store.trials.find(campaign)
        assert (first.layout, first.layout_key) == (late, late.key)
        assert second.layout_key == late.key.replace("-zero_bubble", "")
    with (
        closing(Database(url)) as database,
        pytest.raises(IntegrityError, match="ck_trials_schedule"),
        database.write() as session,
    ):
        session.execute(text("UPDATE trials SET schedule = 'dualpipe'"))
