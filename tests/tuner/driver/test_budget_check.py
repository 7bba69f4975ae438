"""Budgets and the words in which a campaign ends."""

from __future__ import annotations

import pytest

from results_db.records import TrialRecord
from search_spaces.campaigns.campaign_settings import Budget
from tests.tuner.factories import ended_trial
from tuner.driver.budget_check import Spent, closing_message, time_is_up, trials_left


def make_spent(*, trials: int = 0, node_seconds: float = 0.0, wall_time_s: float = 0.0) -> Spent:
    return Spent(trials=trials, node_seconds=node_seconds, wall_time_s=wall_time_s)


def make_trials(**counts: int) -> list[TrialRecord]:
    """By state, or by reason of a failed one."""
    states = {"completed": "COMPLETED", "cancelled": "CANCELLED", "out_of_memory": "INFEASIBLE"}
    return [
        ended_trial(states.get(name, "FAILED"), None if name == "completed" else name)
        for name, count in counts.items()
        for _ in range(count)
    ]


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
    ("counts", "words"),
    [
        ({"completed": 12}, "done (12 completed)"),
        (
            {"completed": 2, "out_of_memory": 3, "crashed": 1, "cancelled": 1},
            "done (1 cancelled, 2 completed, 1 failed, 3 infeasible)",
        ),
        (
            {"out_of_memory": 3, "crashed": 1, "cancelled": 5},
            "done; no trial completed; most common reason: out_of_memory (3 of 4)",
        ),
        ({"cancelled": 2}, "done; no trial was run"),
        ({}, "done; no trial was run"),
    ],
)
def test_the_closing_message_says_what_came_of_the_trials(
    counts: dict[str, int], words: str
) -> None:
    assert closing_message("done", make_trials(**counts)) == words
