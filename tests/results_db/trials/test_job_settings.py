"""Settings of jobs in the store: kept with their trials, found by an index, moved with backups."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from layout_tuner.results_db.admin.backup_file import back_up
from layout_tuner.results_db.admin.integrity import check_database
from layout_tuner.results_db.admin.restore import restore_into_postgresql
from layout_tuner.results_db.errors import TrialDuplicateError
from layout_tuner.results_db.store import Store
from layout_tuner.results_db.trials.filter import TrialFilter
from layout_tuner.search_spaces.layouts.job_settings import MAX_KEY_LENGTH, JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.store import JOB_KNOBS, ODD, make_campaign, make_worker, run_trial
from tests.results_db.database.test_query_plans import statements_of

COMPILED = JobSettings({"compile": True})
MATH = JobSettings({"compile": True, "attention": "math", "bucket": 4})
LAYOUTS = (Layout(), Layout(job=COMPILED), Layout(job=MATH), replace(ODD, job=MATH))


def fill(store: Store) -> int:
    """One trial of each of `LAYOUTS`, none of which has run."""
    campaign = make_campaign(store, space={"job": JOB_KNOBS})
    for layout in LAYOUTS:
        store.trials.add(campaign, layout)
    return campaign


def filtered(store: Store, campaign: int, **stated: object) -> list[int]:
    page = store.trial_pages.page(campaign, wanted=TrialFilter(**stated), limit=9)
    return [trial.number for trial in page.trials]


def test_two_jobs_of_one_layout_are_two_trials_and_one_job_is_one(
    store: Store, database_url: str
) -> None:
    campaign = fill(store)
    found = store.trials.find(campaign)
    assert [trial.layout for trial in found] == list(LAYOUTS)
    assert [trial.layout_key for trial in found] == [layout.key for layout in LAYOUTS]
    with pytest.raises(TrialDuplicateError, match=r"~attention\.math~bucket\.4~compile\.true"):
        store.trials.add(campaign, Layout(job=JobSettings(dict(MATH))))
    with store._db.read() as session:
        stored = session.execute(text("SELECT job FROM trials ORDER BY id")).scalars().all()
    assert stored[0] is None
    assert check_database(database_url).findings == ()


def test_the_runs_of_two_jobs_of_one_layout_are_not_pooled(store: Store) -> None:
    campaign = make_campaign(store, space={"job": JOB_KNOBS})
    make_worker(store)
    for rate, layout in ((100.0, LAYOUTS[0]), (300.0, LAYOUTS[1]), (310.0, LAYOUTS[1])):
        run_trial(store, campaign, layout, tokens_per_s=rate)
    ranked = store.leaderboard.ranked_layouts(campaign)
    assert [(each.layout.job, each.num_runs) for each in ranked] == [(COMPILED, 2), ({}, 1)]


def test_the_longest_settings_are_kept(store: Store) -> None:
    names = [f"{'k' * 36}{at:02}" for at in range(5)]
    settings = JobSettings(dict.fromkeys(names, "v" * 39))
    assert MAX_KEY_LENGTH - 10 < len(settings.key) <= MAX_KEY_LENGTH
    campaign = make_campaign(store)
    assert store.trials.add(campaign, replace(ODD, job=settings)).layout.job == settings


@pytest.fixture
def many(store: Store) -> tuple[Store, int]:
    """A campaign of 300 trials, of which two are of one job, beside another of as many."""
    campaigns = [make_campaign(store, name, space={"job": JOB_KNOBS}) for name in ("a", "b")]
    for campaign in campaigns:
        for tp in range(1, 301):
            job = COMPILED if tp in (7, 8) else MATH if tp % 2 else JobSettings()
            store.trials.add(campaign, Layout(tp=tp, job=job))
    return store, campaigns[1]


def test_an_index_finds_the_trials_with_a_setting(many: tuple[Store, int]) -> None:
    store, campaign = many
    wanted = TrialFilter(**{"job.attention": ("own",), "job.compile": (True,)})
    assert filtered(store, campaign, **wanted.stated) == [7, 8]
    with statements_of(store) as ran:
        assert store.trial_pages.count(campaign, wanted=wanted) == (2, True)
    with store._db.write() as session:
        connection = session.connection()
        plan = "EXPLAIN"
        if connection.dialect.name == "sqlite":
            plan = "EXPLAIN QUERY PLAN"
        else:
            session.execute(text("ANALYZE trials"))
        steps = [
            str(connection.exec_driver_sql(f"{plan} {sql}", values).all())
            for sql, values in ran
            if ".job" in sql.partition("WHERE")[2]
        ]
    assert len(steps) == 2, "the settings that there are, and the trials that have some of them"
    # PostgreSQL may read all trials of a small campaign to list the settings that there are.
    of_index = steps if connection.dialect.name == "sqlite" else steps[1:]
    assert all("ix_trials_campaign_id_job" in each for each in of_index), steps


def test_settings_move_between_both_kinds_of_database(
    store: Store, database_url: str, empty_postgres_url: str, tmp_path: Path
) -> None:
    campaign = fill(store)
    back_up(database_url, tmp_path / "first.sqlite3")
    restore_into_postgresql(tmp_path / "first.sqlite3", empty_postgres_url)
    back_up(empty_postgres_url, tmp_path / "second.sqlite3")
    for url in (empty_postgres_url, f"sqlite:///{tmp_path / 'second.sqlite3'}"):
        assert check_database(url).findings == ()
        with closing(Store(url)) as moved:
            assert [trial.layout for trial in moved.trials.find(campaign)] == list(LAYOUTS)
            assert filtered(moved, campaign, **{"job.attention": ("math",)}) == [3, 4]
            assert filtered(moved, campaign, **{"job.bucket": (8,)}) == [1, 2]
    texts = []
    for name in ("first", "second"):
        with closing(sqlite3.connect(tmp_path / f"{name}.sqlite3")) as database:
            texts.append(database.execute("SELECT job FROM trials ORDER BY id").fetchall())
    assert texts[0] == texts[1]
