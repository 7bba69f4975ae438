"""The driver's lease, one tenure at a time, and the plans that wait for the driver."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Final

import pytest

from layout_tuner.predictions.belief.plan import make_plan
from layout_tuner.predictions.statistics.job_duration import TrainingJob
from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.campaigns.driver_lease import DRIVER_LEASE_S, DriverLease
from layout_tuner.results_db.campaigns.plans import MAX_WAITING, PlanOptions
from layout_tuner.results_db.errors import DriverLeaseLostError, PlanLimitError, PlanNotFoundError
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.campaigns import spec_of
from tests.kit.store import TurnableClock, at_once, make_spec

pytestmark = pytest.mark.sqlite_is_enough


def acquired(store: Store) -> DriverLease:
    lease = store.driver.acquire()
    assert lease is not None
    return lease


def test_the_lease_is_free_before_the_first_driver_and_after_a_release(store: Store) -> None:
    assert store.driver.lease().seen_at is None
    assert store.driver.lease().is_free(store.now())
    lease = acquired(store)
    assert (lease.fence, lease.seen_at) == (1, store.now())
    assert store.driver.lease().seen_at == store.now()
    store.driver.release(lease.fence)
    assert acquired(store).fence == 2
    with pytest.raises(DriverLeaseLostError):
        store.driver.release(lease.fence)
    assert store.driver.lease().released_at is None


def test_a_driver_has_the_lease_while_it_renews_it(store: Store, clock: TurnableClock) -> None:
    first = acquired(store)
    for _ in range(5):
        clock.forward(DRIVER_LEASE_S - 1)
        assert store.driver.acquire() is None
        store.driver.renew(first.fence)
    clock.forward(DRIVER_LEASE_S + 0.1)
    assert acquired(store).fence == first.fence + 1
    with pytest.raises(DriverLeaseLostError, match="another driver has taken over since fence 1"):
        store.driver.renew(first.fence)


def test_a_silent_driver_has_its_lease_until_a_takeover(store: Store, clock: TurnableClock) -> None:
    lease = acquired(store)
    clock.forward(3600)
    store.as_driver(lease.fence).driver.move_clocks()
    store.driver.renew(lease.fence)
    # One that stands still is taken over after the clock was set back, too.
    seen = store.driver.lease()
    clock.forward(-3600)
    assert store.driver.acquire() is None
    assert store.driver.acquire(unchanged=seen) is not None
    # What was watched is another tenure by now.
    assert store.driver.acquire(unchanged=seen) is None


WRITES: Final[tuple[Callable[[Store, int, int], Any], ...]] = (
    lambda store, campaign, _: store.trials.add(campaign, Layout(tp=2)),
    lambda store, _, trial: store.trials.repeat(trial),
    lambda store, _, __: store.driver.move_clocks(),
    lambda store, campaign, _: store.campaigns.cancel_pending(campaign, "time is up"),
    lambda store, campaign, _: store.campaigns.end(campaign, "COMPLETED", "budget", "done"),
)


def test_a_driver_without_lease_cannot_write(
    store: Store, clock: TurnableClock, campaign: int
) -> None:
    trial = store.trials.add(campaign, Layout())
    store.campaigns.cancel_pending(campaign, "so that it can be repeated")
    lost = store.as_driver(acquired(store).fence)
    clock.forward(DRIVER_LEASE_S + 1)
    active = store.as_driver(acquired(store).fence)
    for write in WRITES:
        before = (store.campaigns.get(campaign), store.trials.find(campaign))
        with pytest.raises(DriverLeaseLostError):
            write(lost, campaign, trial.id)
        assert (store.campaigns.get(campaign), store.trials.find(campaign)) == before
        write(active, campaign, trial.id)


@pytest.mark.sqlite_is_enough(False)
def test_of_many_that_take_over_at_once_one_does(database_url: str) -> None:
    with ExitStack() as stack:
        stores = [stack.enter_context(closing(Store(database_url))) for _ in range(6)]
        leases = at_once(*(store.driver.acquire for store in stores))
    assert [lease.fence for lease in leases if lease is not None] == [1]


@pytest.mark.sqlite_is_enough(False)
def test_a_takeover_waits_for_the_writer(store: Store, clock: TurnableClock, campaign: int) -> None:
    driver = store.as_driver(acquired(store).fence)
    clock.forward(DRIVER_LEASE_S + 1)
    with ThreadPoolExecutor(1) as pool:
        with driver._db.write():
            taken_over = pool.submit(acquired, store)
            with pytest.raises(TimeoutError):
                taken_over.result(0.3)
        assert taken_over.result(30).fence == 2
    with pytest.raises(DriverLeaseLostError):
        driver.trials.add(campaign, Layout())


OPTIONS = PlanOptions(top=3, probe_start_s=5.0, job=TrainingJob(tokens=10**9, num_nodes=2))


def test_plans_are_made_in_order_and_watchers_see_how_they_end(store: Store) -> None:
    assert store.plans.waiting() == []
    first = store.plans.request(make_spec("first"), OPTIONS)
    second = store.plans.request(make_spec("second"), PlanOptions())
    assert store.plans.waiting() == [(first.id, "system"), (second.id, "system")]
    assert first == store.plans.get(first.id)
    before = store.live.state()
    assert before.plans == {first.id: ("WAITING", "system"), second.id: ("WAITING", "system")}
    store.plans.end(first.id, "no layout is legal")
    after = store.live.state(before).plans
    assert after == {first.id: ("FAILED", "system"), second.id: ("WAITING", "system")}
    ended = store.plans.get(first.id)
    assert (ended.state, ended.problem, ended.answer) == ("FAILED", "no layout is legal", {})
    assert ended.ended_at is not None
    assert store.plans.waiting() == [(second.id, "system")]


@pytest.mark.sqlite_is_enough(False)
def test_a_plan_is_stored_as_it_was_made(store: Store) -> None:
    space = {"global_batch_size": 64, "num_nodes": [1, 2], "tp": [1, 2, 4]}
    spec = spec_of(model="gpt-1.3b", space=space)
    waiting = store.plans.request(spec.to_mapping(), OPTIONS)
    assert PlanOptions.from_mapping(waiting.options) == OPTIONS
    assert CampaignSpec.from_mapping(waiting.spec) == spec
    plan = store.plans.make(spec, OPTIONS)
    assert plan == make_plan(spec, top=3, probe_start_s=5.0, job=OPTIONS.job)
    store.plans.end(waiting.id, plan)
    done = store.plans.get(waiting.id)
    assert done.state == "DONE"
    assert done.answer["layouts"][0]["layout_key"] == plan.layouts[0].layout_key
    assert done.answer["job"] == asdict(OPTIONS.job)  # type: ignore[arg-type]
    store.plans.end(waiting.id, "too late")
    assert store.plans.get(waiting.id) == done, "it had ended"


def test_few_plans_wait_and_a_plan_is_kept_for_a_day(store: Store, clock: TurnableClock) -> None:
    ids = [store.plans.request(make_spec("first"), OPTIONS).id for _ in range(MAX_WAITING)]
    with pytest.raises(PlanLimitError, match="8 plans of 'system' wait"):
        store.plans.request(make_spec("first"), OPTIONS)
    other = store.by(Actor(name="other", role="submitter"))
    assert other.plans.request(make_spec("first"), OPTIONS).created_by == "other"
    clock.forward(timedelta(hours=25).total_seconds())
    last = store.plans.request(make_spec("first"), OPTIONS)
    with pytest.raises(PlanNotFoundError, match=f"no plan {ids[0]}; plans are deleted after a day"):
        store.plans.get(ids[0])
    store.plans.end(ids[0], "nobody reads it")
    assert (last.id, "system") in store.plans.waiting()
