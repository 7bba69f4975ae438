"""Quotas: what is refused, what waits, and until when."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import select

from layout_tuner.results_db.access.quotas import end_of, start_of
from layout_tuner.results_db.actor import QUOTA_PERIODS, Actor, QuotaPeriod
from layout_tuner.results_db.errors import (
    OwnerInvalidError,
    OwnerNotFoundError,
    QuotaExceededError,
)
from layout_tuner.results_db.models.service_tables import MessageRow
from layout_tuner.results_db.store import Store
from layout_tuner.trainers.simulator import simulator_trainer
from tests.kit.store import (
    TimelyStore,
    TurnableClock,
    at_once,
    failed,
    lease_one,
    make_worker,
    post_outcome,
    take_leases,
)
from tests.results_db.access.test_fair_shares import make, run
from tests.results_db.access.test_webhooks import hook

pytestmark = pytest.mark.sqlite_is_enough


def budget(node_hours: float | None) -> dict[str, Any]:
    return {"trials": 10, "node_hours": node_hours, "wall_time_s": None}


def limit(store: Store, name: str = "a", kind: str = "owner", **how: Any) -> None:
    """One node-hour a day, and waiting beyond it, unless `how` says otherwise."""
    store.owners.put_owner("a", weight=1.0)
    given: dict[str, Any] = {"period": "day", "node_hours": 1.0, "beyond": "wait"} | how
    store.quotas.put(kind, name, given.pop("period"), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("period", "start", "end"),
    [
        ("day", (2024, 12, 31), (2025, 1, 1)),
        ("week", (2024, 12, 30), (2025, 1, 6)),
        ("month", (2024, 12, 1), (2025, 1, 1)),
        ("year", (2024, 1, 1), (2025, 1, 1)),
    ],
)
def test_periods_are_the_calendar_s(
    period: QuotaPeriod, start: tuple[int, int, int], end: tuple[int, int, int]
) -> None:
    now = datetime(2024, 12, 31, 23, 59, tzinfo=UTC)
    assert start_of(period, now) == datetime(*start, tzinfo=UTC)
    assert end_of(period, now) == datetime(*end, tzinfo=UTC)


@pytest.mark.parametrize("month", range(1, 13))
def test_each_month_ends_on_a_first(month: int) -> None:
    end = end_of("month", datetime(2023, month, 28, tzinfo=UTC))
    assert end == datetime(2023 + month // 12, month % 12 + 1, 1, tzinfo=UTC)


@pytest.mark.sqlite_is_enough(False)
def test_beyond_a_quota_no_trial_starts(store: Store, clock: TurnableClock, worker: str) -> None:
    limit(store)
    campaign = make(store, "a")
    make(store, "b", trials=1)
    assert set(run(store, worker, 2, 3600.0)) == {"a", "b"}
    assert take_leases(store, worker, 9) == []
    why = store.quotas.why_waits(store.campaigns.get(campaign))
    assert why == (
        "'a' has 0 of 1 node-hours left in this day, which ends at 2026-01-02 00:00 UTC; it waits"
    )
    clock.now = end_of("day", clock.now)
    assert run(store, worker, 1) == ["a"]
    assert store.quotas.why_waits(store.campaigns.get(campaign)) is None


def test_a_batch_stops_at_the_quota(store: Store, worker: str) -> None:
    limit(store, node_hours=2.5)
    make(store, "a", trials=8)
    run(store, worker, 1, 3600.0)
    leases = take_leases(store, worker, 9)
    assert len(leases) == 2
    for lease in leases:
        post_outcome(store, lease.trial_id, lease.attempt, failed(duration_s=60.0))


def test_unknown_probes_count_with_their_deadline(store: Store, worker: str) -> None:
    limit(store, node_hours=1.0)
    make(store, "a", trials=60, probe={"deadline_s": 1200.0})
    assert len(take_leases(store, worker, 60)) == 3
    assert take_leases(store, worker, 60) == []


def test_what_runs_counts_and_finishes(store: Store, clock: TurnableClock, worker: str) -> None:
    limit(store)
    make(store, "a")
    lease = lease_one(store, worker)
    clock.forward(3601)
    store.leases.extend()
    assert take_leases(store, worker, 1) == []
    assert post_outcome(store, lease.trial_id, lease.attempt, failed(duration_s=3601)).accepted


def test_a_group_s_quota_is_its_members_(store: Store, worker: str) -> None:
    store.owners.put_group("lab", members=["a", "b"], known_members=False)
    limit(store, "lab", "group")
    for owner in "abc":
        make(store, owner)
    assert run(store, worker, 1, 3600.0) == ["a"]
    assert run(store, worker, 4) == ["c"] * 4


def test_everyone_s_quota_is_each_owner_s(store: Store, worker: str) -> None:
    limit(store, "*")
    limit(store, "a", period="year", node_hours=100.0)
    for owner in "abc":
        make(store, owner)
    run(store, worker, 3, 3600.0)
    assert run(store, worker, 3) == ["a"] * 3


def test_simulated_node_hours_have_no_quota(store: Store, worker: str) -> None:
    limit(store, beyond="refuse")
    make(store, "a")
    run(store, worker, 1, 3600.0)
    simulated = {"simulated": {"seed": 1}, "probe": {"trainer": simulator_trainer()}}
    id_ = make(store, "a", "simulated", **simulated)
    assert store.quotas.why_waits(store.campaigns.get(id_)) is None


@pytest.mark.sqlite_is_enough(False)
def test_a_budget_beyond_a_quota_is_refused(store: Store, worker: str) -> None:
    limit(store, node_hours=10.0, beyond="refuse", period="month")
    make(store, "a", "within", budget=budget(10.0))
    run(store, worker, 1, 3600.0)
    with pytest.raises(QuotaExceededError) as refused:
        make(store, "a", "beyond", budget=budget(9.5))
    assert str(refused.value) == (
        "'a' has 9 of 10 node-hours left in this month, which ends at 2026-02-01 00:00 UTC, and "
        "this campaign may use 9.5: lower its budget's node_hours, wait, or ask an administrator "
        "for more"
    )
    assert [each.name for each in store.campaigns.find()] == ["within"]
    make(store, "a", "fits", budget=budget(9.0))
    make(store, "a", "without", budget=budget(None))
    make(store, "b", "of another", budget=budget(1e9))


def test_waiting_refuses_no_budget(store: Store) -> None:
    limit(store)
    make(store, "a", budget=budget(1e9))


def test_what_is_deleted_stays_used(store: Store, worker: str) -> None:
    limit(store)
    first = make(store, "a", "first", trials=1)
    run(store, worker, 1, 3600.0)
    store.campaigns.cancel(first)
    store.campaigns.delete(first)
    make(store, "a")
    assert take_leases(store, worker, 1) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"node_hours": 0.0}, "node_hours=0 is not above 0 and at most 1e"),
        ({"node_hours": 1e9}, "is not above 0 and at most"),
        ({"node_hours": float("nan")}, "is not above 0 and at most"),
        ({"until": datetime(2026, 1, 1, 11, tzinfo=UTC)}, "is past; leave it out"),
    ],
)
def test_a_bad_quota_changes_nothing(store: Store, given: dict[str, Any], said: str) -> None:
    limit(store)
    with pytest.raises(OwnerInvalidError, match=said):
        limit(store, **given)
    (quota,) = store.quotas.find()
    assert (quota.node_hours, quota.until) == (1.0, None)
    assert len(store.access.audit(action="quota.put")) == 1


@pytest.mark.sqlite_is_enough(False)
def test_quotas_set_at_once_are_one(store: Store) -> None:
    for period in QUOTA_PERIODS:
        hours = (1.0, 2.0, 3.0)
        put = [partial(limit, store, "*", period=period, node_hours=each) for each in hours]
        at_once(*put)
        (quota,) = [each for each in store.quotas.find() if each.period == period]
        assert quota.node_hours in hours


@pytest.mark.parametrize("kind", ["owner", "group"])
def test_a_quota_needs_its_owner(store: Store, kind: str) -> None:
    with pytest.raises(OwnerNotFoundError, match=f"there is no {kind} 'nobody'; .* {kind} list"):
        limit(store, "nobody", kind)
    assert store.quotas.find() == []


def test_a_quota_ends(store: Store, clock: TurnableClock, worker: str) -> None:
    limit(store, until=clock.now + timedelta(hours=2))
    make(store, "a")
    run(store, worker, 1, 3600.0)
    assert take_leases(store, worker, 1) == []
    clock.forward(7201)
    assert run(store, worker, 1) == ["a"]


def test_a_removed_quota_binds_no_more(store: Store, worker: str) -> None:
    limit(store)
    make(store, "a")
    run(store, worker, 1, 3600.0)
    store.quotas.remove("owner", "a", "day")
    assert run(store, worker, 1) == ["a"]
    with pytest.raises(OwnerNotFoundError, match="'a' has no quota for a day"):
        store.quotas.remove("owner", "a", "day")


def test_owners_read_quotas_on_them(store: Store, worker: str) -> None:
    store.owners.put_group("lab", members=["b"], known_members=False)
    limit(store)
    limit(store, "*", node_hours=7.0)
    limit(store, "lab", "group", period="week", node_hours=5.0)
    make(store, "b")
    run(store, worker, 1, 1800.0)
    own = store.by(Actor(name="b", role="submitter"))
    used = {q.name: q.used_node_hours for q in own.quotas.find(owner="b")}
    assert used == {"*": pytest.approx(0.5), "lab": pytest.approx(0.5)}
    assert [q.used_node_hours for q in own.quotas.find(owner="a")] == [0.0]
    every = [(q.name, q.used_node_hours) for q in store.quotas.find()]
    assert every == [("lab", pytest.approx(0.5)), ("*", None), ("a", 0.0)]


def test_80_percent_is_notified_once_a_period(
    store: Store, clock: TurnableClock, worker: str
) -> None:
    store.owners.put_group("lab", members=["b"], known_members=False)
    limit(store, "lab", "group", period="week", node_hours=3.0)
    limit(store, node_hours=10.0)
    hooks = [hook(by(store, owner), events=["quota.at_80_percent"]) for owner in "ab"]
    make(store, "a")
    said: list[int] = []
    for _ in range(4):
        run(store, worker, 1, 2.5 * 3600)
        store.quotas.notify_nearly_used()
        said.append(len(sent(store)))
    assert said == [0, 0, 0, 1]
    make(store, "b", trials=1)
    run(store, worker, 1, 2.5 * 3600)
    clock.now = end_of("day", clock.now)
    run(store, worker, 4, 2.5 * 3600)
    for _ in range(2):
        store.quotas._notified.clear()  # as in another process
        store.quotas.notify_nearly_used()
    assert [each.webhook_id for each in sent(store)] == [hooks[0], hooks[0], hooks[1]]
    texts = [each.data["text"] for each in sent(store)]
    assert texts[0] == (
        "'a' has 0 of 10 node-hours left in this day, which ends at 2026-01-02 00:00 UTC"
    )
    assert texts[2].startswith("the group 'lab' has 0.5 of 3 node-hours left in this week")


def test_a_group_s_quota_counts_what_is_hidden(store: Store, worker: str) -> None:
    store.owners.put_group("lab", members=["a", "b"], known_members=False)
    limit(store, "lab", "group", beyond="refuse")
    make(store, "a", visibility="private")
    run(store, worker, 1, 1800.0)
    lease_one(store, worker)
    with pytest.raises(QuotaExceededError, match=r"has 0 of 1 node-hours left"):
        make(store, "b", budget=budget(0.1))


def test_usage_before_a_quota_counts(store: Store, worker: str) -> None:
    make(store, "a")
    run(store, worker, 1, 3600.0)
    limit(store)
    assert take_leases(store, worker, 1) == []


@pytest.mark.sqlite_is_enough(False)
def test_forty_submissions_at_once_go_not_beyond(
    store: Store, database_url: str, clock: TurnableClock, worker: str
) -> None:
    limit(store, beyond="refuse")
    make(store, "a", "first", trials=9)
    run(store, worker, 1, 1800.0)
    refused: list[str] = []

    def submit(number: int) -> None:
        try:
            make(store, "a", f"c{number}", trials=0, budget=budget(0.5 + 0.01 * (number % 2)))
        except QuotaExceededError as error:
            refused.append(str(error))

    at_once(*(lambda number=number: submit(number) for number in range(40)))  # type: ignore[misc]
    assert len(store.campaigns.find()) == 1 + 20
    assert len(refused) == 20
    with closing(TimelyStore(database_url, clock=clock)) as other:
        stores = [store, other] if store.is_shared else [store]
        workers = [make_worker(each, f"n{n}").id for n, each in enumerate(stores * 4)]
        asks = zip(stores * 4, workers, strict=True)
        leased = at_once(*(lambda x=x, w=w: take_leases(x, w, 3) for x, w in asks))  # type: ignore[misc]
    leases = [each for some in leased for each in some]
    assert len(leases) == 1  # it is expected to take as long as the first
    post_outcome(store, leases[0].trial_id, leases[0].attempt, failed(duration_s=1800.0))
    assert take_leases(store, worker, 9) == []
    assert store.quotas.find()[0].used_node_hours == pytest.approx(1.0)


def by(store: Store, owner: str) -> Store:
    return store.by(Actor(name=owner, role="submitter"))


def sent(store: Store) -> list[MessageRow]:
    with store._db.read() as session:
        return list(session.scalars(select(MessageRow).order_by(MessageRow.id)))
