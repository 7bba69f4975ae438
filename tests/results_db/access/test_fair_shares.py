"""Fair shares: whose trial is leased next, and what use is counted."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from layout_tuner.protocol.worker_messages import AllocationBody
from layout_tuner.results_db.access.owners_and_groups import Sharing
from layout_tuner.results_db.access.shares import OF_ATTEMPTS
from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.allocations.leases import LEASE_S
from layout_tuner.results_db.models.service_tables import PastUse
from layout_tuner.results_db.owner_turns import OwnerTurns
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.simulator import SIMULATED_LAUNCHER, is_simulator, simulator_trainer
from tests.kit.store import (
    TimelyStore,
    TurnableClock,
    at_once,
    failed,
    lease_one,
    make_spec,
    make_worker,
    post_outcome,
    send_beats,
    take_leases,
)
from tests.results_db.allocations.test_leases import beat
from tests.results_db.database.test_query_plans import statements_of

pytestmark = pytest.mark.sqlite_is_enough

DAY_S = 86_400.0


def make(store: Store, owner: str, name: str = "", *, trials: int = 8, **changes: object) -> int:
    """A campaign of an owner with trials that wait."""
    shared = {name: changes.pop(name) for name in ("priority", "visibility") if name in changes}
    sharing = Sharing(**shared)  # type: ignore[arg-type]
    own = store.by(Actor(name=owner, role="submitter"))
    spec = make_spec(name or f"of-{owner}", **changes)
    made = own.campaigns.create(spec, num_legal_layouts=100, sharing=sharing)
    for number in range(trials):
        store.trials.add(made.id, Layout(micro_batch_size=number + 1))
    return made.id


def run(store: Store, worker: str, number: int, seconds: float = 100.0) -> list[str]:
    """Leases and ends so many trials, one after the other; returns their owners."""
    owners = []
    for _ in range(number):
        lease = lease_one(store, worker)
        owners.append(store.campaigns.get(store.trials.get(lease.trial_id).campaign_id).created_by)
        post_outcome(store, lease.trial_id, lease.attempt, failed(duration_s=seconds))
    return owners


def used(store: Store) -> dict[tuple[str, bool], float]:
    with store._db.read() as session:
        rows = session.execute(select(PastUse.owner, PastUse.trainer, OF_ATTEMPTS)).all()
    found: Counter[tuple[str, bool]] = Counter()
    for owner, trainer, node_seconds in rows:
        found[owner, is_simulator(trainer)] += node_seconds
    return found


def test_shares_follow_the_weights(store: Store, worker: str) -> None:
    for owner, weight in (("a", 1.0), ("b", 1.0), ("c", 2.0), ("d", 4.0)):
        store.owners.put_owner(owner, weight=weight)
        make(store, owner, trials=40)
    assert Counter(run(store, worker, 64)) == {"a": 8, "b": 8, "c": 16, "d": 32}


def test_a_group_s_weight_multiplies_its_members(store: Store, worker: str) -> None:
    make(store, "a", trials=30)
    make(store, "b", trials=30)
    store.owners.put_group("lab", weight=3.0, members=["b"], known_members=False)
    store.owners.put_group("other", weight=0.5, members=["b"], known_members=False)
    assert Counter(run(store, worker, 40)) == {"a": 10, "b": 30}


def test_six_campaigns_get_what_one_gets(store: Store, worker: str) -> None:
    for number in range(6):
        make(store, "a", f"a{number}", trials=20)
    make(store, "b", trials=40)
    assert Counter(run(store, worker, 40)) == {"a": 20, "b": 20}


def test_what_costs_more_gets_fewer_turns(store: Store, worker: str) -> None:
    make(store, "a", trials=30)
    make(store, "b", trials=30)
    turns: Counter[str] = Counter()
    for _ in range(22):
        lease = lease_one(store, worker)
        is_a = lease.campaign_name == "of-a"
        turns["a" if is_a else "b"] += 1
        seconds = 100.0 if is_a else 10.0
        post_outcome(store, lease.trial_id, lease.attempt, failed(duration_s=seconds))
    assert turns == {"a": 2, "b": 20}


def test_one_batch_is_shared_too(store: Store, worker: str) -> None:
    store.owners.put_owner("b", weight=3.0)
    for owner in "ab":
        make(store, owner, trials=30)
    leases = take_leases(store, worker, 16)
    assert Counter(each.campaign_name for each in leases) == {"of-a": 4, "of-b": 12}


def test_cheap_probes_of_low_priority_buy_no_turns(store: Store, worker: str) -> None:
    make(store, "b", "cheap", trials=2, priority=-5)
    run(store, worker, 1, 0.001)
    for owner in "ab":
        make(store, owner, trials=30)
    assert sorted(run(store, worker, 2)) == ["a", "b"]
    leases = take_leases(store, worker, 16)
    assert Counter(each.campaign_name for each in leases) == {"of-a": 8, "of-b": 8}


@pytest.mark.sqlite_is_enough(False)
def test_a_priority_is_none_among_owners(store: Store, worker: str) -> None:
    make(store, "a", trials=1)
    make(store, "b", trials=1, priority=1000)
    assert run(store, worker, 2) == ["a", "b"]


def test_running_trials_count_by_what_they_hold(
    store: Store, clock: TurnableClock, worker: str
) -> None:
    make(store, "a")
    lease_one(store, worker)
    make(store, "b", trials=8)
    clock.forward(1000)
    assert run(store, worker, 5) == ["b"] * 5


def test_lost_attempts_are_counted(store: Store, clock: TurnableClock, worker: str) -> None:
    make(store, "a")
    lease = lease_one(store, worker)
    clock.forward(10)
    send_beats(store, worker, [beat(lease.trial_id, phase="iterating")])
    clock.forward(LEASE_S + 1)
    store.leases.expire()
    assert used(store) == {("a", False): pytest.approx(10.0)}


def test_a_late_outcome_corrects_the_use(store: Store, clock: TurnableClock, worker: str) -> None:
    make(store, "a", trials=1)
    lease = lease_one(store, worker)
    clock.forward(10)
    send_beats(store, worker, [beat(lease.trial_id, phase="iterating")])
    clock.forward(LEASE_S + 1)
    store.leases.expire()
    post_outcome(store, lease.trial_id, lease.attempt, failed(duration_s=4.0))
    assert used(store)["a", False] == pytest.approx(4.0, rel=1e-3)


def test_use_halves_in_a_half_life(store: Store, clock: TurnableClock, worker: str) -> None:
    store.shares.use_half_life(2 * DAY_S)
    make(store, "a")
    run(store, worker, 1, 64.0)
    shown = []
    for days in (0, 0.49, 0.01, 2, 2):  # the clock begins at noon
        clock.forward(days * DAY_S)
        shown.append(store.shares.find()[0].node_hours * 3600)
    assert shown == pytest.approx([64, 64, 64, 32, 16])
    run(store, worker, 1, 4.0)
    assert store.shares.find()[0].node_hours * 3600 == pytest.approx(20.0)


def test_the_default_half_life_is_slurm_s(store: Store, clock: TurnableClock, worker: str) -> None:
    make(store, "a")
    run(store, worker, 1, 64.0)
    clock.forward(7.5 * DAY_S)
    assert store.shares.find()[0].node_hours * 3600 == pytest.approx(32.0)


def test_use_of_ten_half_lives_ago_is_gone(store: Store, clock: TurnableClock, worker: str) -> None:
    make(store, "a", trials=9)
    run(store, worker, 1, 1e6)
    clock.forward(70 * DAY_S)
    assert store.shares.find()[0].node_hours > 0
    clock.forward(1 * DAY_S)
    assert store.shares.find()[0].node_hours == 0


def test_a_clock_set_back_keeps_the_use(store: Store, clock: TurnableClock, worker: str) -> None:
    make(store, "a")
    run(store, worker, 1, 64.0)
    clock.now -= timedelta(days=400)
    assert store.shares.find()[0].node_hours * 3600 == pytest.approx(64.0)


def test_a_restart_forgets_nothing(database_url: str, clock: TurnableClock) -> None:
    owners = []
    for _ in range(4):
        with closing(Store(database_url, clock=clock)) as store:
            if not owners:
                worker = make_worker(store).id
                make(store, "a")
                make(store, "b")
            owners.append(lease_one(store, worker).campaign_name)
            clock.forward(1)
    assert Counter(owners) == {"of-a": 2, "of-b": 2}


def test_simulated_use_is_apart(store: Store, worker: str) -> None:
    simulated = {"simulated": {"seed": 1}, "probe": {"trainer": simulator_trainer()}}
    make(store, "a", "simulated", **simulated)
    make(store, "a")
    make(store, "b")
    simulator = make_worker(
        store,
        "simulator",
        allocation=AllocationBody(launcher=SIMULATED_LAUNCHER),
        trainers=[simulator_trainer()],
    ).id
    assert run(store, simulator, 4, 1000.0) == ["a"] * 4
    assert Counter(run(store, worker, 6)) == {"a": 3, "b": 3}
    assert set(used(store)) == {("a", True), ("a", False), ("b", False)}


def test_a_higher_priority_comes_first(store: Store, worker: str) -> None:
    make(store, "a", "plain", trials=2)
    make(store, "a", "urgent", trials=3, priority=5)
    make(store, "a", "later", trials=1, priority=-1)
    names = [each.campaign_name for each in take_leases(store, worker, 9)]
    assert names == ["urgent"] * 3 + ["plain"] * 2 + ["later"]


def test_priority_counts_within_an_owner_alone(store: Store, worker: str) -> None:
    make(store, "a", trials=20)
    make(store, "b", trials=20, priority=1000)
    assert Counter(run(store, worker, 20)) == {"a": 10, "b": 10}


def test_queries_do_not_grow_with_trials(store: Store, worker: str) -> None:
    for owner in "ab":
        make(store, owner, trials=40)
    take_leases(store, worker, 2)
    counts = []
    for number in (4, 40):
        with statements_of(store) as ran:
            assert len(take_leases(store, worker, number)) == number
        counts.append(len([sql for sql, _ in ran if sql.startswith("SELECT")]))
    assert counts[0] == counts[1]


@pytest.mark.sqlite_is_enough(False)
def test_outcomes_at_once_lose_no_use(store: Store, worker: str) -> None:
    for owner in "abcd":
        make(store, owner, trials=8)
    leases = take_leases(store, worker, 32)
    ends = [
        lambda lease=lease: post_outcome(  # type: ignore[misc]
            store, lease.trial_id, lease.attempt, failed(duration_s=10.0)
        )
        for lease in leases
    ]
    for start in range(0, 32, 8):
        at_once(*ends[start : start + 8])
    assert used(store) == {(owner, False): pytest.approx(80.0, rel=1e-3) for owner in "abcd"}


@pytest.mark.sqlite_is_enough(False)
def test_two_services_lease_by_the_same_shares(
    database_url: str, clock: TurnableClock, store: Store
) -> None:
    if not store.is_shared:
        pytest.skip("SQLite has one service")
    with closing(TimelyStore(database_url, clock=clock)) as other:
        store.owners.put_owner("b", weight=3.0)
        for owner in "ab":
            make(store, owner, trials=40)
        workers = [make_worker(each, f"w{n}").id for n, each in enumerate((store, other))]
        owners: Counter[str] = Counter()
        for _ in range(10):
            pair = at_once(lambda: run(store, workers[0], 1), lambda: run(other, workers[1], 1))
            owners += Counter(name for (name,) in pair)
    assert 13 <= owners["b"] <= 17


@settings(deadline=None)
@given(
    owners=st.lists(st.tuples(st.floats(0.1, 10.0), st.floats(1.0, 10.0)), min_size=2, max_size=5)
)
def test_no_owner_is_starved(owners: list[tuple[float, float]]) -> None:
    """The others' turns between two of one owner are bounded by weights and costs of trials."""
    names = [str(number) for number in range(len(owners))]
    weights = {name: weight for name, (weight, _) in zip(names, owners, strict=True)}
    costs = {name: cost for name, (_, cost) in zip(names, owners, strict=True)}
    has, turns = dict.fromkeys(names, 0.0), OwnerTurns()
    since = dict.fromkeys(names, 0)
    for _ in range(300):
        served = next(turns.order(names, str, held=has, weights=weights))
        turns.note(served)
        has[served] += costs[served]
        since = {name: since[name] + 1 for name in names} | {served: 0}
        for name in names:
            step = costs[name] / weights[name]
            others = (step * weights[each] / costs[each] + 2 for each in names if each != name)
            assert since[name] <= sum(others)


