"""What an open search holds of each layout, which bounds the driver's memory."""

from __future__ import annotations

import tracemalloc

from benchmarks.bench_plan import frontier_space
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.tuner.driver.open_limits import BYTES_A_LAYOUT
from layout_tuner.tuner.strategies.registry import make_strategy
from layout_tuner.tuner.strategies.search_problem import SearchProblem
from tests.kit.campaigns import spec_of


def make_spec(num_sizes: int) -> CampaignSpec:
    """7,896 legal layouts for each number of micro-batches; all that differ in nine knobs."""
    space = frontier_space(num_sizes, most_micro_batch=4)
    return spec_of(model="gpt-22b", cluster="frontier", space=space)


def held_by_search(num_sizes: int) -> tuple[int, int]:
    """The legal layouts of a search, and the bytes that it holds after its first proposal."""
    spec = make_spec(num_sizes)
    tracemalloc.start(1)
    try:
        legal = spec.legal_set()
        problem = SearchProblem(layouts=legal, model=spec.model, cluster=spec.cluster)
        search = make_strategy("guided", problem, seed=0)
        assert search.ask() is not None
        return len(legal), tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_an_open_search_holds_the_stated_bytes_of_each_layout() -> None:
    held_by_search(1)  # imports and caches
    (few, of_few), (many, of_many) = held_by_search(2), held_by_search(6)
    assert many == 3 * few
    a_layout = (of_many - of_few) / (many - few)
    assert 0.9 * BYTES_A_LAYOUT < a_layout <= BYTES_A_LAYOUT
