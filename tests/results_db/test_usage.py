"""Usage: its sums are the costs of the trials, by whatever it is, also of deleted campaigns."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from datetime import date, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from layout_tuner.protocol.worker_messages import BeatBody, StatusBody
from layout_tuner.results_db.access.owners_and_groups import Sharing
from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.allocations.leases import LEASE_S
from layout_tuner.results_db.migrations import migrate
from layout_tuner.results_db.models.tables import Attempt, Campaign, Trial
from layout_tuner.results_db.records import LeaseRecord
from layout_tuner.results_db.service_records import USAGE_BY, USAGE_PARTS, UsageRead, UsageRow
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.simulator import simulator_trainer
from tests.kit.store import (
    START,
    TurnableClock,
    completed,
    failed,
    make_spec,
    make_worker,
    post_outcome,
    send_beats,
    take_leases,
)

pytestmark = pytest.mark.sqlite_is_enough(False)
FIRST = START.date()
DAY_S = 86400.0


def by(store: Store, owner: str) -> Store:
    return store.by(Actor(name=f"token-of-{owner}", role="submitter", owner=owner))


def make(store: Store, owner: str, name: str, *, price: str = "", **sharing: Any) -> int:
    spec = make_spec(name)
    spec["cluster"]["node_hour_price"] = price
    made = by(store, owner).campaigns.create(
        spec, num_legal_layouts=100, sharing=Sharing(**sharing)
    )
    return made.id


def worker_of(store: Store) -> str:
    return (store.workers.find() or [make_worker(store)])[0].id


def probe(store: Store, campaign: int, seconds: float, layout: Layout | None = None) -> int:
    """A probe on the node of a worker, which ends after some seconds; a repeat if it ran before."""
    worker = worker_of(store)
    layout = layout or Layout(dp=8)
    earlier = [each for each in store.trials.find(campaign) if each.layout == layout]
    trial = store.trials.repeat(earlier[0].id) if earlier else store.trials.add(campaign, layout)
    (lease,) = take_leases(store, worker, 1)
    store._clock.forward(seconds)  # type: ignore[attr-defined]
    post_outcome(store, trial.id, lease.attempt, completed(layout, duration_s=seconds))
    return trial.id


def whole(store: Store, by: Any = "owner", **asked: Any) -> UsageRead:
    return store.usage.read(by, FIRST, FIRST + timedelta(days=99), **asked)


def named(rows: Iterable[UsageRow]) -> dict[str | None, float]:
    return {row.name: round(3600 * row.node_hours, 3) for row in rows}


def end(store: Store, campaign: int, *, delete: bool = False) -> None:
    store.campaigns.cancel(campaign)
    if delete:
        store.campaigns.delete(campaign)


def test_rows_are_by_owner_group_campaign_cluster(store: Store) -> None:
    store.owners.put_group("lab", members=["ann"], known_members=False)
    for owner, name, seconds in (("ann", "a", 100), ("ann", "b", 200), ("bob", "c", 400)):
        probe(store, make(store, owner, name), seconds)
    assert named(whole(store).rows) == {"bob": 400, "ann": 300}
    assert named(whole(store, "group").rows) == {None: 400, "lab": 300}
    assert named(whole(store, "campaign").rows) == {"c": 400, "b": 200, "a": 100}
    assert named(whole(store, "cluster").rows) == {"local-cpu": 700}
    counts = [(row.name, row.campaigns, row.trials) for row in whole(store).rows]
    assert counts == [("bob", 1, 1), ("ann", 2, 2)]


def test_parts_are_probes_repeats_idle_lost(store: Store, clock: TurnableClock) -> None:
    campaign = make(store, "ann", "a")
    for layout in (Layout(dp=4), Layout(dp=4)):
        probe(store, campaign, 100, layout)
    trial = store.trials.add(campaign, Layout(dp=8))
    (lease,) = take_leases(store, worker_of(store), 1)
    clock.forward(10)
    post_outcome(store, trial.id, lease.attempt, failed("cancelled", duration_s=10))
    total = whole(store).total
    seconds = {part: round(3600 * getattr(total, part), 3) for part in USAGE_PARTS}
    assert seconds == {"probes": 50, "repeats": 50, "idle": 100, "lost": 10, "idle_allocations": 0}
    assert total.trials == 2


def test_an_attempt_counts_on_the_day_of_its_end(store: Store) -> None:
    campaign = make(store, "ann", "a")
    for _ in range(3):
        probe(store, campaign, 0.75 * DAY_S)
    days = [FIRST + timedelta(days=n) for n in range(4)]
    found = {row.name: round(3600 * row.node_hours / DAY_S, 6) for row in whole(store).days}
    assert found == {days[1].isoformat(): 0.75, days[2].isoformat(): 1.5}
    only = store.usage.read("owner", days[2], days[2])
    assert (only.total.trials, 3600 * only.total.node_hours) == (2, pytest.approx(1.5 * DAY_S))
    assert store.usage.read("owner", days[3], days[3]).rows == []


def test_idle_allocations_count_when_charged(store: Store, clock: TurnableClock) -> None:
    campaign = make(store, "ann", "a")
    worker = make_worker(store).id
    for seconds in (DAY_S, 3 * DAY_S):
        clock.forward(DAY_S)
        status = StatusBody(nodes=[], idle_node_s=seconds)
        send_beats(store, worker, [], status=status)
        store.allocations.share_idle_time()
    charged = store.campaigns.get(campaign).cost.idle
    assert charged > DAY_S
    assert 3600 * whole(store).total.idle_allocations == pytest.approx(charged)
    assert len(whole(store).days) == 2
    end(store, campaign, delete=True)
    assert 3600 * whole(store).total.idle_allocations == pytest.approx(charged)


def test_a_deleted_campaign_s_usage_stays(store: Store) -> None:
    store.owners.put_group("lab", members=["ann"], known_members=False)
    campaign = make(store, "ann", "a", price="2 EUR")
    for seconds in (3600, DAY_S, 7200):
        probe(store, campaign, seconds)
    end(store, campaign)
    before = {each: whole(store, each) for each in USAGE_BY}
    counters = store.statistics.service_stats().owner_node_seconds
    store.campaigns.delete(campaign)
    for each in USAGE_BY:
        after = whole(store, each)
        assert after.total == before[each].total
        assert after.days == before[each].days
        assert named(after.rows) == named(before[each].rows)
    assert whole(store, "campaign").rows[0].campaign_id is None
    stats = store.statistics.service_stats()
    assert stats.owner_node_seconds == pytest.approx(counters)
    assert counters["ann"] == pytest.approx(3600 + DAY_S + 7200)


def test_simulated_and_measured_are_never_mixed(store: Store) -> None:
    probe(store, make(store, "ann", "a"), 100)
    simulated = make_spec("s", trainer=simulator_trainer())
    made = by(store, "ann").campaigns.create(simulated, num_legal_layouts=9)
    with store._db.write() as session:
        session.get_one(Campaign, made.id).trainer = simulator_trainer()
    worker = make_worker(store, "w2", launcher="simulated", trainers={simulator_trainer(): ""})
    trial = store.trials.add(made.id, Layout())
    (lease,) = take_leases(store, worker.id, 1)
    post_outcome(store, trial.id, lease.attempt, failed("crashed", duration_s=7))
    for delete in (False, True):
        assert named(whole(store).rows) == {"ann": 100}
        assert named(whole(store, simulated=True).rows) == {"ann": 7}
        if not delete:
            end(store, made.id, delete=True)
    assert store.statistics.service_stats().owner_node_seconds == {"ann": pytest.approx(100)}


def test_money_is_by_currency_where_prices_are(store: Store) -> None:
    for name, price in (("a", "2 EUR"), ("b", "3.50 USD"), ("c", "")):
        probe(store, make(store, "ann", name, price=price), 1800)
    assert whole(store).total.money == {"EUR": pytest.approx(1), "USD": pytest.approx(1.75)}
    assert named(whole(store).rows) == {"ann": 5400}


def test_no_row_or_sum_tells_of_hidden_campaigns(store: Store) -> None:
    store.owners.put_group("lab", members=["ann", "bob"], known_members=False)
    for seconds, visibility in ((100, "private"), (200, "group"), (400, "everyone")):
        probe(store, make(store, "ann", visibility, visibility=visibility), seconds)
    seen = {"ann": 700, "bob": 600, "cid": 400}
    for delete in (False, True):
        for owner, seconds in seen.items():
            found = by(store, owner).usage.read("campaign", FIRST, FIRST)
            assert round(3600 * found.total.node_hours, 3) == seconds
            assert sum(named(found.rows).values()) == seconds
            stats = by(store, owner).statistics.service_stats()
            assert stats.owner_node_seconds == {"ann": pytest.approx(seconds)}
        if not delete:
            for campaign in store.campaigns.find():
                end(store, campaign.id, delete=True)


def test_savings_are_those_of_a_job_of_tokens(store: Store) -> None:
    baseline, best = Layout(dp=8), Layout(tp=8)
    spec = make_spec("a", baseline=baseline.to_mapping())
    campaign = by(store, "ann").campaigns.create(spec, num_legal_layouts=9).id
    make_worker(store)
    for layout, rate in ((baseline, 1000.0), (best, 1250.0)):
        trial = store.trials.add(campaign, layout)
        (lease,) = take_leases(store, worker_of(store), 1)
        post_outcome(
            store, trial.id, lease.attempt, completed(layout, duration_s=9, tokens_per_s=rate)
        )
    assert whole(store).total.saved_node_hours is None  # it goes on
    end(store, campaign)
    saved = whole(store).total.saved_node_hours
    # Without failures 10^12 tokens take 10^9 s at 1000 tokens/s, and 8 x 10^8 s at 1250.
    assert saved is not None
    assert 2e8 / 3600 < saved < 1.2 * 2e8 / 3600
    assert whole(store, tokens=10**10).total.saved_node_hours == pytest.approx(saved / 100)
    store.campaigns.delete(campaign)
    assert whole(store).total.saved_node_hours == saved


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["probe", "probe", "lose", "give back", "late", "idle", "delete", "move"]),
        st.integers(0, 5),
        st.floats(10, 1.5 * DAY_S),
    ),
    min_size=1,
    max_size=12,
)
SERIAL = itertools.count()


@settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(acts=ACTS)
def test_sums_are_the_trials_costs_to_the_second(store: Store, acts: list[Any]) -> None:
    clock: TurnableClock = store._clock  # type: ignore[assignment]
    for campaign in store.campaigns.to_drive():
        end(store, campaign.id)  # of the history before
    clock.forward(LEASE_S + 1)
    store.leases.expire()
    clock.forward(3 * DAY_S)
    begin = clock.now.date()
    for group in ("lab", "den"):
        store.owners.put_group(group, members=["ann", "bob"], known_members=False)
    campaigns = [submit(store, which) for which in range(6)]
    spent, idle = 0.0, 0.0
    of_groups: Counter[str | None] = Counter()
    for act, which, seconds in acts:
        if act == "idle":
            worker = make_worker(store, f"w{next(SERIAL)}").id
            clock.forward(seconds)
            send_beats(store, worker, [], status=StatusBody(nodes=[], idle_node_s=seconds))
            store.allocations.share_idle_time()
        elif act == "delete":
            costs = costs_of(store, campaigns[which])
            spent, idle = spent + costs[0], idle + costs[1]
            of_groups[store.campaigns.get(campaigns[which]).group] += sum(costs)
            end(store, campaigns[which], delete=True)
            campaigns[which] = submit(store, which)
        elif act == "move":
            group = ("lab", "den")[seconds > DAY_S] if which % 3 < 2 else None
            store.campaigns.update(campaigns[which], sharing={"group": group})
        else:
            run(store, campaigns[which], Layout(dp=1 + which), act, seconds)
    store.trials.add(campaigns[0], Layout(tp=2))
    take_leases(store, make_worker(store, f"w{next(SERIAL)}").id, 9)  # one runs on
    for campaign in campaigns:
        costs = costs_of(store, campaign)
        spent, idle = spent + costs[0], idle + costs[1]
        of_groups[store.campaigns.get(campaign).group] += sum(costs)
    last = clock.now.date()
    middle = begin + (last - begin) / 2
    found = sums(store, begin, last)
    by_group = named(store.usage.read("group", begin, last).rows)
    assert by_group == pytest.approx({k: v for k, v in of_groups.items() if k in by_group}, abs=1)
    parts = sums(store, begin, middle), sums(store, middle + timedelta(days=1), last)
    for each in USAGE_BY:
        assert found[each] == pytest.approx((spent, idle), abs=1)
        assert sum(part[each][0] for part in parts) == pytest.approx(spent, abs=1)
        assert sum(part[each][1] for part in parts) == pytest.approx(idle, abs=1)


def submit(store: Store, which: int) -> int:
    owner = ("ann", "bob", "cid")[which % 3]
    return make(store, owner, f"c{next(SERIAL)}", group=None if owner == "cid" else "lab")


def run(store: Store, campaign: int, layout: Layout, act: str, seconds: float) -> None:
    """Runs a trial of the layout: a first one, one that was given back or lost, or a repeat."""
    earlier = store.trials.find(campaign)
    if not earlier:
        store.trials.add(campaign, layout)
    elif all(each.ended_at for each in earlier):
        store.trials.repeat(earlier[0].id)
    (lease,) = take_leases(store, make_worker(store, f"w{next(SERIAL)}").id, 1)
    store._clock.forward(seconds)  # type: ignore[attr-defined]
    beat = BeatBody(trial_id=lease.trial_id, attempt=lease.attempt, iterations_done=1)
    send_beats(store, lease_worker(store, lease), [beat])
    if act in ("lose", "late"):
        store._clock.forward(LEASE_S + 1)  # type: ignore[attr-defined]
        assert store.leases.expire()
    if act != "lose":
        given_back = failed("cancelled", duration_s=seconds)
        outcome = completed(lease.layout, duration_s=seconds)
        said = given_back if act == "give back" else outcome
        post_outcome(store, lease.trial_id, lease.attempt, said)


def lease_worker(store: Store, lease: LeaseRecord) -> str:
    with store._db.read() as session:
        return session.get_one(Attempt, (lease.trial_id, lease.attempt)).worker_id


def sums(store: Store, since: date, until: date) -> dict[str, tuple[float, float]]:
    """Node-seconds of trials, and of idle allocations, by what usage is by."""
    found = {}
    for each in USAGE_BY:
        read = store.usage.read(each, since, until)
        for sum_of in ("node_hours", "trials", *USAGE_PARTS):
            total = getattr(read.total, sum_of)
            for rows in (read.rows, read.days):
                assert sum(getattr(row, sum_of) for row in rows) == pytest.approx(total)
        idle = 3600 * read.total.idle_allocations
        found[each] = 3600 * read.total.node_hours - idle, idle
    return found


def costs_of(store: Store, campaign: int) -> tuple[float, float]:
    """Node-seconds of a campaign's trials, and its share of idle allocations."""
    query = select(func.coalesce(func.sum(Trial.node_seconds), 0.0))
    with store._db.read() as session:
        of_trials = session.scalar(query.where(Trial.campaign_id == campaign))
        row = session.get_one(Campaign, campaign)
        return float(of_trials or 0.0), row.allocation_idle_node_seconds


def test_idle_time_of_before_keeps_its_place(store: Store, clock: TurnableClock) -> None:
    campaign = make(store, "ann", "a")
    clock.forward(2 * DAY_S)
    end(store, campaign)
    with store._db.write() as session:
        session.get_one(Campaign, campaign).allocation_idle_node_seconds = 720.0
        url = session.get_bind().engine.url.render_as_string(hide_password=False)
    store.close()
    migrate.downgrade(url, "r017")
    migrate.upgrade(url)
    (day,) = whole(store).days
    assert (day.name, day.idle_allocations) == ("2026-01-03", pytest.approx(0.2))
