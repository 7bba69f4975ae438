"""Budgets and the words in which a campaign ends."""

from __future__ import annotations

import pytest

from search_spaces.campaigns.campaign_settings import Budget
from tuner.driver.budget_check import EndedTrial, Spent, closing_message, time_is_up, trials_left


def make_spent(*, trials: int = 0, node_seconds: float = 0.0, wall_time_s: float = 0.0) -> Spent:
    return Spent(trials=trials, node_seconds=node_seconds, wall_time_s=wall_time_s)


def make_trials(**counts: int) -> list[EndedTrial]:
    """By state, or by reason of a failed one."""
    states = {"completed": "COMPLETED", "cancelled": "CANCELLED", "out_of_memory": "INFEASIBLE"}
    return [
        EndedTrial(state=states.get(name, "FAILED"), reason=None if name == "completed" else name)
        for name, count in counts.items()
        for _ in range(count)
    ]


def test_trials_are_counted_down_to_none_left() -> None:
    budget = Budget(trials=3)
    assert [trials_left(budget, make_spent(trials=n)) for n in (0, 2, 3, 4)] == [3, 1, 0, 0]


def test_trials_are_not_counted_where_the_budget_does_not() -> None:
    assert trials_left(Budget(wall_time_s=1.0), make_spent(trials=1000)) is None


def test_node_hours_are_spent_in_seconds() -> None:
    budget = Budget(node_hours=2.0)
    assert time_is_up(budget, make_spent(node_seconds=7199.0)) is None
    assert time_is_up(budget, make_spent(node_seconds=7560.0)) == "2.1 of 2 node-hours spent"


def test_wall_time_is_up_to_the_second() -> None:
    budget = Budget(wall_time_s=90.0)
    assert time_is_up(budget, make_spent(wall_time_s=89.9)) is None
    assert time_is_up(budget, make_spent(wall_time_s=90.0)) == "90 of 90 s of wall time spent"


def test_the_first_bound_that_is_met_ends_the_campaign() -> None:
    budget = Budget(node_hours=1.0, wall_time_s=90.0)
    assert time_is_up(budget, make_spent(wall_time_s=100.0)) is not None
    assert time_is_up(budget, make_spent(node_seconds=3600.0)) is not None


def test_a_budget_of_trials_alone_never_runs_out_of_time() -> None:
    assert time_is_up(Budget(trials=1), make_spent(node_seconds=1e9, wall_time_s=1e9)) is None


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
def test_closing_message_say_what_came_of_the_trials(counts: dict[str, int], words: str) -> None:
    assert closing_message("done", make_trials(**counts)) == words
