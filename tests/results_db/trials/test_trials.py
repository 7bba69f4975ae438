import dataclasses
from types import SimpleNamespace

import pytest
from sqlalchemy import UniqueConstraint, select, update
from sqlalchemy.exc import IntegrityError

from results_db.database.database import breaks_unique
from results_db.errors import (
    CampaignNotFoundError,
    ObjectiveUnknownError,
    TrialDuplicateError,
    TrialNotFoundError,
    TrialStateError,
)
from results_db.models.tables import Base, Campaign, Trial
from results_db.store import Store
from search_spaces.spec.layout import LAYOUT_FIELDS, Layout
from search_spaces.spec.objectives import OBJECTIVES
from tests.kit.store import (
    completed,
    failed,
    lease_one,
    make_campaign,
    make_environment,
    make_measurement,
    make_worker,
    ranked_trials,
)

ODD = Layout(
    num_nodes=2,
    tp=2,
    pp=4,
    dp=6,
    vpp=2,
    micro_batch_size=3,
    num_microbatches=5,
    zero_stage=1,
    zero_replicas=3,
    recompute="selective",
    sequence_parallel=True,
    precision="bf16",
)


def run_trial(
    store: Store, campaign: int, layout: Layout, worker_id: str, **changes: object
) -> int:
    trial = store.trials.add(campaign, layout)
    lease_one(store, worker_id)
    store.outcomes.post(trial.id, 1, completed(layout, **changes))
    return trial.id


def test_a_layout_comes_back_as_it_was(store: Store) -> None:
    campaign = make_campaign(store)
    trial = store.trials.add(campaign, ODD)
    assert trial.layout == ODD == store.trials.get(trial.id).layout
    assert trial.layout_key == ODD.key
    assert (trial.state, trial.number, trial.attempt) == ("PENDING", 1, 0)


def test_every_knob_has_a_column_of_its_own() -> None:
    assert set(LAYOUT_FIELDS) <= set(Trial.__table__.columns.keys())


def test_a_layout_is_tried_once_in_a_campaign(store: Store) -> None:
    first, second = make_campaign(store, "a"), make_campaign(store, "b")
    store.trials.add(first, ODD)
    with pytest.raises(TrialDuplicateError, match=ODD.key):
        store.trials.add(first, ODD)
    store.trials.add(second, ODD)
    # The refused one took no number.
    assert store.trials.add(first, Layout()).number == 2


def test_a_trial_needs_a_campaign(store: Store) -> None:
    with pytest.raises(CampaignNotFoundError, match="no campaign 9"):
        store.trials.add(9, ODD)


def test_a_repeat_is_deliberate_and_says_what_it_repeats(store: Store) -> None:
    campaign, worker = make_campaign(store), make_worker(store)
    first = store.trials.add(campaign, Layout())
    with pytest.raises(TrialStateError, match="PENDING"):
        store.trials.repeat(first.id)
    lease_one(store, worker.id)
    store.outcomes.post(first.id, 1, completed())
    second = store.trials.repeat(first.id)
    assert (second.repeat_of, second.repeat_index, second.number) == (first.id, 1, 2)
    lease_one(store, worker.id)
    store.outcomes.post(second.id, 1, failed())
    assert store.trials.repeat(second.id).repeat_index == 2


def test_a_completed_trial_keeps_all_that_was_measured(store: Store) -> None:
    campaign, worker = make_campaign(store), make_worker(store, devices_per_node=16)
    layout = Layout(pp=4)
    trial_id = run_trial(store, campaign, layout, worker.id)
    detail = store.trials.detail(trial_id)
    expected = make_measurement(layout)
    assert detail.trial.state == "COMPLETED"
    assert detail.trial.measurement is not None
    kept = {
        f.name: getattr(detail.trial.measurement, f.name)
        for f in dataclasses.fields(detail.trial.measurement)
    }
    sent = {f.name: getattr(expected, f.name) for f in dataclasses.fields(expected)}
    assert detail.iterations == sent.pop("iterations")
    assert kept == sent
    assert detail.environment == make_environment()
    assert detail.log_tail == "the last line\n"
    assert [(a.attempt, a.ending, a.worker_name) for a in detail.attempts] == [
        (1, "reported", "w1")
    ]


