"""What the strategies expect of the layouts that they have not asked for; volumes of fronts."""

from __future__ import annotations

import numpy as np
import pytest

from search_spaces.belief.observation import INFEASIBLE, Observation
from tests.tuner.factories import make_spec
from tuner.strategies.base import LayoutSearch
from tuner.strategies.improvement import hypervolume
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


def test_after_failures_alone_a_search_cannot_tell_what_is_left_to_gain() -> None:
    search = make_search("guided")
    layout = search.ask()
    assert layout is not None
    search.tell(layout, INFEASIBLE)
    assert search.possible_improvement() is None


@pytest.mark.parametrize("name", ["random", "deephyper"])
def test_strategies_without_a_belief_cannot_tell_what_is_left_to_gain(name: str) -> None:
    search = make_search(name)
    told(search, 3)
    assert search.possible_improvement() is None


def test_no_improvement_is_expected_of_an_exhausted_set() -> None:
    search = make_search("exhaustive")
    told(search, 28)
    assert search.ask() is None
    assert search.possible_improvement() == 0.0


@pytest.mark.parametrize(
    ("points", "volume"),
    [
        ([[2.0, 3.0]], 6.0),
        ([[1.0, 3.0], [2.0, 1.0]], 4.0),
        ([[1.0, 3.0], [2.0, 1.0], [1.0, 1.0]], 4.0),  # the last one is dominated
        ([[2.0, 3.0], [5.0, -1.0]], 6.0),
        ([[5.0, 0.0]], 0.0),
        ([[1.0, 1.0, 1.0], [2.0, 1.0, 0.5]], 1.5),
        ([[3.0], [4.0]], 4.0),
        (np.empty((0, 2)), 0.0),
    ],
)
def test_a_front_has_the_volume_of_its_boxes(points: list[list[float]], volume: float) -> None:
    assert hypervolume(np.array(points)) == pytest.approx(volume)


@pytest.mark.parametrize("num_objectives", [2, 3])
def test_the_volume_is_the_share_of_random_points_that_some_point_beats(
    num_objectives: int,
) -> None:
    rng = np.random.default_rng(num_objectives)
    points = rng.random((12, num_objectives))
    drawn = rng.random((40_000, num_objectives))
    beaten = (drawn[:, None, :] <= points[None, :, :]).all(axis=2).any(axis=1).mean()
    assert hypervolume(points) == pytest.approx(beaten, abs=0.01)
