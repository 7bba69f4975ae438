"""Strategies by the name that campaigns give."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from tuner.errors import StrategyUnknownError
from tuner.problem import SearchProblem
from tuner.strategies.base import LayoutSearch, Proposer
from tuner.strategies.simple import ExhaustiveProposer, RandomProposer


def make_strategy(name: str, problem: SearchProblem, *, seed: int) -> LayoutSearch:
    """Starts a strategy on a problem.

    Raises:
        StrategyUnknownError: there is no strategy of that name.
    """
    if name not in STRATEGIES:
        raise StrategyUnknownError(
            f"strategy={name!r} is not one of {', '.join(sorted(STRATEGIES))}"
        )
    return LayoutSearch(problem.layouts, STRATEGIES[name](problem, seed))


def _random(problem: SearchProblem, seed: int) -> Proposer:
    return RandomProposer(num_layouts=len(problem.layouts), seed=seed)


def _exhaustive(_problem: SearchProblem, _seed: int) -> Proposer:
    return ExhaustiveProposer()


def _deephyper(problem: SearchProblem, seed: int) -> Proposer:
    from tuner.strategies.deephyper import DeepHyperProposer

    allowed = problem.allowed_memory_bytes if problem.min_memory_headroom else math.inf
    return DeepHyperProposer(problem.layouts, seed=seed, max_peak_memory_bytes=allowed)


def _guided(problem: SearchProblem, seed: int) -> Proposer:
    from tuner.strategies.guided import GuidedProposer

    return GuidedProposer(problem, seed=seed)


def _model_only(problem: SearchProblem, _seed: int) -> Proposer:
    from tuner.strategies.model_only import ModelOnlyProposer

    return ModelOnlyProposer(problem)


STRATEGIES: Final[Mapping[str, Callable[[SearchProblem, int], Proposer]]] = {
    "deephyper": _deephyper,
    "exhaustive": _exhaustive,
    "guided": _guided,
    "model-only": _model_only,
    "random": _random,
}
