"""Which samples from elsewhere calibrate, and by which constants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.known_measurements import Knowledge, Sample
from layout_tuner.predictions.belief.peaks.corrected_peak import MemoryBelief
from layout_tuner.predictions.belief.plausible_samples import PlausibleSamples, plausible_samples
from layout_tuner.predictions.estimates.step_time import step_time_s
from layout_tuner.search_spaces.clusters.cluster import MEASURED_SOURCE
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS, resolve_cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset

A100 = CLUSTER_PRESETS["a100-sxm"]
FAST = replace(A100, memory_bandwidth_bytes_per_s=1e15)
MODEL = model_preset("gpt-1.3b")
LAYOUT = Layout(tp=8, num_microbatches=8)
STEP_S = float(step_time_s(LAYOUT, MODEL, A100)[0])
(PEAK_BYTES,) = MemoryBelief.prior(A100).peak_bytes(LAYOUT, MODEL)[0].tolist()


def sample(**changes: Any) -> Sample:
    """A run as the estimates expect it."""
    found: dict[str, Any] = {"state": "completed", "step_time_s": STEP_S, **changes}
    if found["state"] != "completed":
        del found["step_time_s"]
    return Sample(**{"model": MODEL, "cluster": A100, "layout": LAYOUT, **found})


def of(*samples: Sample) -> PlausibleSamples:
    return plausible_samples(samples)


@pytest.mark.parametrize("count", [1, 100])
def test_step_times_beyond_reason_have_no_weight_however_many_they_are(count: int) -> None:
    odd = [sample(step_time_s=STEP_S * 1e-4), sample(step_time_s=STEP_S * 1e4)] * count
    sound = sample()
    found = of(sound, *odd)
    assert (found.time, found.num_step_times) == ((sound,), 1)
    (with_odd,), _ = TimeCalibration.fit(found.time).predict(LAYOUT, MODEL, A100)
    (without,), _ = TimeCalibration.fit([sound]).predict(LAYOUT, MODEL, A100)
    assert with_odd == without
    (warning,) = found.warnings
    assert warning.startswith(f"{2 * count} of {2 * count + 1} measured step times are left out")


@pytest.mark.parametrize(
    ("times", "is_kept"), [(1e-3, False), (0.1, True), (1.0, True), (10.0, True), (1e3, False)]
)
def test_peaks_beyond_reason_have_no_weight(times: float, is_kept: bool) -> None:
    found = of(sample(peak_memory_bytes=round(times * PEAK_BYTES)))
    assert (len(found.memory), found.num_peaks) == (is_kept, is_kept)
    assert found.num_step_times == 1, "the step time is judged by itself"
    assert [each.split(" runs")[0] for each in found.warnings] == ["1 of 1"] * (not is_kept)


@pytest.mark.parametrize(
    ("state", "memory_times", "is_kept"),
    [
        # The memory of a device in bytes in place of gigabytes, or the other way round.
        ("infeasible", 1e3, False),
        ("infeasible", 10.0, True),
        ("infeasible", 1e-3, True),
        ("failed", 1e3, False),
        ("completed", 1e-3, False),
        ("completed", 0.1, True),
        ("completed", 1e3, True),
    ],
)
def test_a_bound_on_the_peak_has_no_weight_where_it_is_beyond_reason(
    state: str, memory_times: float, is_kept: bool
) -> None:
    cluster = replace(A100, device_memory_bytes=round(memory_times * PEAK_BYTES))
    assert len(of(sample(state=state, cluster=cluster)).memory) == is_kept


def test_samples_of_the_same_machine_get_the_constants_of_the_new_search() -> None:
    theirs = replace(FAST, device_memory_bytes=A100.device_memory_bytes // 2, num_nodes=2)
    (found,) = Knowledge(samples=(sample(cluster=theirs),)).on(A100)
    expected = replace(A100, device_memory_bytes=theirs.device_memory_bytes, num_nodes=2)
    assert found == sample(cluster=expected), "a probe could use no more than its campaign states"


@pytest.mark.parametrize(
    "change", [{"name": "other"}, {"device": "NVIDIA H100"}, {"devices_per_node": 4}]
)
def test_samples_of_another_machine_keep_its_constants(change: dict[str, Any]) -> None:
    known = Knowledge(samples=(sample(cluster=replace(FAST, **change)),))
    assert known.on(A100) == known


def test_a_table_that_states_no_device_takes_the_constants_of_the_cluster_of_its_name() -> None:
    ours = replace(A100, name="ours")
    stated = {"name": "ours", "devices_per_node": 8}
    generic, _ = resolve_cluster(stated)
    (found,) = Knowledge(samples=(sample(cluster=generic),)).on(ours)
    memory_bytes = generic.device_memory_bytes
    assert found.cluster == replace(ours, device_memory_bytes=memory_bytes, num_nodes=1)


def test_where_the_constants_agree_the_samples_are_the_same_objects() -> None:
    samples = (sample(), sample(cluster=replace(A100, num_nodes=3, source="a table")))
    assert all(a is b for a, b in zip(samples, Knowledge(samples=samples).on(A100), strict=True))


def test_constants_that_were_measured_take_the_place_of_equal_ones_of_a_data_sheet() -> None:
    measured = replace(A100, source=f"{MEASURED_SOURCE} on 2026-01-01")
    (found,) = Knowledge(samples=(sample(),)).on(measured)
    assert found.cluster == measured, "their peak is that of a product"
