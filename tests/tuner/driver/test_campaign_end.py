"""Budgets, their changes while a driver is at work, and the words in which a campaign ends."""

from __future__ import annotations

import pytest

from results_db.records import CampaignRecord, TrialRecord
from results_db.store import Store
from search_spaces.campaigns.campaign_settings import Budget
from tests.kit.store import TurnableClock
from tests.results_db.intercepted_store import InterceptedStore
from tests.tuner.factories import (
    DrivenCampaign,
    FakeWorker,
    drive_until,
    ended,
    ended_trial,
    make_spec,
    submit,
)
from tuner.driver.campaign_end import Spent, closing_message, time_is_up, trials_left
from tuner.driver.driver import Driver


def make_spent(*, trials: int = 0, node_seconds: float = 0.0, wall_time_s: float = 0.0) -> Spent:
    return Spent(trials=trials, node_seconds=node_seconds, wall_time_s=wall_time_s)


DONE, CANCELLED, PART = (
    ended_trial("COMPLETED"),
    ended_trial("CANCELLED", "cancelled"),
    ended_trial("COMPLETED", is_cheap=True),
)
NO_MEMORY, CRASHED, LATE, CRASHED_PART = (
    ended_trial("INFEASIBLE", "out_of_memory"),
    ended_trial("FAILED", "crashed"),
    ended_trial("FAILED", "timeout"),
    ended_trial("FAILED", "crashed", is_cheap=True),
)
NO_FULL_ONE = "; no layout was measured in full, so there is no winner"


@pytest.mark.parametrize(
    ("budget", "spent", "left", "said"),
    [
        (Budget(trials=3), make_spent(), 3, None),
        (Budget(trials=3), make_spent(trials=2), 1, None),
        (Budget(trials=3), make_spent(trials=3), 0, None),
        (Budget(trials=3), make_spent(trials=4), 0, None),
        (Budget(trials=1), make_spent(node_seconds=1e9, wall_time_s=1e9), 1, None),
        (Budget(wall_time_s=90.0), make_spent(trials=1000, wall_time_s=89.9), None, None),
        (Budget(wall_time_s=90.0), make_spent(wall_time_s=90.0), None, "90 of 90 s of wall time"),
        (Budget(node_hours=2.0), make_spent(node_seconds=7199.0), None, None),
        (Budget(node_hours=2.0), make_spent(node_seconds=7560.0), None, "2.1 of 2 node-hours"),
        (Budget(node_hours=1.0, wall_time_s=90.0), make_spent(wall_time_s=99.0), None, "99 of 90"),
        (
            Budget(node_hours=1.0, wall_time_s=90.0),
            make_spent(node_seconds=3600.0),
            None,
            "1 of 1 node-hours",
        ),
    ],
)
def test_a_budget_is_spent_at_the_first_of_its_bounds(
    budget: Budget, spent: Spent, left: int | None, said: str | None
) -> None:
    assert trials_left(budget, spent) == left
    words = time_is_up(budget, spent)
    assert words is None if said is None else words is not None and words.startswith(said)


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        ([DONE] * 12, " (12 completed)"),
        (
            [DONE] * 2 + [NO_MEMORY] * 3 + [CRASHED, CANCELLED],
            " (1 cancelled, 2 completed, 1 failed, 3 infeasible)",
        ),
        (
            [NO_MEMORY] * 3 + [CRASHED] + [CANCELLED] * 5,
            "; no trial completed; most common reason: out_of_memory (3 of 4)",
        ),
        ([CANCELLED] * 2, "; no trial was run"),
        ([], "; no trial was run"),
        (
            [PART, CRASHED_PART],
            f" (1 completed, 1 failed){NO_FULL_ONE}: clone the campaign with a larger budget",
        ),
        ([PART, DONE], " (2 completed)"),
        # Where every full probe failed, a larger budget would not help.
        (
            [PART, *[CRASHED_PART] * 3, LATE, LATE, CANCELLED],
            f" (1 cancelled, 1 completed, 5 failed){NO_FULL_ONE}; most common reason: timeout "
            "(2 of 2)",
        ),
    ],
)
def test_the_closing_message_says_what_came_of_the_trials(
    trials: list[TrialRecord], words: str
) -> None:
    assert closing_message("done", trials) == f"done{words}"


def test_a_lowered_budget_ends_the_campaign_once_what_waits_is_done(store: Store) -> None:
    campaign = DrivenCampaign(store, make_spec(budget={"trials": 20}))
    campaign.until_completed(2)
    store.campaigns.update(campaign.id, budget={"trials": 1})
    before = len(campaign.trials)
    record = campaign.to_end()
    assert (record.state, record.reason) == ("COMPLETED", "budget")
    assert len(campaign.trials) == before


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
                self._campaign.id, budget={"trials": 4, "wall_time_s": 1000.0}
            )


@pytest.mark.parametrize("bound", [{"trials": 2}, {"wall_time_s": 10.0, "trials": 3}])
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
    assert store.campaigns.get(campaign.id).message == "4 of 4 trials done (4 completed)"