def test_what_fp16_on_a_gpu_adds_to_a_measurement_is_kept(store: Store) -> None:
    campaign, worker = make_campaign(store), make_worker(store)
    layout = Layout(pp=2, precision="fp16")
    plain = make_measurement(layout)
    (first, *others) = plain.iterations
    iterations = (dataclasses.replace(first, grad_norm=None), *others)
    reserved = (7 << 30, 6 << 30)
    trial_id = run_trial(
        store,
        campaign,
        layout,
        worker.id,
        iterations=iterations,
        skipped_steps=1,
        warmup_settled=False,
        peak_reserved_bytes_by_stage=reserved,
    )
    detail = store.trials.detail(trial_id)
    kept = detail.trial.measurement
    assert kept is not None
    assert detail.iterations == iterations
    assert (kept.skipped_steps, kept.warmup_settled) == (1, False)
    assert kept.peak_reserved_bytes_by_stage == reserved
    assert kept.peak_memory_bytes_by_stage == plain.peak_memory_bytes_by_stage


def test_a_measurement_without_a_breakdown_is_kept_without_one(store: Store) -> None:
    campaign, worker = make_campaign(store), make_worker(store)
    trial_id = run_trial(store, campaign, Layout(), worker.id, breakdown=None)
    (ranked,) = ranked_trials(store, campaign, "tokens_per_s")
    assert ranked.id == trial_id
    assert ranked.measurement is not None
    assert ranked.measurement.breakdown is None
    assert ranked.measurement.peak_reserved_bytes_by_stage == ()


def test_an_unknown_trial_is_named_in_the_error(store: Store) -> None:
    campaign = make_campaign(store)
    for read in (store.trials.get, store.trials.detail, store.trials.repeat):
        with pytest.raises(TrialNotFoundError, match="no trial 5"):
            read(5)
    with pytest.raises(TrialNotFoundError, match="no trial number 5"):
        store.trials.by_number(campaign, 5)


def test_trials_are_listed_by_number_state_and_page(store: Store) -> None:
    campaign, worker = make_campaign(store), make_worker(store)
    for tp in (1, 2, 4, 8):
        store.trials.add(campaign, Layout(tp=tp))
    lease = lease_one(store, worker.id)
    store.outcomes.post(lease.trial_id, 1, completed())
    assert [t.number for t in store.trials.find(campaign)] == [1, 2, 3, 4]
    assert [t.number for t in store.trials.find(campaign, after_number=1, limit=2)] == [2, 3]
    assert [t.number for t in store.trials.find(campaign, states=("COMPLETED", "RUNNING"))] == [1]
    assert store.trials.by_number(campaign, 3).layout.tp == 4
    assert store.campaigns.count_trials(campaign) == {
        "PENDING": 3,
        "RUNNING": 0,
        "COMPLETED": 1,
        "INFEASIBLE": 0,
        "FAILED": 0,
        "CANCELLED": 0,
    }


def test_the_order_of_endings_is_kept_whatever_the_order_of_beginnings(store: Store) -> None:
    campaign, worker = make_campaign(store), make_worker(store)
    ids = [store.trials.add(campaign, Layout(tp=tp)).id for tp in (1, 2, 4)]
    store.leases.lease(worker.id, 3)
    store.outcomes.post(ids[2], 1, failed("out_of_memory"))
    store.outcomes.post(ids[0], 1, completed())
    told = store.trials.ended_since(campaign, 0)
    assert [(t.id, t.ended_seq) for t in told] == [(ids[2], 1), (ids[0], 2)]
    store.campaigns.cancel(campaign)
    store.outcomes.post(ids[1], 1, failed("cancelled"))
    assert [t.id for t in store.trials.ended_since(campaign, 2)] == [ids[1]]


def test_the_leaderboard_ranks_by_each_objective_the_best_first(store: Store) -> None:
    campaign, worker = make_campaign(store), make_worker(store)
    slow = run_trial(store, campaign, Layout(tp=1), worker.id, tokens_per_s=100.0)
    fast = run_trial(store, campaign, Layout(tp=4), worker.id, tokens_per_s=300.0)
    tied = run_trial(store, campaign, Layout(tp=2), worker.id, tokens_per_s=300.0)
    assert [t.id for t in ranked_trials(store, campaign, "tokens_per_s")] == [fast, tied, slow]
    assert [t.id for t in ranked_trials(store, campaign, "tokens_per_s_per_device")] == [
        tied,
        slow,
        fast,
    ]
    second = ranked_trials(store, campaign, "tokens_per_s", limit=1, offset=1)
    assert [t.id for t in second] == [tied]
    assert store.leaderboard.ranked_summary(campaign).num_ranked == 3


