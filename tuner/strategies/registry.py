"""Strategies by the name that campaigns give, and those that follow a fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

import numpy as np

from layout_tuner.tuner.errors import StrategyUnavailableError, StrategyUnknownError
from layout_tuner.tuner.strategies.ask_and_tell import History, LayoutSearch, Proposer
from layout_tuner.tuner.strategies.search_problem import SearchProblem
from layout_tuner.version import missing_packages


def make_strategy(name: str, problem: SearchProblem, *, seed: int) -> LayoutSearch:
    """Starts a strategy on a problem.

    Raises:
        StrategyUnknownError: none has the name.
        StrategyUnavailableError: a package that it needs is not installed.
    """
    if name not in STRATEGIES:
        raise StrategyUnknownError(
            f"strategy={name!r} is not one of {', '.join(sorted(STRATEGIES))}"
        )
    needs = ["deephyper"] if name.startswith("deephyper") else []
    if lacks := missing_packages(f"strategy={name}", needs, extra="driver"):
        raise StrategyUnavailableError(f"{lacks}; or submit the campaign with another strategy")
    return LayoutSearch(problem.layouts, STRATEGIES[name](problem, seed))


class FixedOrderProposer(Proposer):
    """Proposes each layout once, in an order that no measurement changes."""

    def __init__(self, order: Iterable[int]) -> None:
        self._order = iter(order)
        self._next: int | None = None

    def propose(self, history: History) -> int:
        """The first free layout of the order. A taken layout never becomes free again."""
        while self._next is None or not history.is_free(self._next):
            position = next(self._order, None)
            assert position is not None, "the order has every layout"
            self._next = int(position)
        return self._next


def _random(problem: SearchProblem, seed: int) -> Proposer:
    """Every layout is equally likely to be next; with job knobs, every job."""
    rng, count = np.random.default_rng(seed), len(problem.layouts)
    order = rng.permutation(count) if problem.jobs is None else _shuffled(count, rng)
    return FixedOrderProposer(order)


def _shuffled(count: int, rng: np.random.Generator) -> Iterator[int]:
    """The numbers below `count` in random order (Fisher and Yates), in memory of those drawn."""
    moved: dict[int, int] = {}
    for place in range(count):
        drawn = int(rng.integers(place, count))
        yield moved.get(drawn, drawn)
        moved[drawn] = moved.pop(place, place)


def _model_only(problem: SearchProblem, _seed: int) -> Proposer:
    from layout_tuner.tuner.strategies.predictions import order_by_estimate

    return FixedOrderProposer(order_by_estimate(problem))


def _communication(problem: SearchProblem, _seed: int) -> Proposer:
    from layout_tuner.tuner.strategies.communication import order_by_communication

    order = order_by_communication(problem)
    if (jobs := problem.jobs) is None:
        return FixedOrderProposer(order)
    return FixedOrderProposer(job for row in order for job in jobs.jobs_of(np.array([row])))


def _deephyper(problem: SearchProblem, seed: int, **known: Any) -> Proposer:
    from layout_tuner.tuner.strategies.deephyper import DeepHyperProposer

    allowed = problem.allowed_memory_bytes if problem.min_memory_headroom else math.inf
    return DeepHyperProposer(problem.layouts, seed=seed, max_peak_memory_bytes=allowed, **known)


def _deephyper_with_memory(problem: SearchProblem, seed: int) -> Proposer:
    from layout_tuner.predictions.estimates.peak_memory import peak_memory_bytes
    from layout_tuner.predictions.estimates.trainer_storage import storage_of
    from layout_tuner.tuner.strategies.deephyper import NUM_WARM
    from layout_tuner.tuner.strategies.predictions import order_by_estimate

    storage = storage_of(problem.software, problem.cluster)
    peaks = peak_memory_bytes(problem.without_jobs.columns(), problem.model, storage)
    fits = peaks <= problem.allowed_memory_bytes
    ranked = (
        int(index)
        for index in order_by_estimate(problem)
        if fits[problem.layout_rows(np.array([index]))[0]]
    )
    return _deephyper(problem, seed, fits=fits, warm_start=list(islice(ranked, NUM_WARM)))


def _guided(problem: SearchProblem, seed: int) -> Proposer:
    from layout_tuner.tuner.strategies.guided import GuidedProposer

    return GuidedProposer(problem, seed=seed)


STRATEGIES: Final[Mapping[str, Callable[[SearchProblem, int], Proposer]]] = {
    "communication": _communication,
    "deephyper": _deephyper,
    "deephyper+memory": _deephyper_with_memory,
    "exhaustive": lambda problem, _seed: FixedOrderProposer(range(len(problem.layouts))),
    "guided": _guided,
    "model-only": _model_only,
    "random": _random,
}
"""A function for each strategy, which imports the strategy's packages when it is called."""
