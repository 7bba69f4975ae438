"""What each revision adds, what earlier rows get, and which values the database refuses."""

from contextlib import closing
from dataclasses import replace
from typing import Any

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
from tests.kit.store import make_worker

ADDED: dict[str, dict[str, dict[str, object]]] = {
    "r002": {
        "trials": {"repeat_reason": None},
        "measurements": {"others_share": None, "throttled": None},
    },
    "r004": {
        "trials": {"pipeline_split": "layers", "cp": 1, "cp_comm_type": "all_gather"},
        "measurements": {"balanced_routing": None, "expert_load": None},
        "breakdowns": {"cp_s": 0.0},
    },
    "r005": {
        "trials": {"ep": 1, "etp": 1},
        "breakdowns": {"ep_s": 0.0},
    },
    "r006": {"trials": {"tp_columns": 1}},
    "r007": {"trials": {"schedule": "1f1b", "rank_order": "tp_cp_dp_pp"}},
}
"""Columns that a revision adds to a table, with the values of earlier rows."""
TABLES = ("trials", "measurements", "breakdowns")

pytestmark = pytest.mark.sqlite_is_enough


@pytest.fixture
def upgraded(url: str) -> str:
    """URL of such a database that was at r001 and was upgraded."""
    migrate.downgrade(url, "r001")
    migrate.upgrade(url)
    return url


def rows(url: str, table: str) -> dict[int, dict[str, Any]]:
    """The rows of a table by the id of their trial."""
    with closing(Database(url)) as database, database.read() as session:
        found = map(dict, session.execute(text(f"SELECT * FROM {table}")).mappings())
        return {row["id" if table == "trials" else "trial_id"]: row for row in found}


def assign(url: str, table: str, assignment: str, **values: object) -> None:
    key = {"trials": "id", "measurements": "trial_id"}.get(table)
    only = f" WHERE {key} = (SELECT min({key}) FROM {table})" if key else ""
    with closing(Database(url)) as database, database.write() as session:
        assert session.execute(text(f"UPDATE {table} SET {assignment}{only}"), values).rowcount


@pytest.mark.sqlite_is_enough(False)
def test_earlier_rows_keep_their_values_and_get_those_of_no_use(url: str) -> None:
    with closing(Store.connect(url)) as store:
        make_worker(store, "earlier", cluster="c", trainers={"theirs": "1"})
        workers = store.workers.find(live=False)
    for revision in reversed(ADDED):
        before = {table: rows(url, table) for table in TABLES}
        migrate.downgrade(url, f"r{int(revision[1:]) - 1:03}")
        for table in TABLES:
            after = rows(url, table)
            assert {key: before[table][key] | row for key, row in after.items()} == before[table]
            added = before[table][1].keys() - after[1].keys()
            assert added == ADDED[revision].get(table, {}).keys()
    assert migrate.revision(url) == "r001"
    earlier = {table: rows(url, table) for table in TABLES}
    migrate.upgrade(url)
    assert check_database(url).findings == ()
    for table in TABLES:
        new = {
            name: value for each in ADDED.values() for name, value in each.get(table, {}).items()
        }
        assert rows(url, table) == {key: row | new for key, row in earlier[table].items()}
    with closing(Store.connect(url)) as store:
        found = [store.trials.find(campaign.id) for campaign in store.campaigns.find()]
        # Trainers of r002 have no known parameters.
        assert store.workers.declared_parameters("c", "theirs") == [None]
        assert store.workers.declared_parameters("c", "ours") == []
        assert store.workers.find(live=False) == workers
    trials = [trial for of_campaign in found for trial in of_campaign]
    assert all(trial.layout_key.startswith(trial.layout.key) for trial in trials)
    assert any(trial.repeat_of for trial in trials)
    assert not any(trial.measurement.is_disturbed for trial in trials if trial.measurement)


REFUSED = [
    ("trials", "repeat_reason = 'boredom'", "repeat_reason"),
    ("measurements", "others_share = 1.5", "others_share"),
    ("measurements", "others_share = -0.1", "others_share"),
    ("trials", "precision = 'int4'", "precision"),
    ("trials", "pipeline_split = 'halves'", "pipeline_split"),
    ("trials", "cp = 2", "num_devices"),
    ("trials", "cp = 0", "(layout_counts|num_devices)"),
    ("trials", "cp_comm_type = 'pigeons'", "cp_comm_type"),
    ("trials", "ep = 0", "ep"),
    ("trials", "etp = 0", "etp"),
    ("trials", "tp_columns = 2", "num_devices"),
    ("trials", "tp_columns = 0, num_devices = 0", "tp_columns"),
    ("trials", "schedule = 'dualpipe'", "schedule"),
    ("trials", "rank_order = 'dualpipe'", "rank_order"),
]


CHANGED = ("num_devices", "tp_columns", "cp", "precision", "zero_stage")
"""Columns that the test of new values changes."""


@pytest.mark.sqlite_is_enough(False)
def test_new_values_are_refused_by_earlier_revisions_and_stored_by_this_one(upgraded: str) -> None:
    for table, assignment, check in REFUSED:
        with pytest.raises(IntegrityError, match=f"ck_{table}_{check}"):
            assign(upgraded, table, assignment)
    before = rows(upgraded, "trials")[1]
    for revision, assignment, check in (
        ("r005", "num_devices = num_devices + 1", "num_devices"),
        ("r003", "num_devices = num_devices + 1", "num_devices"),
        ("r003", "precision = 'fp8'", "precision"),
        ("r003", "zero_stage = 3", "zero_stage"),
    ):
        migrate.downgrade(upgraded, revision)
        with pytest.raises(IntegrityError, match=f"ck_trials_{check}"):
            assign(upgraded, "trials", assignment)
    migrate.upgrade(upgraded)
    for assignment in (
        "tp_columns = 3, num_devices = num_devices * 3",
        "cp = 2, num_devices = num_devices * 2",
        "precision = 'fp8'",
        "zero_stage = 3",
    ):
        assign(upgraded, "trials", assignment)
        assert rows(upgraded, "trials")[1] != before
        assert check_database(upgraded).findings == ()
        earlier = ", ".join(f"{name} = :{name}" for name in CHANGED)
        assign(upgraded, "trials", earlier, **{name: before[name] for name in CHANGED})
    # The longest key fits.
    key = longest_key()
    assert 200 < len(key) == 218 <= 240
    for table in ("trials", "knob_steps"):
        assign(upgraded, table, "layout_key = :key", key=key)
        with closing(Database(upgraded)) as database, database.read() as session:
            assert key in session.scalars(text(f"SELECT layout_key FROM {table}")).all()


def longest_key() -> str:
    """The key of a cheap probe whose every number has the most digits."""
    longest = Layout(**dict.fromkeys(COUNT_KNOBS, MAX_COUNT))
    for name, knob in KNOBS.items():
        others = [replace(longest, **{name: choice}) for choice in knob.choices]
        longest = max(longest, *others, key=lambda layout: len(layout.key)) if others else longest
    model = replace(model_preset("tiny"), num_layers=MODEL_RANGES["num_layers"].high)
    probe = Fidelity(num_microbatches=MAX_COUNT, dp=MAX_COUNT, num_layers=model.num_layers - 1)
    return probe.key(longest, model)
