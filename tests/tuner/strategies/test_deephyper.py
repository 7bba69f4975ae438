"""What DeepHyper's optimisation is worth, and that its traps stay shut."""

from __future__ import annotations

import logging
import statistics
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from search_spaces.belief.observation import FAILED, INFEASIBLE, Observation
from search_spaces.estimates.memory import peak_memory_bytes
from search_spaces.estimates.storage import storage_of
from search_spaces.spec.layout import Layout
from search_spaces.spec.layout_columns import code_of
from search_spaces.spec.space import LegalSet
from tests.kit.campaigns import spec_of
from tests.tuner.search_problems import make_problem
from tuner.strategies.base import LayoutSearch
from tuner.strategies.deephyper import (
    MAX_CANDIDATES,
    MAX_NEIGHBOURS,
    NUM_BEST,
    DeepHyperProposer,
    KnobRanks,
)
from tuner.strategies.predictions import order_by_estimate
from tuner.strategies.registry import make_strategy
from tuner.strategies.search_problem import SearchProblem

NEVER = 400


def make_legal_set(**space: object) -> LegalSet:
    knobs = {
        "global_batch_size": {"min": 128, "max": 1024},
        "num_nodes": 4,
        "tp": [1, 2, 4, 8],
        "pp": [1, 2, 4, 8, 16],
        "micro_batch_size": [1, 2, 4, 8, 16],
        "num_microbatches": [4, 8, 16, 32, 64, 128],
        "zero_stage": [0, 1],
        "recompute": ["none", "full"],
    }
    cluster = {"preset": "a100-sxm", "num_nodes": 8}
    return spec_of(model="gpt-22b", cluster=cluster, space=knobs | space).legal_set()


def measure(layout: Layout) -> Observation:
    """A rough roofline with costs of small batches, pipelines and communication; some overflow."""
    states = 352.0 * (1.0 if layout.zero_stage == 0 else 0.25 + 0.75 / layout.dp)
    activations = layout.micro_batch_size * (1.0 if layout.recompute == "full" else 10.0)
    if states / (layout.tp * layout.pp) + activations / layout.tp > 75.0:
        return INFEASIBLE
    compute = 1.33 if layout.recompute == "full" else 1.0
    starved = 1.0 + 0.6 * layout.tp**0.5 / layout.micro_batch_size
    bubble = (layout.pp - 1) / layout.num_microbatches
    talk = 0.15 * np.log2(layout.tp) + 4.0 * np.log2(layout.dp) / layout.num_microbatches
    return Observation.completed(100.0 / (compute * starved * (1.0 + bubble) + talk))


def probes_to(search: LayoutSearch, target: float) -> int:
    for probe in range(1, NEVER):
        layout = search.ask()
        if layout is None:
            return NEVER
        observation = measure(layout)
        if observation.objective is not None and observation.objective >= target:
            return probe
        search.tell(layout, observation)
    return NEVER


@pytest.mark.slow
def test_deephyper_needs_far_fewer_probes_than_random_search() -> None:
    legal = make_legal_set()
    values = [measure(legal.layout(i)).objective for i in range(len(legal))]
    best = max(value for value in values if value is not None)
    near = sum(value is not None and value >= 0.9 * best for value in values)
    assert near <= 0.01 * len(legal), "the target is too easy to tell anything"
    medians = {
        name: statistics.median(
            probes_to(make_strategy(name, make_problem(legal), seed=seed), 0.9 * best)
            for seed in range(11)
        )
        for name in ("deephyper", "random")
    }
    assert medians["deephyper"] <= 0.5 * medians["random"], medians


class CountingProposer(DeepHyperProposer):
    """Counts how often it goes beyond drawing at random."""

    num_fits = 0

    def _ask_cbo(self, *args: object) -> int:
        self.num_fits += 1
        return super()._ask_cbo(*args)  # type: ignore[arg-type]


def test_failures_count_for_the_random_start_and_files_and_loggers_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results.csv").write_text("mine\n")
    handlers = list(logging.getLogger().handlers)
    legal = make_legal_set()
    search = LayoutSearch(legal, counting := CountingProposer(legal, seed=1))
    for index in range(30):
        search.tell(legal.layout(index), FAILED)
    search.tell(legal.layout(30), Observation.completed(5.0))
    search.ask()
    assert counting.num_fits == 1
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]
    assert logging.getLogger().handlers == handlers


