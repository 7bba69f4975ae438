"""What the strategies expect of the layouts that they have not asked for."""

from __future__ import annotations

import pytest

from search_spaces.belief.observation import INFEASIBLE, Observation
from tests.tuner.factories import make_spec
from tuner.strategies.base import LayoutSearch
from tuner.strategies.registry import make_strategy
from tuner.strategies.search_problem import SearchProblem


def make_search(name: str, **changes: object) -> LayoutSearch:
    spec = make_spec(**changes)
    problem = SearchProblem(
        layouts=spec.legal_set(), model=spec.model, cluster=spec.cluster, objectives=spec.objectives
    )
    return make_strategy(name, problem, seed=1)


def told(search: LayoutSearch, times: int) -> None:
    """Every layout is as fast as the one before it, within a few percent."""
    for turn in range(times):
        layout = search.ask()
        assert layout is not None
        step_time_s = 0.5 * (1.0 + 0.03 * (turn % 3))
        tokens = layout.global_batch_size * 128 / layout.num_devices
        search.tell(layout, Observation.completed(tokens / step_time_s, step_time_s=step_time_s))


@pytest.mark.parametrize(
    ("changes", "more", "share"),
    [
        ({}, 15, 1.0),
        ({"objective": ["tokens_per_s_per_device", "memory_headroom"]}, 20, 0.5),
    ],
    ids=["the best", "a front"],
)
def test_guided_expects_less_the_more_it_knows(
    changes: dict[str, object], more: int, share: float
) -> None:
    search = make_search("guided", **changes)
    assert search.possible_improvement() is None, "nothing to improve on yet"
    told(search, 3)
    early = search.possible_improvement()
    assert early is not None
    assert early == search.possible_improvement(), "asked again, it says the same"
    told(search, more)
    late = search.possible_improvement()
    assert late is not None
    assert 0.0 <= late < share * early
    assert changes or late < 0.05


def test_failures_alone_leave_everything_to_expect() -> None:
    search = make_search("guided")
    layout = search.ask()
    assert layout is not None
    search.tell(layout, INFEASIBLE)
    assert search.possible_improvement() is None


@pytest.mark.parametrize("name", ["random", "exhaustive", "deephyper"])
def test_strategies_without_a_belief_do_not_know(name: str) -> None:
    search = make_search(name)
    told(search, 3)
    assert search.possible_improvement() is None


def test_nothing_is_expected_of_an_exhausted_set() -> None:
    search = make_search("exhaustive")
    told(search, 28)
    assert search.ask() is None
    assert search.possible_improvement() == 0.0
