from __future__ import annotations

from search_spaces.estimates.fitting import count_fitting
from search_spaces.estimates.memory import peak_memory_bytes
from search_spaces.spec.presets.clusters import resolve_cluster
from search_spaces.spec.presets.models import resolve_model
from search_spaces.spec.space import SearchSpace, enumerate_legal

MODEL = resolve_model("gpt-22b")
CLUSTER, _ = resolve_cluster("frontier")


def test_a_sample_is_within_its_stated_error_and_sees_every_value_of_each_knob() -> None:
    """With a step of 2, the half of the set would have one of two values of the last knob."""
    space = SearchSpace(
        global_batch_size={"min": 1, "max": 1 << 16},
        num_nodes={"from": 1, "to": 16},
        tp=[1, 2, 4, 8],
        pp=[1, 2, 4, 8],
        micro_batch_size={"from": 1, "to": 8},
        num_microbatches={"from": 1, "to": 16},
        recompute=["none", "full"],
    )
    legal = enumerate_legal(space, MODEL, CLUSTER)
    memory = CLUSTER.device_memory_bytes
    whole = count_fitting(legal, MODEL, memory)
    assert whole.num_fitting == (peak_memory_bytes(legal.columns(), MODEL) <= memory).sum()
    assert (whole.num_estimated, whole.half_interval) == (len(legal), 0)
    assert 0 < whole.num_fitting < len(legal)
    for most in (500, 1000, 2800, len(legal) // 2 + 1):
        sample = count_fitting(legal, MODEL, memory, most=most)
        assert sample.num_estimated <= most < whole.num_estimated
        assert sample.half_interval > 0
        # Twice the 95 % interval: the sample is fixed, so that this either always holds or never.
        assert abs(sample.num_fitting - whole.num_fitting) <= 2 * sample.half_interval
    none = enumerate_legal(SearchSpace(global_batch_size=7, tp=3), MODEL, CLUSTER)
    found = count_fitting(none, MODEL, 1e12)
    assert (found.num_fitting, found.num_estimated, found.half_interval) == (0, 0, 0)
