"""Revision r004 adds the split of layers over stages: of earlier trials the transformer layers."""

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


def test_trials_of_r003_split_the_transformer_layers_alone(url: str) -> None:
    with closing(Store.connect(url)) as store:
        before = [store.trials.find(each.id) for each in store.campaigns.find()]
    assert any(before)
    migrate.downgrade(url, "r003")
    with closing(Database(url)) as database, database.read() as session:
        assert "pipeline_split" not in session.execute(text("SELECT * FROM trials")).keys()  # noqa: SIM118
    migrate.upgrade(url)
    assert check_database(url).findings == ()
    with closing(Store.connect(url)) as store:
        after = [store.trials.find(each.id) for each in store.campaigns.find()]
        assert after == before
        assert {t.layout.pipeline_split for trials in after for t in trials} == {"layers"}


def test_a_trial_of_another_split_is_stored_and_no_other_word_is(url: str) -> None:
    split = Layout(pp=2, num_microbatches=4, pipeline_split="embedding_and_head")
    with closing(Store.connect(url)) as store:
        campaign = make_campaign(store, "uneven")
        make_worker(store, "w", num_nodes=1, devices_per_node=2)
        for layout in (split, replace(split, pipeline_split="layers")):
            run_trial(store, campaign, layout)
        first, second = store.trials.find(campaign)
        assert (first.layout, first.layout_key) == (split, split.key)
        assert second.layout_key == split.key.replace("-ps_embedding_and_head", "")
    with (
        closing(Database(url)) as database,
        pytest.raises(IntegrityError, match="ck_trials_pipeline_split"),
        database.write() as session,
    ):
        session.execute(text("UPDATE trials SET pipeline_split = 'halves'"))
