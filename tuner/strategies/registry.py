"""Strategies by the name that campaigns give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tuner.errors import StrategyUnknownError
from tuner.strategies.base import LayoutSearch, LayoutSet, Proposer
from tuner.strategies.simple import ExhaustiveProposer, RandomProposer


def make_strategy(name: str, layouts: LayoutSet, *, seed: int) -> LayoutSearch:
    """Starts a strategy on a set of layouts.

    Raises:
        StrategyUnknownError: there is no strategy of that name.
    """
    if name not in STRATEGIES:
        raise StrategyUnknownError(
            f"strategy={name!r} is not one of {', '.join(sorted(STRATEGIES))}"
        )
    return LayoutSearch(layouts, STRATEGIES[name](layouts, seed))


def _random(layouts: LayoutSet, seed: int) -> Proposer:
    return RandomProposer(num_layouts=len(layouts), seed=seed)


def _exhaustive(_layouts: LayoutSet, _seed: int) -> Proposer:
    return ExhaustiveProposer()


def _deephyper(layouts: LayoutSet, seed: int) -> Proposer:
    from tuner.strategies.deephyper import DeepHyperProposer

    return DeepHyperProposer(layouts, seed=seed)


STRATEGIES: Final[Mapping[str, Callable[[LayoutSet, int], Proposer]]] = {
    "deephyper": _deephyper,
    "exhaustive": _exhaustive,
    "random": _random,
}
