import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import UniqueConstraint, update
from sqlalchemy.exc import IntegrityError

from results_db.database.database import breaks_unique
from results_db.errors import (
    CampaignNotFoundError,
    ObjectiveUnknownError,
    TrialDuplicateError,
    TrialNotFoundError,
    TrialStateError,
)
from results_db.models.base import Base
from results_db.models.tables import Campaign, Trial
from results_db.records import REPEAT_REASONS
from results_db.store import Store
from search_spaces.spec.layout import LAYOUT_FIELDS, Layout
from tests.kit.store import (
    ODD,
    completed,
    failed,
    lease_one,
    make_campaign,
    make_environment,
    make_measurement,
    post_outcome,
    ranked_trials,
    run_trial,
    take_leases,
)


def test_a_layout_comes_back_as_it_was(store: Store, campaign: int) -> None:
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


def test_a_repeat_is_deliberate_and_says_what_it_repeats(
    store: Store, campaign: int, worker: str
) -> None:
    first = store.trials.add(campaign, Layout())
    with pytest.raises(TrialStateError, match="PENDING"):
        store.trials.repeat(first.id)
    post_outcome(store, first.id, lease_one(store, worker).attempt, completed())
    second = store.trials.get(run_trial(store, campaign, outcome=failed()))
    assert (second.repeat_of, second.repeat_index, second.number) == (first.id, 1, 2)
    assert store.trials.repeat(second.id).repeat_index == 2


def test_a_repeat_keeps_its_reason_and_one_for_a_user_is_a_request(
    store: Store, campaign: int
) -> None:
    first = run_trial(store, campaign)
    crashed = run_trial(store, campaign, Layout(tp=2), outcome=failed())
    assert store.trials.get(first).repeat_reason is None
    for reason in REPEAT_REASONS:
        again = store.trials.repeat(first, reason=reason)
        assert store.trials.get(again.id).repeat_reason == reason
    (asked,) = store.trials.measure_again(first)
    assert (asked.repeat_reason, store.trials.requeue(crashed).repeat_reason) == ("request",) * 2


FP16: dict[str, Any] = {
    "iterations": tuple(
        dataclasses.replace(each, grad_norm=None if each.index == 0 else each.grad_norm)
        for each in make_measurement(Layout(pp=2)).iterations
    ),
    "skipped_steps": 1,
    "warmup_settled": False,
    "peak_reserved_bytes_by_stage": (7 << 30, 6 << 30),
}
"""What fp16 on a GPU adds to a measurement."""


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(pp=4), {}),
        (Layout(pp=2, precision="fp16"), FP16),
        (Layout(), {"others_share": 0.25, "throttled": True}),
        (Layout(), {"breakdown": None}),
        (Layout(tp=2), {"shortened": True, "iterations_asked": 10, "timed": 3}),
    ],
)
def test_a_completed_trial_keeps_all_that_was_measured(
    store: Store, campaign: int, layout: Layout, changes: dict[str, Any]
) -> None:
    detail = store.trials.detail(run_trial(store, campaign, layout, **changes))
    sent = vars_of(make_measurement(layout, **changes))
    assert detail.trial.state == "COMPLETED"
    assert detail.iterations == sent.pop("iterations")
    assert vars_of(detail.trial.measurement) == sent
    assert detail.environment == make_environment()
    assert detail.log_tail == "the last line\n"
    assert [(a.attempt, a.ending, a.worker_name) for a in detail.attempts] == [
        (1, "reported", "w1")
    ]
    (ranked,) = ranked_trials(store, campaign, "tokens_per_s")
    assert ranked == detail.trial


def vars_of(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def test_an_unknown_trial_is_named_in_the_error(store: Store, campaign: int) -> None:
    for read in (store.trials.get, store.trials.detail, store.trials.repeat):
        with pytest.raises(TrialNotFoundError, match="no trial 5"):
            read(5)
    with pytest.raises(TrialNotFoundError, match="no trial number 5"):
        store.trials.by_number(campaign, 5)


def test_trials_are_listed_by_number_state_and_page(
    store: Store, campaign: int, worker: str
) -> None:
    run_trial(store, campaign)
    for tp in (2, 4, 8):
        store.trials.add(campaign, Layout(tp=tp))
    assert [t.number for t in store.trials.find(campaign)] == [1, 2, 3, 4]
    assert [t.number for t in store.trials.find(campaign, states=("COMPLETED", "RUNNING"))] == [1]
    assert store.trials.by_number(campaign, 3).layout.tp == 4
    none = dict.fromkeys(("RUNNING", "INFEASIBLE", "FAILED", "CANCELLED"), 0)
    assert store.campaigns.count_trials(campaign) == {"PENDING": 3, "COMPLETED": 1, **none}


def test_the_order_of_endings_is_kept_whatever_the_order_of_beginnings(
    store: Store, campaign: int, worker: str
) -> None:
    ids = [store.trials.add(campaign, Layout(tp=tp)).id for tp in (1, 2, 4)]
    take_leases(store, worker, 3)
    post_outcome(store, ids[2], 1, failed("out_of_memory"))
    post_outcome(store, ids[0], 1, completed())
    told = store.trials.ended_since(campaign, 0)
    assert [(t.id, t.ended_seq) for t in told] == [(ids[2], 1), (ids[0], 2)]
    store.campaigns.cancel(campaign)
    post_outcome(store, ids[1], 1, failed("cancelled"))
    assert [t.id for t in store.trials.ended_since(campaign, 2)] == [ids[1]]


def test_an_unknown_objective_is_refused_with_the_choices(store: Store, campaign: int) -> None:
    with pytest.raises(
        ObjectiveUnknownError, match="'speed' is not one of tokens_per_s_per_device"
    ):
        ranked_trials(store, campaign, "speed")


def test_only_a_layout_that_was_tried_is_called_a_duplicate(store: Store, campaign: int) -> None:
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
