"""What must never be, and what a database cannot store, is refused, one by one and many at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, func, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from layout_tuner.documents.reading import MAX_COUNT
from layout_tuner.protocol.worker_messages import NodeBody, OutcomeReply, OutcomeReport
from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.database.database import Database
from layout_tuner.results_db.database.retry import one_by_one_if_refused
from layout_tuner.results_db.errors import (
    CampaignNotFoundError,
    DatabaseConflictError,
    DatabaseUnavailableError,
    MeasurementInvalidError,
    ResultsDbError,
    RowRefusedError,
    TrialNotFoundError,
    ValueUnstorableError,
)
from layout_tuner.results_db.models.service_tables import EventRow
from layout_tuner.results_db.models.table_base import insert_many
from layout_tuner.results_db.models.tables import Attempt, IterationRow, Trial
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.fidelity import Fidelity
from layout_tuner.search_spaces.layouts.layout import COUNT_KNOBS, KNOBS, Layout
from layout_tuner.search_spaces.models.model_fields import MODEL_RANGES
from layout_tuner.search_spaces.models.model_presets import model_preset
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
    run_trial,
)
from tests.results_db.legal_history import wrong_leaderboards


def fill(url: str) -> None:
    """A campaign with trials 1 measured, 2 failed, 3 running, 4 waiting; and one that ended."""
    with closing(TimelyStore(url, clock=TurnableClock())) as store:
        campaign = make_campaign(store)
        worker = make_worker(store)
        for size, outcome in ((1, completed()), (2, failed()), (3, None), (4, None)):
            trial = store.trials.add(campaign, Layout(micro_batch_size=size))
            if size < 4:
                assert lease_one(store, worker.id).trial_id == trial.id
            if outcome is not None:
                assert post_outcome(store, trial.id, 1, outcome).accepted
        store.campaigns.cancel(make_campaign(store, "ended"))


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    fill(database_url)
    with closing(Database(database_url)) as database:
        yield database


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

NEVER = {
    "ck_campaigns_state": "UPDATE campaigns SET state = 'LOST', reason = 'x', ended_at = "
    "created_at, clock_at = NULL WHERE id = 1",
    "ck_campaigns_ended_has_a_reason": "UPDATE campaigns SET state = 'FAILED', ended_at = "
    "created_at, clock_at = NULL WHERE id = 1",
    "ck_campaigns_ended_has_a_time": "UPDATE campaigns SET state = 'FAILED', reason = 'x', "
    "clock_at = NULL WHERE id = 1",
    "a campaign that has ended stays as it ended": "UPDATE campaigns SET state = 'RUNNING', "
    "ended_at = NULL, reason = NULL WHERE id = 2; "
    "UPDATE campaigns SET state = 'FAILED' WHERE id = 2",
    "ck_campaigns_clock_runs_with_it": "UPDATE campaigns SET clock_at = created_at WHERE id = 2",
    "ck_campaigns_parts_not_negative": "UPDATE campaigns SET lost_node_seconds = -1 WHERE id = 1",
    "ck_campaigns_counters": "UPDATE campaigns SET last_number = -1 WHERE id = 1",
    "ck_campaigns_visibility": "UPDATE campaigns SET visibility = 'friends' WHERE id = 1",
    "ck_campaigns_group_has_a_name": "UPDATE campaigns SET visibility = 'group' WHERE id = 1",
    "uq_campaigns_name_everyone": "UPDATE campaigns SET name = 'ended', created_by = 'x' "
    "WHERE id = 1",
    "uq_campaigns_created_by_name": "UPDATE campaigns SET name = 'ended' WHERE id = 1",
    "ck_trials_state": "UPDATE trials SET state = 'LOST', ended_at = created_at, ended_seq = 9 "
    "WHERE id = 4",
    "ck_trials_ended_has_a_time": "UPDATE trials SET state = 'FAILED', reason = 'x' WHERE id = 4",
    "a trial that has ended neither waits nor runs again": "UPDATE trials SET state = 'PENDING', "
    "ended_at = NULL, ended_seq = NULL, reason = NULL WHERE id = 2; "
    "UPDATE trials SET state = 'RUNNING', ended_at = NULL, ended_seq = NULL, worker_id = "
    "(SELECT id FROM workers), lease_expires_at = created_at WHERE id = 1",
    "ck_trials_running_has_a_lease": "UPDATE trials SET lease_expires_at = NULL WHERE id = 3",
    "ck_trials_running_is_an_attempt": "UPDATE trials SET attempt = 0 WHERE id = 3",
    "ck_trials_reason_goes_with_state": "UPDATE trials SET reason = 'why' WHERE id = 4",
    "ck_trials_ended_has_a_place": "UPDATE trials SET ended_seq = NULL WHERE id = 1",
    "uq_trials_campaign_id_ended_seq": "UPDATE trials SET ended_seq = 1 WHERE id = 2",
    "uq_trials_campaign_id_number": "UPDATE trials SET number = 1 WHERE id = 4",
    "uq_trials_campaign_id_layout_key_repeat_index": "UPDATE trials SET layout_key = (SELECT "
    "layout_key FROM trials WHERE id = 1) WHERE id = 4",
    "fk_trials_campaign_id": "UPDATE trials SET campaign_id = 99 WHERE id = 4",
    "ck_trials_repeats_another": "UPDATE trials SET repeat_of = 4, repeat_index = 1 WHERE id = 4",
    "ck_trials_repeat_is_explicit": "UPDATE trials SET repeat_index = 1 WHERE id = 4",
    "ck_trials_lost_attempts": "UPDATE trials SET lost_attempts = 2 WHERE id = 3",
    "ck_trials_layout_counts": "UPDATE trials SET pp = 0, num_devices = 0 WHERE id = 4; "
    "UPDATE trials SET cp = 0, num_devices = 0 WHERE id = 4",
    "ck_trials_num_devices": "UPDATE trials SET num_devices = 3 WHERE id = 4; "
    "UPDATE trials SET cp = 2 WHERE id = 4; UPDATE trials SET tp_columns = 2 WHERE id = 4",
    "ck_trials_global_batch_size": "UPDATE trials SET global_batch_size = 3 WHERE id = 4",
    "ck_trials_precision": "UPDATE trials SET precision = 'fp7' WHERE id = 4",
    "ck_trials_zero_stage": "UPDATE trials SET zero_stage = 9 WHERE id = 4",
    "ck_trials_recompute": "UPDATE trials SET recompute = 'x' WHERE id = 4",
    "ck_trials_repeat_reason": "UPDATE trials SET repeat_reason = 'boredom' WHERE id = 4",
    "ck_trials_pipeline_split": "UPDATE trials SET pipeline_split = 'halves' WHERE id = 4",
    "ck_trials_cp_comm_type": "UPDATE trials SET cp_comm_type = 'pigeons' WHERE id = 4",
    "ck_trials_schedule": "UPDATE trials SET schedule = 'dualpipe' WHERE id = 4",
    "ck_trials_rank_order": "UPDATE trials SET rank_order = 'dualpipe' WHERE id = 4",
    "ck_trials_tp_columns": "UPDATE trials SET tp_columns = 0, num_devices = 0 WHERE id = 4",
    "ck_trials_ep": "UPDATE trials SET ep = 0 WHERE id = 4",
    "ck_trials_etp": "UPDATE trials SET etp = 0 WHERE id = 4",
    "ck_trials_costs_not_negative": "UPDATE trials SET node_seconds = -1 WHERE id = 1",
    "fk_trials_worker_id": "UPDATE trials SET worker_id = 'x' WHERE id = 3",
    "uq_attempts_trial_id_open": _ATTEMPT % 2,
    "pk_attempts": _ATTEMPT % 1,
    "an attempt that has ended does not run again": "UPDATE attempts SET ending = NULL, ended_at "
    "= NULL WHERE trial_id = 2",
    "ck_attempts_ending": "UPDATE attempts SET ending = 'well' WHERE trial_id = 2",
    "ck_attempts_phase": "UPDATE attempts SET phase = 'idling' WHERE trial_id = 3",
    "ck_attempts_times": "UPDATE attempts SET held_s = -1 WHERE trial_id = 3",
    "fk_attempts_trial_id": "UPDATE attempts SET trial_id = 99 WHERE trial_id = 3",
    "ck_attempts_counts_from_one": "UPDATE attempts SET attempt = 0 WHERE trial_id = 3",
    "fk_measurements_trial_id_campaign_id": _MEASUREMENT % 99
    + "; UPDATE measurements SET campaign_id = 2",
    "a measurement belongs to a trial with a result": _MEASUREMENT % 4,
    "pk_measurements": _MEASUREMENT % 1,
    "a completed trial keeps its measurement": "DELETE FROM measurements",
    "ck_measurements_figures": "UPDATE measurements SET step_time_s = 0; "
    "UPDATE measurements SET tokens_per_s = 1e300",
    "ck_measurements_counts": "UPDATE measurements SET peak_memory_bytes = -1",
    "ck_measurements_others_share": "UPDATE measurements SET others_share = 1.5; "
    "UPDATE measurements SET others_share = -0.1",
    "fk_iterations_trial_id": "UPDATE iterations SET trial_id = 4",
    "pk_iterations": 'UPDATE iterations SET "index" = 0',
    "fk_trial_logs_trial_id": "UPDATE trial_logs SET trial_id = 99 WHERE trial_id = 1",
    "ck_workers_state": "UPDATE workers SET state = 'tired'",
    "ck_workers_scheduler": "UPDATE workers SET scheduler = 'cron'",
    "ck_workers_holds_devices": "UPDATE workers SET devices_per_node = 0",
    "uq_workers_name_live": f"INSERT INTO workers (id, {_WORKER}) "
    f"SELECT 'other', {_WORKER} FROM workers",
}
"""By constraint, or by the words of the trigger, the statements that it refuses."""


def test_the_database_refuses_what_must_never_be(database: Database) -> None:
    is_sqlite = database.engine.dialect.name == "sqlite"
    for refusal, statement in ((each, one) for each in NEVER for one in NEVER[each].split("; ")):
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


def test_a_trial_has_a_column_of_its_kind_for_every_knob_in_their_order() -> None:
    columns = [column for column in Trial.__table__.columns if column.name in KNOBS]
    assert [column.name for column in columns] == list(KNOBS)
    for column, knob in zip(columns, KNOBS.values(), strict=True):
        assert column.type.python_type is type(knob.default), knob.name
        assert not column.nullable, knob.name
        assert getattr(column.type, "length", None) is None or (
            column.type.length >= max(map(len, knob.choices))
        ), knob.name
        # Rows of releases without the knob ran at its default.
        older = column.server_default
        assert older is None or str(getattr(older.arg, "text", older.arg)) == str(knob.default)
        assert older is not None or not knob.is_new, knob.name


def test_the_choices_of_all_knobs_and_the_longest_key_are_stored(database: Database) -> None:
    choices = {name: knob.choices for name, knob in KNOBS.items() if knob.choices}
    changes = [f"{name} = {choice!r}" for name, these in choices.items() for choice in these]
    changes += [f"{name} = 3, num_devices = num_devices * 3" for name in ("tp_columns", "cp")]
    key = longest_key()
    assert 300 < len(key) <= 600
    changes.append(f"layout_key = '{key}'")
    run(database, *(f"UPDATE trials SET {change} WHERE id = 4" for change in changes))
    with database.read() as session:
        stored = session.connection().exec_driver_sql(
            f"SELECT tp_columns, cp, layout_key, {', '.join(choices)} FROM trials WHERE id = 4"
        )
        assert tuple(stored.one()) == (3, 3, key, *(these[-1] for these in choices.values()))


def longest_key() -> str:
    """The key of a cheap probe whose every number has the most digits."""
    numbers = "/".join(["10"] * 21)  # of as many characters as there may be
    stages = f"E{'t|tt|' * 31}tL"  # of nearly as many characters as there may be
    longest = Layout(
        **dict.fromkeys(COUNT_KNOBS, MAX_COUNT), recompute_layers=numbers, pipeline_layout=stages
    )
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
        make_worker(store, num_nodes=41, devices_per_node=1, nodes=[*nodes, long])
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
        make_worker(store)
        with store._db.engine.begin() as connection:
            connection.execute(text("UPDATE campaigns SET spec = '{\"a\": '"))
            connection.execute(text("UPDATE workers SET versions = '{\"a\": '"))
        with pytest.raises(DatabaseUnavailableError, match="it is damaged, restore"):
            store.workers.find()
        # That of a campaign is shown as it is, so that the other campaigns can be read.
        assert store.campaigns.by_name("first").stored.document == '{"a": '


NUM_REPORTS = 5
POISONED = 2


class Work:
    """Doubles numbers; a batch with the 2 in it fails."""

    def __init__(self, broken: Exception | None) -> None:
        self.broken = broken
        self.batches: list[list[int]] = []

    def __call__(self, asks: Sequence[int]) -> list[int | ResultsDbError]:
        self.batches.append(list(asks))
        if 2 in asks and self.broken is not None:
            raise self.broken
        return [2 * ask for ask in asks]


def test_of_a_batch_that_is_refused_each_call_runs_alone_and_one_gets_the_error() -> None:
    broken = IntegrityError("INSERT", {}, Exception("CHECK constraint failed: counters"))
    for error in (None, ValueUnstorableError("too long"), broken):
        work = Work(error)
        first, refused, last = one_by_one_if_refused(work, [1, 2, 3])
        assert (first, last) == (2, 6)
        assert work.batches == [[1, 2, 3], *([] if error is None else [[1], [2], [3]])]
        if error is broken:
            assert isinstance(refused, RowRefusedError)
            assert "CHECK constraint failed: counters" in str(refused)
            assert refused.__cause__ is broken
        else:
            assert refused == (error or 4)


def test_an_unreachable_database_fails_the_batch_without_single_tries() -> None:
    for error in (DatabaseUnavailableError("away"), DatabaseConflictError("both")):
        work = Work(error)
        with pytest.raises(type(error)):
            one_by_one_if_refused(work, [1, 2, 3])
        assert work.batches == [[1, 2, 3]]


def make_reports(store: Store) -> list[OutcomeReport]:
    """Outcomes of trials that run."""
    campaign, worker = make_campaign(store), make_worker(store)
    reports = []
    for number in range(1, NUM_REPORTS + 1):
        layout = Layout(micro_batch_size=number)
        store.trials.add(campaign, layout)
        lease = lease_one(store, worker.id)
        reports.append(
            OutcomeReport(
                trial_id=lease.trial_id,
                worker_id=worker.id,
                attempt=lease.attempt,
                outcome=completed(layout),
            )
        )
    return reports


def less_than_nothing(report: OutcomeReport) -> OutcomeReport:
    return replace(report, nodes_held=-1.0)


def named_without_end(report: OutcomeReport) -> OutcomeReport:
    """An outcome refuses such a node itself: this is one that slipped through."""
    outcome = replace(report.outcome)
    object.__setattr__(outcome, "node", "n" * 300)
    return replace(report, outcome=outcome)


def peaked_below_zero(report: OutcomeReport) -> OutcomeReport:
    """A measurement refuses it too."""
    measured = replace(report.outcome.measurement)
    object.__setattr__(measured, "peak_memory_bytes", -1)
    return replace(report, outcome=replace(report.outcome, measurement=measured))


@pytest.mark.parametrize(
    ("poison", "refusal"),
    [
        (less_than_nothing, MeasurementInvalidError),
        (named_without_end, ValueUnstorableError),
        (peaked_below_zero, RowRefusedError),
    ],
)
def test_one_outcome_of_a_batch_is_refused(
    store: Store, poison: object, refusal: type[ResultsDbError]
) -> None:
    reports = make_reports(store)
    reports[POISONED] = poison(reports[POISONED])  # type: ignore[operator]
    reports.append(replace(reports[0], trial_id=9999))
    answers = store.outcomes.post_all(reports)
    assert isinstance(answers[POISONED], refusal)
    assert isinstance(answers[-1], TrialNotFoundError)
    for place, report in enumerate(reports[:-1]):
        state = store.trials.get(report.trial_id).state
        if place == POISONED:
            assert state == "RUNNING", "nothing of it was kept"
        else:
            assert answers[place] == OutcomeReply(accepted=True, state="COMPLETED"), place
            assert state == "COMPLETED"
    assert wrong_leaderboards(store) == []


NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
TEXTS = ["plain", "tab\tand\nline", "back\\slash \\N \\.", "", "quote \" and '", "ü 🚀"]
"""What a format that separates by tabs and escapes with backslashes might get wrong."""


@pytest.fixture
def trial_id(store: Store) -> int:
    """A trial that was measured, without the rows of its iterations."""
    trial_id = run_trial(store, make_campaign(store))
    with store._db.write() as session:
        session.execute(delete(IterationRow))
    return trial_id


def iteration(trial_id: int, index: int, /, **changes: Any) -> dict[str, Any]:
    row = {"kind": "timed", "step_time_s": 0.1, "loss": 3.0, "grad_norm": None}
    return {"trial_id": trial_id, "index": index, **row} | changes


def event(campaign_id: int, seq: int, text: str) -> dict[str, Any]:
    return {
        "seq": seq,
        "campaign_id": campaign_id,
        "trial_id": None,
        "kind": "trial.added",
        "at": NOON + timedelta(microseconds=seq),
        "data": {"text": text, "nested": [1, None, {"deep": True}]},
    }


@contextmanager
def nothing_is_kept(
    store: Store, expected: type[Exception], why: str | None = None
) -> Iterator[Session]:
    with pytest.raises(expected, match=why), store._db.write() as session:
        yield session
    with store._db.read() as session:
        assert not session.scalar(select(func.count()).select_from(IterationRow))


def test_what_is_kept_is_what_was_given_in_its_order(store: Store) -> None:
    for number in (0, 1, 3, 60):
        given = [event(9, seq, TEXTS[seq % len(TEXTS)]) for seq in range(1, number + 1)]
        with store._db.write() as session:
            session.execute(delete(EventRow))
            insert_many(session, EventRow, given)
        with store._db.read() as session:
            kept = session.scalars(select(EventRow).order_by(EventRow.id))
            assert [{name: getattr(row, name) for name in event(9, 1, "")} for row in kept] == given


def test_figures_are_kept_to_the_bit_whole_ones_among_them(store: Store, trial_id: int) -> None:
    losses = [math.pi, 1e-300, 7, 0.1 + 0.2, 2**53 + 1.0]
    rows = [iteration(trial_id, index, loss=loss) for index, loss in enumerate(losses)]
    rows[1]["grad_norm"] = 1.5
    with store._db.write() as session:
        insert_many(session, IterationRow, rows)
    with store._db.read() as session:
        kept = session.scalars(select(IterationRow).order_by(IterationRow.index)).all()
        assert [row.loss for row in kept] == losses
        assert [row.grad_norm for row in kept] == [None, 1.5, None, None, None]


def test_columns_that_are_not_given_get_their_defaults(store: Store, trial_id: int) -> None:
    worker = make_worker(store, "another")
    told = {"trial_id": trial_id, "worker_id": worker.id, "started_at": NOON, "seen_at": NOON}
    lost = {"ended_at": NOON, "ending": "lost", "waiting_because": ""}
    with store._db.write() as session:
        insert_many(session, Attempt, [{**told, **lost, "attempt": n} for n in range(2, 6)])
    later = Attempt.attempt > 1
    with store._db.read() as session:
        assert list(session.scalars(select(Attempt.node_seconds).where(later))) == [0.0] * 4
        assert list(session.scalars(select(Attempt.lost_node_seconds).where(later))) == [0.0] * 4


def test_one_refused_row_refuses_all_for_its_own_reason(store: Store, trial_id: int) -> None:
    some = [iteration(trial_id, index) for index in range(4)]
    nul = "a text cannot be kept: .* holds a NUL character"
    for row, error, why in (
        (iteration(trial_id, 2), IntegrityError, None),
        (iteration(trial_id + 1, 9), IntegrityError, None),
        (iteration(trial_id, 9, kind="t" * 300), ValueUnstorableError, "a text has 300 characters"),
        (iteration(trial_id, 9, kind="a\0b"), ValueUnstorableError, nul),
        (iteration(trial_id, 2**31), ValueUnstorableError, "2147483648 is beyond"),
    ):
        with nothing_is_kept(store, error, why) as session:
            insert_many(session, IterationRow, [*some, row])


def test_a_lost_connection_is_told_and_the_next_one_works(store: Store, trial_id: int) -> None:
    if not store.is_shared:
        pytest.skip("a file has no connection to lose")
    rows = [iteration(trial_id, index) for index in range(5)]
    with nothing_is_kept(store, DatabaseUnavailableError) as session:
        lost = session.scalar(select(func.pg_backend_pid()))
        with store._db.write() as other:
            other.execute(select(func.pg_terminate_backend(lost, 5000)))
        insert_many(session, IterationRow, rows)
    with store._db.write() as session:
        insert_many(session, IterationRow, rows)
        session.execute(delete(IterationRow))
