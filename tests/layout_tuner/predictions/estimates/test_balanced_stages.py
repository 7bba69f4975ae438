"""Stages of unequal layers: their estimates, and the cut whose largest stage is the fastest."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout_tuner.predictions.estimates.balanced_stages import balanced_stages, cut
from layout_tuner.predictions.estimates.distinct_layouts import distinct_peaks
from layout_tuner.predictions.estimates.peak_memory import (
    memory_terms,
    peak_memory_bytes,
    stage_memory,
)
from layout_tuner.predictions.estimates.rank_stages import RankStages
from layout_tuner.predictions.estimates.step_shape import idle_slots
from layout_tuner.predictions.estimates.step_time import block_and_head_s, step_time_s
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.layouts.pipeline_layout import layout_text
from layout_tuner.search_spaces.models.model_presets import model_preset

MODEL = model_preset("llama-8b")
CLUSTER = CLUSTER_PRESETS["h100-sxm"]
JOB = Layout(pp=4, num_microbatches=16, precision="bf16", dp=2)
V_NAMES = ("zbv", "v_half", "v_min")


@given(
    st.lists(st.sampled_from([0.5, 1.0, 1.7]), min_size=1, max_size=7),
    st.floats(0.0, 4.0),
    st.integers(1, 4),
)
def test_no_cut_has_a_faster_largest_stage(layer_s: list[float], head_s: float, n: int) -> None:
    found = cut(np.array(layer_s), head_s, n)
    times = {}
    for inner in combinations_with_replacement(range(len(layer_s) + 1), n - 1):
        ends = [0, *inner, len(layer_s)]
        sizes = tuple(np.diff(ends).tolist())
        if all(sizes[1:-1]):
            parts = [sum(layer_s[a:b]) for a, b in pairwise(ends)]
            parts[-1] += head_s
            times[sizes] = max(parts)
    assert (found is None) == (not times or (n > 1 and min(times.values()) == np.inf))
    if found is not None:
        assert sum(found) == len(layer_s)
        assert times[found] == pytest.approx(min(times.values()))


def test_the_stage_of_the_output_has_fewer_layers() -> None:
    stages = balanced_stages(JOB, MODEL, CLUSTER)
    assert stages is not None
    layer_s, head_s = block_and_head_s(JOB, MODEL, CLUSTER)
    assert stages[-1] < min(stages[:-1])
    assert max(*stages[:-1], stages[-1] + head_s / layer_s) < 8 + head_s / layer_s
    written = replace(JOB, pipeline_layout=layout_text(stages))
    uneven = replace(JOB, pipeline_layout=layout_text((11, 7, 7, 7)))
    equal_s, written_s, uneven_s = (
        float(step_time_s(each, MODEL, CLUSTER)[0]) for each in (JOB, written, uneven)
    )
    assert written_s < equal_s < uneven_s


@pytest.mark.parametrize("knobs", [{}, {"schedule": "zero_bubble"}, {"zero_stage": 1}])
def test_a_stage_of_the_same_layers_has_the_same_memory(knobs: dict[str, Any]) -> None:
    equal = stage_memory(replace(JOB, **knobs), MODEL)
    # Stages 1 and 3 keep their 8 layers.
    moved = stage_memory(replace(JOB, pipeline_layout="Et*9|t*8|t*7|t*8L", **knobs), MODEL)
    assert moved[1].total_bytes == pytest.approx(equal[1].total_bytes)
    assert moved[3].total_bytes == pytest.approx(equal[3].total_bytes)
    assert moved[0].activations_bytes == pytest.approx(equal[0].activations_bytes * 9 / 8)
    assert moved[2].weights_bytes < equal[2].weights_bytes


def test_the_fullest_stage_may_be_any() -> None:
    layout = replace(JOB, pipeline_layout="Et|t*14|t*10|t*7L")
    peaks = [each.total_bytes for each in stage_memory(layout, MODEL)]
    assert peaks.index(max(peaks)) == 1
    columns = LayoutColumns.of_each([JOB, layout])
    assert peak_memory_bytes(columns, MODEL)[1] == pytest.approx(max(peaks))
    assert memory_terms(columns, MODEL).num_bytes[:, :, 1].sum(1).max() == pytest.approx(max(peaks))


def test_interleaved_stages_are_counted_by_their_table() -> None:
    stages = [4] * 8
    stages[0], stages[-1] = 5, 3
    layout = replace(JOB, vpp=2, pipeline_layout=layout_text(stages))
    ranks = RankStages.of(LayoutColumns.of(layout), MODEL)
    assert ranks is not None
    assert ranks.layers(np.arange(4)).tolist() == [9, 8, 8, 7]
    # Of the 11 passes that rank 0 holds, most are of its first chunk when that has more layers.
    assert float(ranks.in_flight(np.asarray(0))) == 8 * 5 + 3 * 4
    plain = stage_memory(replace(JOB, vpp=2), MODEL)
    assert stage_memory(layout, MODEL)[1].total_bytes == pytest.approx(plain[1].total_bytes)


def test_v_schedules_hold_less_and_wait_longer_in_order() -> None:
    layouts = [replace(JOB, vpp=2, schedule=name) for name in V_NAMES]
    peaks = [[each.total_bytes for each in stage_memory(of, MODEL)] for of in layouts]
    for fuller, emptier in pairwise(peaks):
        assert all(a > b for a, b in zip(fuller, emptier, strict=True))
    # Embedding and output are on the first rank; the others hold the same.
    for each in peaks:
        assert each[0] > max(each[1:])
        assert max(each[1:]) < 1.1 * min(each[1:])
    idle = [float(idle_slots(LayoutColumns.of(of))) for of in layouts]
    assert idle == sorted(idle)
    assert idle[1] < float(idle_slots(LayoutColumns.of(JOB)))
    columns = LayoutColumns.of_each([JOB, *layouts])
    assert idle_slots(columns).tolist() == [3.0, *idle]
    # Of many micro-batches the bubble follows from that of fewer.
    many = idle_slots(LayoutColumns.of(replace(layouts[0], num_microbatches=400)))
    assert float(many) == pytest.approx(idle[0], rel=0.05)


def test_peaks_of_texts_are_not_mixed_up() -> None:
    texts = ["split", "Et*9|t*8|t*7|t*8L", "Et|t*14|t*10|t*7L"]
    layouts = [
        replace(JOB, pipeline_layout=text, num_microbatches=m) for text in texts for m in (4, 99)
    ]
    columns = LayoutColumns.of_each(layouts)
    tile = replace(
        columns,
        **{
            name: getattr(columns, name)[:, None]
            for name in ("num_nodes", *JOB.to_mapping(every_knob=True), "job")
        },
    )
    few, places = distinct_peaks(tile, always_shards=False)
    assert len(few.tp) == 3
    assert np.allclose(
        peak_memory_bytes(few, MODEL)[places[:, 0]], peak_memory_bytes(columns, MODEL)
    )


def test_stages_of_unlike_layers_balance_their_own_times() -> None:
    """Layers of Mamba-2 are cheaper here than those with wide experts, which come last."""
    mamba = {"mamba_num_heads": 64, "mamba_head_dim": 64}
    model = replace(
        MODEL,
        **mamba,
        mamba_state_dim=64,
        mamba_num_groups=8,
        layer_kinds=("mamba2",) * 16 + ("full+dense",) * 16,
    )
    stages = balanced_stages(JOB, model, CLUSTER)
    assert stages is not None
    assert sum(stages) == 32
    assert stages[0] > stages[2] >= stages[3], "cheap layers come first, the output last"
