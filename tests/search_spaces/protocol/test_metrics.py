from __future__ import annotations

from dataclasses import fields

from search_spaces.protocol.measurement import Measurement
from search_spaces.protocol.metrics import METRICS
from search_spaces.spec.objectives import OBJECTIVES


def test_a_metric_is_measured_or_follows_from_what_was_measured() -> None:
    measured = {field.name for field in fields(Measurement)}
    assert {name for name, metric in METRICS.items() if metric.is_measured} <= measured
    derived = [name for name, metric in METRICS.items() if not metric.is_measured]
    assert derived == ["tokens_per_node_hour"]
    assert set(OBJECTIVES) < set(METRICS), "every objective that ranks is a metric"
    assert METRICS["peak_memory_bytes"].is_whole
    assert not METRICS["tokens_per_s"].is_whole
