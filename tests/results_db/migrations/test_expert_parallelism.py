"""Revision r005 adds expert parallelism, which earlier trials do not use, and longer keys."""

from contextlib import closing
from dataclasses import replace

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from results_db.admin.integrity import check_database
from results_db.database.database import Database
from results_db.migrations import migrate
from results_db.store import Store
from search_spaces.campaigns.fidelity import Fidelity
from search_spaces.documents.reading import MAX_COUNT
from search_spaces.spec.layout import COUNT_KNOBS, KNOBS, Layout
from search_spaces.spec.model_shape import MODEL_RANGES
from search_spaces.spec.presets.models import model_preset


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


def longest_key() -> str:
    """The key of a cheap probe whose every number has the most digits."""
    longest = Layout(**dict.fromkeys(COUNT_KNOBS, MAX_COUNT))
    for name, knob in KNOBS.items():
        others = [replace(longest, **{name: choice}) for choice in knob.choices]
        longest = max(longest, *others, key=lambda layout: len(layout.key)) if others else longest
    model = replace(model_preset("tiny"), num_layers=MODEL_RANGES["num_layers"].high)
    probe = Fidelity(num_microbatches=MAX_COUNT, dp=MAX_COUNT, num_layers=model.num_layers - 1)
    return probe.key(longest, model)


@pytest.mark.parametrize("table", ["trials", "knob_steps"])
def test_the_longest_key_fits(upgraded: str, table: str) -> None:
    key = longest_key()
    assert 200 > len(key) == 194
    assignment = text(f"UPDATE {table} SET layout_key = :key")
    if table == "trials":
        assignment = text("UPDATE trials SET layout_key = :key WHERE id = 1")
    with closing(Database(upgraded)) as database, database.write() as session:
        assert session.execute(assignment, {"key": key}).rowcount
    with closing(Database(upgraded)) as database, database.read() as session:
        keys = set(session.scalars(text(f"SELECT layout_key FROM {table}")))
    assert key in keys


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
