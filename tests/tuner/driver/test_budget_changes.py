"""A budget that users change reaches a driver that is at work."""

from __future__ import annotations

import pytest

from results_db.records import CampaignRecord
from results_db.store import Store
from tests.kit.store import TurnableClock
from tests.results_db.intercepted_store import InterceptedStore
from tests.tuner.factories import (
    DrivenCampaign,
    FakeWorker,
    drive_until,
    ended,
    make_spec,
    submit,
)
from tuner.driver.driver import Driver


def test_a_raised_budget_is_driven_to_its_new_end(store: Store) -> None:
    campaign = DrivenCampaign(store, make_spec(budget={"trials": 3}))
    campaign.until_completed(2)
    store.campaigns.update(campaign.id, budget={"trials": 7})
    assert campaign.to_end().message == "7 of 7 trials done (7 completed)"


def test_a_lowered_budget_ends_the_campaign_once_what_waits_is_done(store: Store) -> None:
    campaign = DrivenCampaign(store, make_spec(budget={"trials": 20}))
    campaign.until_completed(4)
    store.campaigns.update(campaign.id, budget={"trials": 1})
    before = len(campaign.trials)
    record = campaign.to_end()
    assert (record.state, record.reason) == ("COMPLETED", "budget")
    assert len(campaign.trials) == before


def test_wall_time_that_is_added_keeps_a_campaign_running(
    store: Store, clock: TurnableClock
) -> None:
    campaign = submit(store, make_spec(budget={"wall_time_s": 10}))
    driver = Driver(store)
    driver.step()
    clock.forward(8.0)
    store.campaigns.update(campaign.id, budget={"wall_time": "1h"})
    clock.forward(8.0)
    driver.step()
    assert not ended(store, campaign)


class RaisedWhileEnding(InterceptedStore):
    """A store whose user raises the budget just before the driver writes that it is spent."""

    def __init__(self, store: Store, campaign: CampaignRecord) -> None:
        super().__init__(store, self._raise_in_time)
        self._campaign = campaign
        self.raised = False

    def _raise_in_time(self, call: str) -> None:
        if call in ("campaigns.end", "campaigns.cancel_pending") and not self.raised:
            self.raised = True
            self._store.campaigns.update(
                self._campaign.id, budget={"trials": 6, "wall_time_s": 1000.0}
            )


@pytest.mark.parametrize("bound", [{"trials": 3}, {"wall_time_s": 10.0, "trials": 5}])
def test_a_budget_raised_in_the_very_round_that_ends_the_campaign_is_not_lost(
    store: Store, clock: TurnableClock, bound: dict[str, float]
) -> None:
    campaign = submit(store, make_spec(budget=bound))
    between = RaisedWhileEnding(store, campaign)
    driver, worker = Driver(between), FakeWorker(store)  # type: ignore[arg-type]
    driver.step()
    if "wall_time_s" in bound:
        clock.forward(12.0)
    drive_until(lambda: ended(store, campaign), driver.step, worker)
    assert between.raised
    assert store.campaigns.get(campaign.id).message == "6 of 6 trials done (6 completed)"
