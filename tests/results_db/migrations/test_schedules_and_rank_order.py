"""Revision r007 adds the pipeline's schedule and the order of ranks, with the defaults."""

from contextlib import closing
from dataclasses import replace

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from results_db.admin.integrity import check_database
from results_db.database.database import Database
from results_db.migrations import migrate
from results_db.store import Store
from search_spaces.spec.layout import KNOBS, Layout
from tests.kit.store import make_campaign, make_worker, run_trial


def test_trials_of_r006_have_the_defaults(url: str) -> None:
    migrate.downgrade(url, "r006")
    with closing(Database(url)) as database, database.read() as session:
        columns = set(session.execute(text("SELECT * FROM trials")).keys())
        assert not columns & {"schedule", "rank_order"}
    migrate.upgrade(url)
    assert check_database(url).findings == ()
    with closing(Store.connect(url)) as store:
        trials = [
            each for campaign in store.campaigns.find() for each in store.trials.find(campaign.id)
        ]
    assert {(t.layout.schedule, t.layout.rank_order) for t in trials} == {("1f1b", "tp_cp_dp_pp")}


@pytest.mark.parametrize("knob", ["schedule", "rank_order"])
def test_a_trial_of_another_word_is_stored_and_no_unknown_word_is(url: str, knob: str) -> None:
    words = {"schedule": "zero_bubble", "rank_order": "tp_cp_pp_dp"}
    late = Layout(**{"pp": 2, "dp": 1, "num_microbatches": 4, knob: words[knob]})
    with closing(Store.connect(url)) as store:
        campaign = make_campaign(store, "late")
        make_worker(store, "w", num_nodes=1, devices_per_node=2)
        for layout in (late, replace(late, **{knob: KNOBS[knob].default})):
            run_trial(store, campaign, layout)
        first, second = store.trials.find(campaign)
        assert (first.layout, first.layout_key) == (late, late.key)
        assert second.layout_key == late.key.replace(f"-{words[knob]}", "")
    with (
        closing(Database(url)) as database,
        pytest.raises(IntegrityError, match=f"ck_trials_{knob}"),
        database.write() as session,
    ):
        session.execute(text(f"UPDATE trials SET {knob} = 'dualpipe'"))