def test_what_breaks_the_headroom_counts_as_a_failure() -> None:
    legal = make_legal_set()

    def asked(headroom: float, told: Observation) -> list[Layout | None]:
        problem = make_problem(legal, min_memory_headroom=headroom)
        search = make_strategy("deephyper", problem, seed=1)
        for index in range(0, 30, 3):
            search.tell(legal.layout(index), Observation.completed(1.0 + index))
            search.tell(legal.layout(index + 1), told)
        return [search.ask() for _ in range(3)]

    memory = make_problem(legal).cluster.device_memory_bytes
    large = Observation.completed(500.0, peak_memory_bytes=memory * 19 // 20)
    assert asked(0.1, large) == asked(0.1, FAILED)
    assert asked(0.01, large) != asked(0.01, FAILED)


def test_ranks_order_words_by_the_memory_they_save() -> None:
    legal = make_legal_set(recompute=["full", "none"], precision=["bf16", "fp32"])
    ranks = KnobRanks(legal)
    assert "num_nodes" not in ranks.names
    assert list(ranks.names) == sorted(ranks.names)
    for knob, words in (("recompute", ("none", "full")), ("precision", ("fp32", "bf16"))):
        column = ranks.rows(np.arange(len(legal)))[:, ranks.names.index(knob)]
        layouts = [legal.layout(position) for position in range(len(legal))]
        expected = [words.index(getattr(layout, knob)) for layout in layouts]
        assert column.tolist() == expected


def test_ranks_are_places_among_the_values_that_occur() -> None:
    # dp is derived, pp=5 and tp=3 are never legal, and no choices are listed in order.
    legal = make_legal_set(tp=[8, 3, 1, 2], pp=[16, 1, 5, 4], micro_batch_size=[4, 1, 2])
    ranks = KnobRanks(legal)
    assert {"tp", "pp", "dp", "micro_batch_size"} <= set(ranks.names)
    layouts = [legal.layout(position) for position in range(len(legal))]
    rows = ranks.rows(np.arange(len(legal)))
    for place, name in enumerate(ranks.names):
        values = [code_of(name, getattr(layout, name)) for layout in layouts]
        occurring = sorted(set(values))
        assert rows[:, place].tolist() == [occurring.index(value) for value in values]
        assert ranks.num_values[place] == len(occurring)
    steps = np.abs(rows - rows[7]).sum(axis=1)
    assert ranks.steps_from(7).tolist() == steps.tolist()


def test_more_values_than_a_short_holds_have_ranks_of_their_own() -> None:
    ranks = KnobRanks(EveryCount(40_000))
    assert ranks.num_values == (40_000,)
    assert ranks.rows(np.array([39_999])).tolist() == [[39_999]]
    assert int(ranks.steps_from(39_999)[0]) == 39_999


class EveryCount:
    """A layout for each number of replicas."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def column(self, knob: str) -> NDArray[np.int64]:
        return np.arange(1, self._length + 1) if knob == "dp" else np.ones(self._length, np.int64)


def test_the_ranks_of_many_layouts_take_little_memory() -> None:
    legal = make_legal_set(
        global_batch_size={"max": 1 << 20},
        num_nodes=[1, 2, 4, 8],
        micro_batch_size=list(range(1, 65)),
        num_microbatches=list(range(1, 33)),
    )
    assert len(legal) > 400_000
    tracemalloc.start()
    try:
        KnobRanks(legal)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 80 * len(legal)  # of strings one column alone would take 20 a layout


@pytest.mark.slow
def test_a_proposal_among_100_000_layouts_judges_few_of_them_with_500_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cost of a proposal is counted, not timed: layouts used in fits and in predictions."""
    legal = make_legal_set(
        global_batch_size={"min": 64, "max": 100_000},
        num_nodes=[1, 2, 3, 4],
        pp=[1, 2, 3, 4, 6, 8, 12, 16, 24],
        micro_batch_size=list(range(1, 17)),
        num_microbatches=list(range(1, 33)),
    )
    assert 90_000 < len(legal) < 150_000
    search = make_strategy("deephyper", make_problem(legal), seed=1)
    for index in np.random.default_rng(0).choice(len(legal), 500, replace=False):
        layout = legal.layout(int(index))
        search.tell(layout, measure(layout))
    judged: list[int] = []
    points = DeepHyperProposer._points

    def counting(self: DeepHyperProposer, indices: NDArray[np.int64]) -> list[dict[str, int]]:
        judged.append(len(indices))
        return points(self, indices)

    monkeypatch.setattr(DeepHyperProposer, "_points", counting)
    for told in range(500, 503):
        judged.clear()
        layout = search.ask()
        search.tell(layout, measure(layout))
        candidates, fitted = judged
        assert candidates <= MAX_CANDIDATES + NUM_BEST * MAX_NEIGHBOURS < len(legal) / 10
        assert fitted == told


def make_memory_search(legal: LegalSet, problem: SearchProblem) -> tuple[LayoutSearch, set[Layout]]:
    """The search, and the layouts that are estimated to fit."""
    storage = storage_of(problem.software, problem.cluster)
    peaks = peak_memory_bytes(legal.columns(), problem.model, storage)
    fitting = np.flatnonzero(peaks <= problem.cluster.device_memory_bytes).tolist()
    search = make_strategy("deephyper+memory", problem, seed=0)
    return search, {legal.layout(index) for index in fitting}


def test_with_memory_the_search_starts_with_the_ten_best_estimates_that_fit() -> None:
    legal = make_legal_set(num_microbatches=[8, 16])
    problem = make_problem(legal)
    search, fitting = make_memory_search(legal, problem)
    assert 20 < len(fitting) < len(legal), "some fit and some do not"
    ranked = [legal.layout(index) for index in order_by_estimate(problem).tolist()]
    assert [search.ask() for _ in range(10)] == [each for each in ranked if each in fitting][:10]


def test_with_memory_what_is_estimated_not_to_fit_comes_last() -> None:
    legal = make_legal_set(num_microbatches=8, micro_batch_size=[4, 16], recompute="none")
    search, fitting = make_memory_search(legal, make_problem(legal))
    assert 0 < len(fitting) < len(legal)
    asked = []
    while (layout := search.ask()) is not None:
        asked.append(layout)
        search.tell(layout, measure(layout))
    assert set(asked[: len(fitting)]) == fitting
    assert len(asked) == len(set(asked)) == len(legal)
