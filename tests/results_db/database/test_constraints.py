"""What must never be, and what PostgreSQL cannot store, is refused, whoever writes it."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from results_db.actor import Actor
from results_db.database.database import Database
from results_db.errors import CampaignNotFoundError, DatabaseUnavailableError, ValueUnstorableError
from results_db.records import TrialRecord
from results_db.store import Store
from search_spaces.campaigns.fidelity import Fidelity
from search_spaces.documents.reading import MAX_COUNT
from search_spaces.protocol.worker_messages import NodeBody, WorkerCreate
from search_spaces.spec.layout import COUNT_KNOBS, KNOBS, Layout
from search_spaces.spec.model_shape import MODEL_RANGES
from search_spaces.spec.presets.models import model_preset
from tests.kit.postgres import upgraded
from tests.kit.store import (
    TimelyStore,
    TurnableClock,
    completed,
    failed,
    lease_one,
    make_campaign,
    make_spec,
    make_worker,
    post_outcome,
)


def fill(url: str) -> None:
    """A campaign with trials 1 measured, 2 failed, 3 running, 4 waiting; and one that ended."""
    with closing(TimelyStore(url, clock=TurnableClock())) as store:
        campaign = make_campaign(store)
        worker = make_worker(store)
        for size, outcome in ((1, completed()), (2, failed()), (3, None), (4, None)):
            trial = store.trials.add(campaign, Layout(micro_batch_size=size))
            if size < 4:
                _run(store, worker.id, trial, outcome)
        ended = make_campaign(store, "ended")
        store.campaigns.cancel(ended)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    fill(database_url)
    with closing(Database(database_url)) as database:
        yield database


def _run(store: Store, worker_id: str, trial: TrialRecord, outcome: Any) -> None:
    lease = lease_one(store, worker_id)
    assert lease.trial_id == trial.id
    if outcome is not None:
        assert post_outcome(store, trial.id, lease.attempt, outcome).accepted


def run(database: Database, *statements: str) -> None:
    with database.write() as session:
        for statement in statements:
            session.connection().exec_driver_sql(statement)


_FIGURES = (
    "campaign_id, step_time_s, tokens_per_step, tokens_per_s, tokens_per_s_per_device, "
    "model_tflops_per_device, hardware_tflops_per_device, oversubscribed"
)
_MEASUREMENT = (
    f"INSERT INTO measurements (trial_id, {_FIGURES}) SELECT %d, {_FIGURES} FROM measurements"
)
_ATTEMPT = (
    "INSERT INTO attempts (trial_id, attempt, worker_id, started_at, seen_at, node_seconds) "
    "SELECT trial_id, %d, worker_id, started_at, seen_at, 0 FROM attempts WHERE trial_id = 3"
)
_WORKER = (
    "name, host, cluster, num_nodes, devices_per_node, device, versions, registered_at, seen_at"
)

NEVER = [
    (
        "ck_campaigns_state",
        "UPDATE campaigns SET state = 'LOST', reason = 'x', ended_at = created_at, clock_at = "
        "NULL WHERE id = 1",
    ),
    (
        "ck_campaigns_ended_has_a_reason",
        "UPDATE campaigns SET state = 'FAILED', ended_at = created_at, clock_at = NULL WHERE id "
        "= 1",
    ),
    (
        "ck_campaigns_ended_has_a_time",
        "UPDATE campaigns SET state = 'FAILED', reason = 'x', clock_at = NULL WHERE id = 1",
    ),
    (
        "a campaign that has ended stays as it ended",
        "UPDATE campaigns SET state = 'RUNNING', ended_at = NULL, reason = NULL WHERE id = 2",
    ),
    (
        "a campaign that has ended stays as it ended",
        "UPDATE campaigns SET state = 'FAILED' WHERE id = 2",
    ),
    ("ck_campaigns_clock_runs_with_it", "UPDATE campaigns SET clock_at = created_at WHERE id = 2"),
    ("ck_campaigns_parts_not_negative", "UPDATE campaigns SET lost_node_seconds = -1 WHERE id = 1"),
    ("ck_campaigns_counters", "UPDATE campaigns SET last_number = -1 WHERE id = 1"),
    ("uq_campaigns_name", "UPDATE campaigns SET name = 'ended' WHERE id = 1"),
    (
        "ck_trials_state",
        "UPDATE trials SET state = 'LOST', ended_at = created_at, ended_seq = 9 WHERE id = 4",
    ),
    ("ck_trials_ended_has_a_time", "UPDATE trials SET state = 'FAILED', reason = 'x' WHERE id = 4"),
    (
        "a trial that has ended neither waits nor runs again",
        "UPDATE trials SET state = 'PENDING', ended_at = NULL, ended_seq = NULL, reason = NULL "
        "WHERE id = 2",
    ),
    (
        "a trial that has ended neither waits nor runs again",
        "UPDATE trials SET state = 'RUNNING', ended_at = NULL, ended_seq = NULL, worker_id = "
        "(SELECT id FROM workers), lease_expires_at = created_at WHERE id = 1",
    ),
    ("ck_trials_running_has_a_lease", "UPDATE trials SET lease_expires_at = NULL WHERE id = 3"),
    ("ck_trials_running_is_an_attempt", "UPDATE trials SET attempt = 0 WHERE id = 3"),
    ("ck_trials_reason_goes_with_state", "UPDATE trials SET reason = 'why' WHERE id = 4"),
    ("ck_trials_ended_has_a_place", "UPDATE trials SET ended_seq = NULL WHERE id = 1"),
    ("uq_trials_campaign_id_ended_seq", "UPDATE trials SET ended_seq = 1 WHERE id = 2"),
    ("uq_trials_campaign_id_number", "UPDATE trials SET number = 1 WHERE id = 4"),
    (
        "uq_trials_campaign_id_layout_key_repeat_index",
        "UPDATE trials SET layout_key = (SELECT layout_key FROM trials WHERE id = 1) WHERE id = 4",
    ),
    ("fk_trials_campaign_id", "UPDATE trials SET campaign_id = 99 WHERE id = 4"),
    ("ck_trials_repeats_another", "UPDATE trials SET repeat_of = 4, repeat_index = 1 WHERE id = 4"),
    ("ck_trials_repeat_is_explicit", "UPDATE trials SET repeat_index = 1 WHERE id = 4"),
    ("ck_trials_lost_attempts", "UPDATE trials SET lost_attempts = 2 WHERE id = 3"),
    ("ck_trials_layout_counts", "UPDATE trials SET pp = 0, num_devices = 0 WHERE id = 4"),
    ("ck_trials_num_devices", "UPDATE trials SET num_devices = 3 WHERE id = 4"),
    ("ck_trials_global_batch_size", "UPDATE trials SET global_batch_size = 3 WHERE id = 4"),
    ("ck_trials_precision", "UPDATE trials SET precision = 'fp7' WHERE id = 4"),
    ("ck_trials_zero_stage", "UPDATE trials SET zero_stage = 9 WHERE id = 4"),
    ("ck_trials_recompute", "UPDATE trials SET recompute = 'x' WHERE id = 4"),
    ("ck_trials_repeat_reason", "UPDATE trials SET repeat_reason = 'boredom' WHERE id = 4"),
    ("ck_trials_pipeline_split", "UPDATE trials SET pipeline_split = 'halves' WHERE id = 4"),
    ("ck_trials_cp_comm_type", "UPDATE trials SET cp_comm_type = 'pigeons' WHERE id = 4"),
    ("ck_trials_schedule", "UPDATE trials SET schedule = 'dualpipe' WHERE id = 4"),
    ("ck_trials_rank_order", "UPDATE trials SET rank_order = 'dualpipe' WHERE id = 4"),
    ("ck_trials_num_devices", "UPDATE trials SET cp = 2 WHERE id = 4"),
    ("ck_trials_num_devices", "UPDATE trials SET tp_columns = 2 WHERE id = 4"),
    ("ck_trials_layout_counts", "UPDATE trials SET cp = 0, num_devices = 0 WHERE id = 4"),
    ("ck_trials_tp_columns", "UPDATE trials SET tp_columns = 0, num_devices = 0 WHERE id = 4"),
    ("ck_trials_ep", "UPDATE trials SET ep = 0 WHERE id = 4"),
    ("ck_trials_etp", "UPDATE trials SET etp = 0 WHERE id = 4"),
    ("ck_trials_costs_not_negative", "UPDATE trials SET node_seconds = -1 WHERE id = 1"),
    ("fk_trials_worker_id", "UPDATE trials SET worker_id = 'x' WHERE id = 3"),
    ("uq_attempts_trial_id_open", _ATTEMPT % 2),
    ("pk_attempts", _ATTEMPT % 1),
    (
        "an attempt that has ended does not run again",
        "UPDATE attempts SET ending = NULL, ended_at = NULL WHERE trial_id = 2",
    ),
    ("ck_attempts_ending", "UPDATE attempts SET ending = 'well' WHERE trial_id = 2"),
    ("ck_attempts_phase", "UPDATE attempts SET phase = 'idling' WHERE trial_id = 3"),
    ("ck_attempts_times", "UPDATE attempts SET held_s = -1 WHERE trial_id = 3"),
    ("fk_attempts_trial_id", "UPDATE attempts SET trial_id = 99 WHERE trial_id = 3"),
    ("ck_attempts_counts_from_one", "UPDATE attempts SET attempt = 0 WHERE trial_id = 3"),
    ("fk_measurements_trial_id_campaign_id", _MEASUREMENT % 99),
    ("a measurement belongs to a trial with a result", _MEASUREMENT % 4),
    ("pk_measurements", _MEASUREMENT % 1),
    ("fk_measurements_trial_id_campaign_id", "UPDATE measurements SET campaign_id = 2"),
    ("a completed trial keeps its measurement", "DELETE FROM measurements"),
    ("ck_measurements_figures", "UPDATE measurements SET step_time_s = 0"),
    ("ck_measurements_figures", "UPDATE measurements SET tokens_per_s = 1e300"),
    ("ck_measurements_counts", "UPDATE measurements SET peak_memory_bytes = -1"),
    ("ck_measurements_others_share", "UPDATE measurements SET others_share = 1.5"),
    ("ck_measurements_others_share", "UPDATE measurements SET others_share = -0.1"),
    ("fk_iterations_trial_id", "UPDATE iterations SET trial_id = 4"),
    ("pk_iterations", 'UPDATE iterations SET "index" = 0'),
    ("fk_trial_logs_trial_id", "UPDATE trial_logs SET trial_id = 99 WHERE trial_id = 1"),
    ("ck_workers_state", "UPDATE workers SET state = 'tired'"),
    ("ck_workers_scheduler", "UPDATE workers SET scheduler = 'cron'"),
    ("ck_workers_holds_devices", "UPDATE workers SET devices_per_node = 0"),
    (
        "uq_workers_name_live",
        f"INSERT INTO workers (id, {_WORKER}) SELECT 'other', {_WORKER} FROM workers",
    ),
]
"""The constraint, or the words of the trigger, and a statement that it refuses."""


def test_the_database_refuses_what_must_never_be(database: Database) -> None:
    is_sqlite = database.engine.dialect.name == "sqlite"
    for refusal, statement in NEVER:
        with pytest.raises(IntegrityError) as refused:
            run(database, statement)
        kind, _, rest = refusal.partition("_")
        if kind in ("uq", "pk", "fk") and is_sqlite:
            # SQLite names the columns of a key, and nothing of a reference.
            unique = f"UNIQUE constraint failed: {rest.split('_')[0]}"
            refusal = "FOREIGN KEY" if kind == "fk" else unique
        assert refusal in str(refused.value.orig), statement
    # A NaN is NULL on SQLite, and infinity what is too large.
    for figure in ("NULL", "9e999") if is_sqlite else ("'NaN'::float8", "'Infinity'::float8"):
        with pytest.raises(IntegrityError):
            run(database, f"UPDATE measurements SET tokens_per_s = {figure}")


def test_the_choices_of_all_knobs_and_the_longest_key_are_stored(database: Database) -> None:
    choices = {name: knob.choices for name, knob in KNOBS.items() if knob.choices}
    changes = [f"{name} = {choice!r}" for name, these in choices.items() for choice in these]
    changes += [f"{name} = 3, num_devices = num_devices * 3" for name in ("tp_columns", "cp")]
    key = longest_key()
    assert 200 < len(key) == 218 <= 240
    changes.append(f"layout_key = '{key}'")
    run(database, *(f"UPDATE trials SET {change} WHERE id = 4" for change in changes))
    with database.read() as session:
        stored = session.connection().exec_driver_sql(
            f"SELECT tp_columns, cp, layout_key, {', '.join(choices)} FROM trials WHERE id = 4"
        )
        assert tuple(stored.one()) == (3, 3, key, *(these[-1] for these in choices.values()))


def longest_key() -> str:
    """The key of a cheap probe whose every number has the most digits."""
    longest = Layout(**dict.fromkeys(COUNT_KNOBS, MAX_COUNT))
    for name, knob in KNOBS.items():
        others = [replace(longest, **{name: choice}) for choice in knob.choices]
        longest = max(longest, *others, key=lambda layout: len(layout.key)) if others else longest
    model = replace(model_preset("tiny"), num_layers=MODEL_RANGES["num_layers"].high)
    probe = Fidelity(num_microbatches=MAX_COUNT, dp=MAX_COUNT, num_layers=model.num_layers - 1)
    return probe.key(longest, model)


def test_deletion_takes_all_rows_and_no_id_is_reused(database: Database, database_url: str) -> None:
    # Checks that keep a measurement beside its trial do not keep both of them for ever.
    run(database, "DELETE FROM campaigns")
    with database.read() as session:
        for table in ("trials", "attempts", "measurements", "iterations", "trial_logs"):
            count = session.connection().exec_driver_sql(f"SELECT count(*) FROM {table}")
            assert count.scalar() == 0, table
    # A worker may still post the outcome of a trial that was deleted with its campaign.
    with closing(TimelyStore(database_url)) as store:
        campaign = make_campaign(store)
        assert campaign == 3
        assert store.trials.add(campaign, Layout()).id == 5


INTRODUCTION: Final[dict[str, Any]] = {
    "name": "w",
    "host": "h",
    "cluster": "c",
    "num_nodes": 41,
    "devices_per_node": 1,
    "device": "d",
    "versions": {},
}


def test_a_text_that_one_database_would_not_keep_is_kept_by_none(store: Store) -> None:
    for name, why in (
        ("a\0b", r"a text cannot be kept: 'a\\x00b' holds a NUL character"),
        ("n" * 201, "a text has 201 characters, and at most 200 are kept: 'nnnn"),
        ("half \ud800", "a text cannot be kept: 'half .* holds a lone surrogate"),
    ):
        with pytest.raises(ValueUnstorableError, match=why):
            make_worker(store, name)
    assert store.workers.find() == []
    make_worker(store, "ü" * 200)
    assert store.workers.find()[0].name == "ü" * 200, "the longest is kept"


def test_a_text_that_is_too_long_to_be_kept_can_be_looked_for(store: Store) -> None:
    assert store.allocations.find(called="n" * 201) == []
    with pytest.raises(CampaignNotFoundError):
        store.campaigns.by_name("n" * 201)
    with pytest.raises(ValueUnstorableError, match="NUL"):
        store.campaigns.by_name("a\0b")


def test_every_row_of_many_is_checked(store: Store) -> None:
    nodes = [NodeBody(name=f"n{number}", num_devices=1) for number in range(40)]
    long = NodeBody(name="n" * 256, num_devices=1)
    with pytest.raises(ValueUnstorableError, match="256 characters, and at most 255"):
        store.workers.register(WorkerCreate(**INTRODUCTION, nodes=[*nodes, long]))
    assert store.workers.find() == []


def test_values_of_core_statements_are_checked_too(store: Store, campaign: int) -> None:
    somebody = store.by(Actor(name="a" * 65, role="admin"))
    with pytest.raises(ValueUnstorableError, match="65 characters, and at most 64"):
        somebody.campaigns.pause(campaign)
    assert store.campaigns.get(campaign).state == "RUNNING"


def test_numbers_beyond_their_column_are_refused_and_those_of_legal_sets_kept(store: Store) -> None:
    with pytest.raises(ValueUnstorableError, match="2147483648 is beyond 2147483647"):
        make_worker(store, num_nodes=2**31)
    with pytest.raises(ValueUnstorableError, match="2147483648 is beyond"):
        store.campaigns.get(2**31)
    with pytest.raises(CampaignNotFoundError):
        store.campaigns.get(2**31 - 1)
    huge = 2**62
    campaign = store.campaigns.create(make_spec(), num_legal_layouts=huge)
    assert store.campaigns.get(campaign.id).num_legal_layouts == huge


def test_a_damaged_document_says_that_the_database_is_damaged(tmp_path: Path) -> None:
    with closing(Store.open(upgraded(tmp_path))) as store:
        make_campaign(store)
        with store._db.engine.begin() as connection:
            connection.execute(text("UPDATE campaigns SET spec = '{\"a\": '"))
        with pytest.raises(DatabaseUnavailableError, match="it is damaged, restore"):
            store.campaigns.by_name("first")
