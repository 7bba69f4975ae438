"""Plans that wait for the driver: in order, few at a time, and for a day."""

from dataclasses import asdict
from datetime import timedelta

import pytest

from results_db.campaigns.plans import MAX_WAITING, PlanOptions
from results_db.errors import PlanLimitError, PlanNotFoundError
from results_db.store import Store
from search_spaces.belief.plan import make_plan
from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.statistics.job_duration import TrainingJob
from tests.kit.store import TurnableClock, make_spec

pytestmark = pytest.mark.sqlite_is_enough

OPTIONS = PlanOptions(top=3, probe_start_s=5.0, job=TrainingJob(tokens=10**9, num_nodes=2))


def test_plans_are_made_in_order_and_watchers_see_how_they_end(store: Store) -> None:
    assert store.plans.next_open() is None
    first = store.plans.request(make_spec("first"), OPTIONS)
    second = store.plans.request(make_spec("second"), PlanOptions())
    assert store.plans.next_open() == first == store.plans.get(first.id)
    before = store.live.state()
    assert before.plans == {first.id: "WAITING", second.id: "WAITING"}
    store.plans.end(first.id, "no layout is legal")
    assert store.live.state(before).plans == {first.id: "FAILED", second.id: "WAITING"}
    ended = store.plans.get(first.id)
    assert (ended.state, ended.problem, ended.answer) == ("FAILED", "no layout is legal", {})
    assert ended.ended_at is not None
    assert store.plans.next_open() == second


@pytest.mark.sqlite_is_enough(False)
def test_a_plan_is_stored_as_it_was_made(store: Store) -> None:
    space = {"global_batch_size": 64, "num_nodes": [1, 2], "tp": [1, 2, 4]}
    spec = CampaignSpec.from_mapping(
        {"name": "first", "model": "gpt-1.3b", "cluster": "frontier", "space": space}
        | {"budget": {"trials": 5}}
    )
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
    with pytest.raises(PlanLimitError, match="8 plans wait"):
        store.plans.request(make_spec("first"), OPTIONS)
    clock.forward(timedelta(hours=25).total_seconds())
    last = store.plans.request(make_spec("first"), OPTIONS)
    with pytest.raises(PlanNotFoundError, match=f"no plan {ids[0]}; plans are deleted after a day"):
        store.plans.get(ids[0])
    store.plans.end(ids[0], "nobody reads it")
    assert store.plans.next_open() == last
