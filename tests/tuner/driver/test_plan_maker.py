"""The driver makes the plans that the service has left to it, beside its campaigns."""

from __future__ import annotations

import pytest

from results_db.campaigns.plans import PlanOptions
from results_db.store import Store
from search_spaces.belief.plan import make_plan
from search_spaces.campaigns.campaign import CampaignSpec
from tests.kit.waiting import wait_until
from tests.tuner.factories import FakeWorker, drive_until, ended, make_spec, submit
from tuner.driver.driver import Driver


def requested(store: Store, spec: CampaignSpec) -> int:
    return store.plans.request(spec.to_mapping(), PlanOptions(top=3)).id


def made(store: Store, plan_id: int, driver: Driver) -> None:
    wait_until(
        "the driver has made it",
        lambda: driver.step() and store.plans.get(plan_id).state != "WAITING",
    )


def test_plans_and_campaigns_go_on_side_by_side(store: Store) -> None:
    driver, worker = Driver(store), FakeWorker(store)
    campaign = submit(store, make_spec("runs", budget={"trials": 2}))
    plans = [requested(store, make_spec(f"planned-{number}")) for number in range(2)]
    drive_until(lambda: ended(store, campaign), driver.step, worker)
    made(store, plans[-1], driver)
    assert [store.plans.get(plan).state for plan in plans] == ["DONE"] * 2


def test_a_plan_is_made_though_no_campaign_runs_also_by_a_driver_that_takes_over(
    store: Store,
) -> None:
    spec = make_spec("planned")
    first, second = Driver(store), Driver(store)
    assert second.step(), "it looks, and finds nothing to do"
    plan = requested(store, spec)
    first.step()  # it begins, and never looks again
    assert store.plans.get(plan).state == "WAITING"
    made(store, plan, second)
    done = store.plans.get(plan)
    assert done.state == "DONE"
    assert [each["layout_key"] for each in done.answer["layouts"]] == [
        each.layout_key for each in make_plan(spec, top=3).layouts
    ]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"space": {"global_batch_size": 7, "dp": 2, "precision": "fp32"}}, "none of the 1 comb"),
        ({"cluster": None}, "cluster: the field is missing"),
        ({"budget": 5}, "budget"),
    ],
)
def test_a_plan_that_cannot_be_made_says_why_and_stops_nothing(
    store: Store, broken: dict[str, object], said: str
) -> None:
    driver = Driver(store)
    spec = make_spec("planned")
    wrong = store.plans.request({**spec.to_mapping(), **broken}, PlanOptions()).id
    right = requested(store, spec)
    made(store, right, driver)
    failed = store.plans.get(wrong)
    assert failed.state == "FAILED"
    assert said in failed.problem
    assert store.plans.get(right).state == "DONE"
