"""Strategies by the name that campaigns give, and those that follow a fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

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

    def __init__(self, order: Sequence[int] | NDArray[np.int64]) -> None:
        self._order = order
        self._next = 0

    def propose(self, history: History) -> int:
        """The first free layout of the order. A taken layout never becomes free again."""
        while not history.is_free[self._order[self._next]]:
            self._next += 1
        return int(self._order[self._next])


def _model_only(problem: SearchProblem, _seed: int) -> Proposer:
    from layout_tuner.tuner.strategies.predictions import order_by_estimate

    return FixedOrderProposer(order_by_estimate(problem))


def _communication(problem: SearchProblem, _seed: int) -> Proposer:
    from layout_tuner.tuner.strategies.communication import order_by_communication

    return FixedOrderProposer(order_by_communication(problem))


def _deephyper(problem: SearchProblem, seed: int, **known: Any) -> Proposer:
    from layout_tuner.tuner.strategies.deephyper import DeepHyperProposer

    allowed = problem.allowed_memory_bytes if problem.min_memory_headroom else math.inf
    return DeepHyperProposer(problem.layouts, seed=seed, max_peak_memory_bytes=allowed, **known)


def _deephyper_with_memory(problem: SearchProblem, seed: int) -> Proposer:
    from layout_tuner.predictions.estimates.peak_memory import peak_memory_bytes
    from layout_tuner.predictions.estimates.storage import storage_of
    from layout_tuner.tuner.strategies.deephyper import NUM_WARM
    from layout_tuner.tuner.strategies.predictions import order_by_estimate

    storage = storage_of(problem.software, problem.cluster)
    peaks = peak_memory_bytes(problem.layouts.columns(), problem.model, storage)
    fits = peaks <= problem.allowed_memory_bytes
    ranked = [index for index in order_by_estimate(problem).tolist() if fits[index]]
    return _deephyper(problem, seed, fits=fits, warm_start=ranked[:NUM_WARM])


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
    "random": lambda problem, seed: FixedOrderProposer(
        np.random.default_rng(seed).permutation(len(problem.layouts))
    ),
}
"""A function for each strategy, which imports the strategy's packages when it is called."""
