from __future__ import annotations

import pytest

from search_spaces.estimates.fitting import count_fitting
from search_spaces.estimates.memory import peak_memory_bytes
from search_spaces.spec.presets.clusters import resolve_cluster
from search_spaces.spec.presets.models import resolve_model
from search_spaces.spec.space import LegalSet, SearchSpace, enumerate_legal

MODEL = resolve_model("gpt-22b")
CLUSTER, _ = resolve_cluster("frontier")


@pytest.fixture(scope="module")
def legal() -> LegalSet:
    """Thousands of layouts, whose last knob has two values."""
    space = SearchSpace(
        global_batch_size={"min": 1, "max": 1 << 16},
        num_nodes={"from": 1, "to": 16},
        tp=[1, 2, 4, 8],
        pp=[1, 2, 4, 8],
        micro_batch_size={"from": 1, "to": 8},
        num_microbatches={"from": 1, "to": 16},
        recompute=["none", "full"],
    )
    return enumerate_legal(space, MODEL, CLUSTER)


def test_every_layout_of_a_small_set_is_estimated(legal: LegalSet) -> None:
    memory = CLUSTER.device_memory_bytes
    found = count_fitting(legal, MODEL, memory)
    assert found.num_fitting == (peak_memory_bytes(legal.columns(), MODEL) <= memory).sum()
    assert (found.num_estimated, found.half_interval) == (len(legal), 0)
    assert 0 < found.num_fitting < len(legal)


@pytest.mark.parametrize("most", [500, 1000, 2800])
def test_a_sample_is_within_its_stated_error(legal: LegalSet, most: int) -> None:
    whole = count_fitting(legal, MODEL, CLUSTER.device_memory_bytes)
    sample = count_fitting(legal, MODEL, CLUSTER.device_memory_bytes, most=most)
    assert sample.num_estimated <= most < whole.num_estimated
    assert sample.half_interval > 0
    # Twice the 95 % interval: the sample is fixed, so that this either always holds or never.
    assert abs(sample.num_fitting - whole.num_fitting) <= 2 * sample.half_interval


def test_a_sample_sees_every_value_of_each_knob(legal: LegalSet) -> None:
    """With a step of 2, it would see one of two values of the last knob."""
    most = len(legal) // 2 + 1
    whole = count_fitting(legal, MODEL, CLUSTER.device_memory_bytes)
    sample = count_fitting(legal, MODEL, CLUSTER.device_memory_bytes, most=most)
    assert abs(sample.num_fitting - whole.num_fitting) <= 2 * sample.half_interval


def test_an_empty_set_fits_nowhere() -> None:
    space = SearchSpace(global_batch_size=7, tp=3)
    found = count_fitting(enumerate_legal(space, MODEL, CLUSTER), MODEL, 1e12)
    assert (found.num_fitting, found.num_estimated, found.half_interval) == (0, 0, 0)