@pytest.mark.parametrize("viewer", ["a", "c"])
def test_one_sees_one_s_own_share(store: Store, worker: str, viewer: str) -> None:
    make(store, "a", trials=6)
    run(store, worker, 1, 300.0)
    make(store, "b", trials=6)
    store.owners.put_owner("b", weight=3.0)
    run(store, worker, 1, 100.0)
    (share,) = store.shares.find(owner="a")
    assert (share.cluster, share.is_simulated, share.waiting) == ("local-cpu", False, 5)
    assert (share.weight, share.entitled) == (1.0, 0.25)
    assert (share.had, share.node_hours) == (pytest.approx(0.75), pytest.approx(300 / 3600))
    assert len(store.shares.find()) == 2
    assert store.by(Actor(name=viewer, role="viewer")).shares.find() == store.shares.find()


def test_a_campaign_says_what_share_was_had(store: Store, worker: str) -> None:
    ids = {"a": make(store, "a", trials=6)}
    assert store.shares.why_waits(store.campaigns.get(ids["a"])) is None
    run(store, worker, 1, 300.0)
    ids["b"] = make(store, "b", trials=6)
    run(store, worker, 1, 100.0)
    why = {name: store.shares.why_waits(store.campaigns.get(id_)) for name, id_ in ids.items()}
    assert why["a"] == (
        "other owners are before: a has had 75% of the recent node-hours on local-cpu, and is "
        "entitled to 50%"
    )
    assert str(why["b"]).startswith("the devices are taken, b is next: b has had 25% of")
