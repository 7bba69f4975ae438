"""Whatever cluster and model are accepted, the estimates of their layouts are finite numbers."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_tuner.documents.reading import MAX_COUNT
from layout_tuner.errors import ModelTooLargeError, NoLegalLayoutError, SearchSpaceError
from layout_tuner.predictions.estimator import Estimator
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.clusters.cluster import CLUSTER_RANGES, Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import PRECISIONS, Layout
from layout_tuner.search_spaces.layouts.recomputation import RECOMPUTE_MODES
from layout_tuner.search_spaces.models.model_fields import DEFAULTS, MODEL_RANGES, SWITCHES
from layout_tuner.search_spaces.models.model_presets import MODEL_PRESETS
from layout_tuner.search_spaces.models.model_shape import ModelShape
from tests.kit.hostile_texts import walk

EXTREME = [2**63, 2**63 - 1, 2**64, 2**1024, 10**400, 5e-324, 1e-300, 1e308, 1.7e308]
NUMBERS = st.one_of(
    st.sampled_from(EXTREME),
    st.integers(min_value=1),
    st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    *(st.sampled_from([r.low, r.high]) for r in CLUSTER_RANGES.values()),
)
COUNTS = st.one_of(st.sampled_from([1, 2, 8, 4096, MAX_COUNT, 2**31, 2**63]), st.integers(1, 10**6))
FRONTIER = CLUSTER_PRESETS["frontier"].to_mapping()
FRONTIER.pop("levels")  # they fix the devices of a node
MODEL = MODEL_PRESETS["llama-8b"].to_mapping()
SAME_EACH_TIME = settings(deadline=None, derandomize=True, database=None)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster | None:
    """A cluster with some fields of any size, or None where it is refused."""
    changes: dict[str, Any] = {}
    for name in draw(st.sets(st.sampled_from(sorted(CLUSTER_RANGES)), max_size=5)):
        if name == "peak_flops_per_s":
            changes[name] = draw(st.dictionaries(st.sampled_from(PRECISIONS), NUMBERS))
        elif name == "intra_node_bandwidth_bytes_per_s":
            changes[name] = draw(st.dictionaries(COUNTS, NUMBERS, max_size=3))
        else:
            changes[name] = draw(COUNTS if CLUSTER_RANGES[name].is_whole else NUMBERS)
    try:
        return Cluster.from_mapping(FRONTIER | changes)
    except SearchSpaceError:
        return None


@st.composite
def models(draw: st.DrawFn) -> ModelShape | None:
    """A model with sizes of any magnitude that divide each other, or None where it is refused."""
    heads, size = draw(COUNTS), draw(st.sampled_from([1, 2, 64, 128, 256, MAX_COUNT]))
    changes: dict[str, Any] = {"family": draw(st.sampled_from(["gpt", "llama"]))}
    if draw(st.booleans()):
        changes |= {"num_heads": heads, "num_kv_heads": heads, "hidden_size": heads * size}
    for name in ("num_layers", "ffn_hidden_size", "seq_length", "vocab_size"):
        if draw(st.booleans()):
            changes[name] = draw(COUNTS)
    try:
        return ModelShape.from_mapping(MODEL | changes)
    except SearchSpaceError:
        return None


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    knobs = st.one_of(st.sampled_from([1, 2, 8, MAX_COUNT]), st.integers(1, MAX_COUNT))
    counts = ("num_nodes", "tp", "pp", "dp", "vpp", "micro_batch_size", "num_microbatches")
    # A pipeline has a row of figures a stage: a million of them would only be slow.
    chosen = {name: draw(st.sampled_from([1, 2, 64]) if name == "pp" else knobs) for name in counts}
    return Layout(
        **chosen,
        zero_stage=draw(st.sampled_from([0, 1])),
        recompute=draw(st.sampled_from(RECOMPUTE_MODES)),
        sequence_parallel=draw(st.booleans()),
        precision=draw(st.sampled_from(PRECISIONS)),
    )


@settings(SAME_EACH_TIME, max_examples=150)
@given(cluster=clusters(), model=models(), layout=layouts())
def test_estimates_of_all_that_is_accepted_are_finite(
    cluster: Cluster | None, model: ModelShape | None, layout: Layout
) -> None:
    if cluster is None or model is None:
        return
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        report = Estimator(model=model, cluster=cluster).estimate(layout).to_mapping()
    numbers = {place: value for place, value in walk(report) if isinstance(value, float)}
    assert {place: value for place, value in numbers.items() if not math.isfinite(value)} == {}
    assert report["step_time_s"] > 0
    assert report["peak_memory_bytes"] > 0
    assert 0 <= report["fits"] <= 1


@settings(SAME_EACH_TIME, max_examples=60)
@given(cluster=clusters(), model=models())
def test_campaigns_on_all_that_is_accepted_are_judged(
    cluster: Cluster | None, model: ModelShape | None
) -> None:
    if cluster is None or model is None:
        return
    space = {"global_batch_size": MAX_COUNT, "tp": [1, 2], "pp": [1, 2], "micro_batch_size": 4}
    document = {"name": "any", "space": space, "strategy": "exhaustive"}
    document |= {"model": model.to_mapping(), "cluster": cluster.to_mapping()}
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        spec = CampaignSpec.from_mapping(document)
        with suppress(NoLegalLayoutError, ModelTooLargeError):
            spec.refuse_if_too_large()


@pytest.mark.parametrize("name", CLUSTER_RANGES)
def test_constants_of_a_cluster_outside_of_their_range_are_refused_with_it(name: str) -> None:
    allowed = CLUSTER_RANGES[name]
    key = {"peak_flops_per_s": "bf16", "intra_node_bandwidth_bytes_per_s": 2}.get(name)

    def cluster(value: float) -> Cluster:
        return Cluster.from_mapping(FRONTIER | {name: value if key is None else {key: value}})

    # A float for a count has another refusal.
    small_or_large = () if allowed.is_whole else (1e-300, 1e308)
    for value in (2**63, 0, -1, 10**400, *small_or_large):
        with pytest.raises(SearchSpaceError) as refused:
            cluster(value)
        assert name in str(refused.value)
        assert str(allowed) in str(refused.value)
    cluster(allowed.low)
    cluster(allowed.high)


@pytest.mark.parametrize("name", MODEL_RANGES)
def test_sizes_of_a_model_outside_of_their_range_are_refused_with_it(name: str) -> None:
    # 0 experts: a dense model; no share of a head's features is rotated.
    may_be_zero = {each for each, default in DEFAULTS.items() if default == 0}
    may_be_zero |= {"attention_dropout", "rotary_fraction"}
    zero = () if name in may_be_zero else (0,)
    for value in (2**63, -1, 10**400, *zero):
        with pytest.raises(SearchSpaceError) as refused:
            ModelShape.from_mapping(MODEL | {name: value})
        assert f"{name}=" in str(refused.value)
        assert str(MODEL_RANGES[name]) in str(refused.value)


def test_every_number_of_a_cluster_and_a_model_has_a_range() -> None:
    words = {"name", "device", "source", "shared_intra_node_path", "levels", "node_hour_price"}
    assert {field.name for field in fields(Cluster)} - words == set(CLUSTER_RANGES)
    words = {"name", "family", "qk_norm", "attention", "lacks", "layer_kinds", *SWITCHES}
    words |= {"activation", "norm", "biases", "router_score"}
    assert {field.name for field in fields(ModelShape)} - words == set(MODEL_RANGES)
    for preset in CLUSTER_PRESETS.values():
        assert Cluster.from_mapping(preset.to_mapping()) == preset