def test_only_completed_trials_that_had_devices_of_their_own_are_ranked(store: Store) -> None:
    campaign, other, worker = make_campaign(store), make_campaign(store, "b"), make_worker(store)
    run_trial(store, campaign, Layout(tp=2), worker.id, oversubscribed=True, tokens_per_s=9e9)
    run_trial(store, other, Layout(), worker.id)
    broken = store.trials.add(campaign, Layout(tp=4))
    lease_one(store, worker.id)
    store.outcomes.post(broken.id, 1, failed())
    good = run_trial(store, campaign, Layout(), worker.id)
    assert [t.id for t in ranked_trials(store, campaign, "tokens_per_s")] == [good]
    assert store.leaderboard.ranked_summary(campaign).num_ranked == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_of_a_campaign_ranks(store: Store, objective: str) -> None:
    campaign, worker = make_campaign(store), make_worker(store)
    ids = {}
    for tp, value in ((1, 1000.0), (2, 3000.0), (4, 2000.0)):
        # The rate of a device follows from that of all, and so does that of a node.
        # So do the FLOP/s of a device, whose peak decides the shares.
        rate = value if objective in ("tokens_per_s", "tokens_per_node_hour") else value * tp
        figures = {"tokens_per_s": rate, "peak_tflops_per_device": 1.0}
        ids[value] = run_trial(store, campaign, Layout(tp=tp), worker.id, **figures)
    ranked = [trial.id for trial in ranked_trials(store, campaign, objective)]
    assert ranked == [ids[3000.0], ids[2000.0], ids[1000.0]]


def test_an_unknown_objective_is_refused_with_the_choices(store: Store) -> None:
    with pytest.raises(
        ObjectiveUnknownError, match="'speed' is not one of tokens_per_s_per_device"
    ):
        ranked_trials(store, make_campaign(store), "speed")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "impossible",
    [
        {"state": "DREAMING"},
        {"state": "COMPLETED"},
        {"state": "RUNNING"},
        {"reason": "crashed"},
        {"num_devices": 7},
        {"global_batch_size": 7},
        {"repeat_index": 1},
        {"ended_seq": 1},
        {"campaign_id": 99},
    ],
)
def test_the_schema_refuses_what_must_never_be(store: Store, impossible: dict[str, object]) -> None:
    trial = store.trials.add(make_campaign(store), Layout())
    with pytest.raises(IntegrityError), store._db.write() as session:
        session.execute(update(Trial).where(Trial.id == trial.id).values(**impossible))
    with store._db.read() as session:
        assert session.scalar(select(Trial.state)) == "PENDING"


def test_only_a_layout_that_was_tried_is_called_a_duplicate(store: Store) -> None:
    campaign = make_campaign(store)
    store.trials.add(campaign, Layout())
    with store._db.write() as session:
        # Damaged: the next number is taken.
        session.execute(update(Campaign).values(last_number=0))
    with pytest.raises(IntegrityError, match=r"trials\.number|uq_trials_campaign_id_number"):
        store.trials.add(campaign, Layout(tp=2))
    with store._db.write() as session:
        session.execute(update(Campaign).values(last_number=1))
    with pytest.raises(TrialDuplicateError):
        store.trials.add(campaign, Layout())


class FromPostgres(Exception):
    """What psycopg raises, as far as it is looked at."""

    def __init__(self, constraint_name: str | None) -> None:
        self.diag = SimpleNamespace(constraint_name=constraint_name)


@pytest.mark.parametrize(
    ("table", "columns"),
    [("campaigns", ("name",)), ("trials", ("campaign_id", "layout_key", "repeat_index"))],
)
def test_a_broken_constraint_is_known_by_its_name_where_the_database_tells_it(
    table: str, columns: tuple[str, ...]
) -> None:
    (name,) = (
        str(constraint.name)
        for constraint in Base.metadata.tables[table].constraints
        if isinstance(constraint, UniqueConstraint)
        and tuple(column.name for column in constraint.columns) == columns
    )
    for told, broken in ((name, True), (f"{name}_too", False), (None, False)):
        error = IntegrityError("INSERT", {}, FromPostgres(told))
        assert breaks_unique(error, table, *columns) is broken
