"""How long a search thinks: ask and tell in a space of 10^5 legal layouts, with 500 told."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from layout_tuner.predictions.belief.observation import INFEASIBLE, Observation
from layout_tuner.predictions.estimates.peak_memory import peak_memory_bytes
from layout_tuner.predictions.estimates.step_time import step_time_s
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.objectives import objective_factors
from layout_tuner.search_spaces.spaces.search_space import LegalSet, SearchSpace, enumerate_legal
from layout_tuner.tuner.strategies.ask_and_tell import LayoutSearch
from layout_tuner.tuner.strategies.registry import make_strategy
from layout_tuner.tuner.strategies.search_problem import SearchProblem

NUM_TOLD: Final = 500
ROUNDS: Final = 15
_MODEL: Final = model_preset("gpt-22b")
_CLUSTER: Final = CLUSTER_PRESETS["frontier"]
_SPACE: Final = SearchSpace(
    global_batch_size=5760,
    num_nodes=[3, 6, 12, 24, 48, 96],
    tp=[1, 2, 4, 8],
    pp=[1, 2, 3, 4, 6, 8, 12, 16, 24, 48],
    vpp=[1, 2, 3, 4, 6, 8, 12],
    micro_batch_size={"from": 1, "to": 64},
    zero_stage=[0, 1],
    recompute=["none", "selective", "full"],
    sequence_parallel=[False, True],
    precision="bf16",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpeed:
    """What one strategy took."""

    num_legal: int
    """Layouts of the space."""
    probe_s: float
    """Median of a tell and the ask after it, with 500 told."""
    rebuild_s: float
    """Building the strategy, telling it 500 results and asking once: a restart of the driver."""


def measure_speed(strategy: str) -> SearchSpeed:
    """Tells 500 made-up results, then goes on asking and telling against the clock."""
    legal = enumerate_legal(_SPACE, _MODEL, _CLUSTER)
    truth = _Truth(legal)
    drawn = np.random.default_rng(0).choice(len(legal), NUM_TOLD, replace=False)
    started = time.perf_counter()
    search = make_strategy(
        strategy, SearchProblem(layouts=legal, model=_MODEL, cluster=_CLUSTER), seed=0
    )
    for index in drawn.tolist():
        search.tell(legal.layout(index), truth.of(index))
    asked = _ask(search, legal)
    rebuild_s = time.perf_counter() - started
    taken = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        search.tell(legal.layout(asked), truth.of(asked))
        asked = _ask(search, legal)
        taken.append(time.perf_counter() - started)
    return SearchSpeed(num_legal=len(legal), probe_s=statistics.median(taken), rebuild_s=rebuild_s)


def _ask(search: LayoutSearch, legal: LegalSet) -> int:
    layout = search.ask()
    assert layout is not None, "the space is not exhausted"
    index = legal.index_of(layout)
    assert index is not None, "it was asked for from the legal set"
    return index


class _Truth:
    """The estimates with noise: what a probe would find matters less here than that it varies."""

    def __init__(self, legal: LegalSet) -> None:
        rng = np.random.default_rng(1)
        columns = legal.columns()
        self._peaks = peak_memory_bytes(columns, _MODEL) * rng.normal(1.1, 0.02, len(legal))
        self._steps = step_time_s(columns, _MODEL, _CLUSTER) * np.exp(
            rng.normal(0.0, 0.2, len(legal))
        )
        factors = objective_factors("tokens_per_s_per_device", columns, _MODEL)
        self._rates = factors / self._steps

    def of(self, index: int) -> Observation:
        """The outcome that a layout is given."""
        if self._peaks[index] > _CLUSTER.device_memory_bytes:
            return INFEASIBLE
        return Observation.completed(
            float(self._rates[index]),
            step_time_s=float(self._steps[index]),
            peak_memory_bytes=round(float(self._peaks[index])),
        )
