"""Layouts, models and clusters, with constants that were measured on a machine."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_tuner.documents.reading import MAX_COUNT
from layout_tuner.errors import (
    ClusterInvalidError,
    LayoutInvalidError,
    MeasuredConstantsInvalidError,
    ModelShapeInvalidError,
    SearchSpaceError,
)
from layout_tuner.process_resources import usable_cores
from layout_tuner.search_spaces.clusters.calibration_file import (
    MeasuredConstants,
    constants_file,
    read_constants,
    with_measured_constants,
    write_constants,
)
from layout_tuner.search_spaces.clusters.cluster import detect_local_cpu
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS, resolve_cluster
from layout_tuner.search_spaces.clusters.device_peaks import DEVICE_PEAKS
from layout_tuner.search_spaces.layouts.knobs import Knob
from layout_tuner.search_spaces.layouts.layout import DEGREES, KNOBS, LAYOUT_FIELDS, Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.legality_rules import violations
from layout_tuner.search_spaces.models.model_presets import (
    MODEL_PRESETS,
    model_preset,
    resolve_model,
)
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.spaces.search_space import DERIVABLE, SearchSpace
from layout_tuner.search_spaces.tables.columns import COLUMNS, EXTRA_COLUMNS
from layout_tuner.units import GIB

CORES = usable_cores()


def hal(**fields: Any) -> dict[str, Any]:
    """A cluster that is no preset."""
    return {"name": "hal", **fields}


def test_a_new_knob_at_its_default_is_in_no_document_and_in_no_key() -> None:
    old = ("num_nodes", "tp", "pp", "dp", "vpp", "micro_batch_size", "num_microbatches")
    before = dict.fromkeys(old, 1) | {"pp": 4, "zero_stage": 0, "zero_replicas": 1}
    before |= {"recompute": "none", "sequence_parallel": False, "precision": "fp32"}
    layout = Layout.from_mapping(before)
    assert list(layout.to_mapping().items()) == list(before.items())
    assert layout.key == "n1-tp1-pp4-dp1-vpp1-mbs1-mb1-z0-rc_none-sp0-fp32"
    assert set(layout.to_mapping(every_knob=True)) == set(LAYOUT_FIELDS)
    uneven = replace(layout, pipeline_split="head")
    assert uneven.to_mapping() == before | {"pipeline_split": "head"}
    assert uneven.key == "n1-tp1-pp4-dp1-vpp1-ps_head-mbs1-mb1-z0-rc_none-sp0-fp32"
    zero = Layout(dp=4, zero_stage=1)
    assert "-z1-" in zero.key
    assert "-z1x2-" in replace(zero, zero_replicas=2).key
    # The degrees of experts are in the key if they divide something.
    for ep, etp, end in (
        (1, 1, "fp32"),
        (4, 1, "fp32-ep4"),
        (4, 2, "fp32-ep4x2"),
        (1, 2, "fp32-ep1x2"),
    ):
        assert Layout(ep=ep, etp=etp).key == f"{Layout().key.removesuffix('fp32')}{end}"


@given(
    st.builds(
        Layout,
        **{
            name: st.sampled_from(knob.choices) if knob.choices else st.integers(1, MAX_COUNT)
            for name, knob in KNOBS.items()
        },
    )
)
@settings(max_examples=50)
def test_keys_and_documents_name_every_knob_of_a_layout(layout: Layout) -> None:
    assert Layout.of_key(layout.key) == layout
    assert Layout.from_mapping(layout.to_mapping()) == layout


@pytest.mark.parametrize(
    ("knobs", "edp", "group", "of_experts"),
    [
        ({"dp": 8}, 8, 1, 1),
        ({"dp": 8, "zero_stage": 1}, 8, 8, 8),
        ({"dp": 8, "zero_stage": 3, "zero_replicas": 2}, 8, 4, 4),
        ({"dp": 8, "zero_stage": 1, "zero_replicas": 8}, 8, 1, 1),
        ({"tp": 2, "cp": 2, "dp": 4, "ep": 4}, 4, 1, 1),
        ({"tp": 2, "cp": 2, "dp": 4, "ep": 4, "zero_stage": 1}, 4, 8, 4),
        ({"tp": 2, "cp": 2, "dp": 4, "ep": 4, "zero_stage": 3, "zero_replicas": 2}, 4, 4, 2),
        ({"tp": 2, "cp": 2, "dp": 4, "ep": 4, "etp": 2, "zero_stage": 1}, 2, 8, 2),
        ({"tp": 4, "dp": 2, "zero_stage": 1}, 8, 2, 8),
    ],
    ids=str,
)
def test_a_zero_group_is_the_ranks_that_hold_the_same_over_its_copies(
    knobs: dict[str, Any], edp: int, group: int, of_experts: int
) -> None:
    for each in (Layout(**knobs), LayoutColumns.of(Layout(**knobs))):
        assert each.edp == edp
        assert each.zero_group_size == group
        assert each.expert_zero_group_size == of_experts


@pytest.mark.parametrize(
    ("num_layers", "degrees"), [(94, (4, 8, 16, 32)), (126, (4, 8, 16, 32)), (78, (4, 8, 16))]
)
def test_published_models_are_split_where_the_ends_count(
    num_layers: int, degrees: tuple[int, ...]
) -> None:
    """Qwen3 235B (arXiv:2505.09388), Llama 405B (arXiv:2407.21783), and one layer count more."""
    model = replace(model_preset("llama-70b"), num_layers=num_layers)
    cluster = replace(CLUSTER_PRESETS["h100-sxm"], num_nodes=64)
    for pp in (4, 8, 16, 32):
        layout = Layout(num_nodes=pp, pp=pp, dp=8, precision="bf16", num_microbatches=pp)
        split = replace(layout, pipeline_split="embedding_and_head")
        assert (violations(split, model, cluster) == []) == (pp in degrees)
        if pp in degrees:
            (sentence,) = violations(layout, model, cluster)
            others = "or state unequal stages as pipeline_layout, if the trainer takes it"
            assert sentence.endswith(f"would be with pipeline_split=embedding_and_head; {others}")
            sizes = {len(split.layers_of_stage(stage, num_layers)) for stage in range(pp)}
            assert sizes == {(num_layers + 2) // pp, (num_layers + 2) // pp - 1}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 0}, "tp=0 is not a whole number of at least 1"),
        ({"pp": 1 << 21}, "pp=2097152 is more than 1048576, the largest that is accepted"),
        ({"zero_stage": 4}, "zero_stage=4 is not one of 0, 1, 2, 3"),
        ({"recompute": ["full"]}, "recompute=['full'] is not one of none, selective, full"),
        ({"precision": "fp4"}, "precision='fp4' is not one of fp32, bf16, fp16, fp8, fp8_block"),
        ({"mbs": 1}, "unknown layout field 'mbs'"),
    ],
)
def test_an_impossible_layout_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutInvalidError, match=re.escape(message)):
        Layout.from_mapping(fields)


def test_llama_presets_have_the_published_numbers() -> None:
    for name, parameters, rotary_base in (
        # Parameter counts of the published checkpoints, to the last one.
        ("llama-1b", 1_235_814_400, 5e5),
        ("llama-3b", 3_212_749_824, 5e5),
        ("llama-7b", 6_738_415_616, 1e4),
        ("llama-8b", 8_030_261_248, 5e5),
        ("llama-70b", 70_553_706_496, 5e5),
    ):
        model = model_preset(name)
        assert (model.num_parameters, model.rotary_base) == (parameters, rotary_base), name


def test_gpt_presets_have_the_parameters_of_their_names_and_the_published_flops() -> None:
    sizes = {"125m": 125e6, "1.3b": 1.3e9, "22b": 22e9, "175b": 175e9, "1t": 1e12}
    for name, nominal in sizes.items():
        model = model_preset(f"gpt-{name}")
        assert model.num_parameters == pytest.approx(nominal, rel=0.02)
        # arXiv:2104.04473, equation 2; the closed form leaves out the final norm's 2 h parameters.
        layers, h = model.num_layers, model.hidden_size
        extra = (model.vocab_size + model.seq_length) / (12 * layers * h)
        closed_form = 12 * layers * h**2 * (1 + 13 / (12 * h) + extra)
        assert model.num_parameters == pytest.approx(closed_form + 2 * h, rel=1e-12)
    # arXiv:2104.04473, equation 3, less its recomputation: 72 B s L h^2 (1 + s/(6h) + V/(12 L h)).
    model = model_preset("gpt-175b")
    layers, h, s = model.num_layers, model.hidden_size, model.seq_length
    a_token = 72 * layers * h**2 * (1 + s / (6 * h) + model.vocab_size / (12 * layers * h))
    assert model.model_flops_per_token == pytest.approx(a_token, rel=1e-12)
    recomputed = 96 * layers * h**2 * (1 + s / (6 * h) + model.vocab_size / (16 * layers * h))
    assert model.hardware_flops_per_token("full") == pytest.approx(recomputed, rel=1e-12)


def test_a_model_is_a_preset_a_changed_one_of_another_name_or_unknown() -> None:
    model = resolve_model({"preset": "tiny", "num_layers": 8})
    assert (model.name, model.num_layers, model.hidden_size) == ("tiny-custom", 8, 128)
    assert resolve_model({"preset": "tiny"}) == model_preset("tiny")
    with pytest.raises(ModelShapeInvalidError) as caught:
        resolve_model("gpt-175")
    assert "unknown model 'gpt-175' (did you mean 'gpt-175b'?)" in str(caught.value)
    assert all(name in str(caught.value) for name in MODEL_PRESETS)
    stored = model_preset("tiny-llama").to_mapping()
    del stored["rotary_base"]
    assert ModelShape.from_mapping(stored) == model_preset("tiny-llama"), "the default is 10000"


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"preset": 3}, "preset=3 is not the name of a model"),
        ({"preset": "tiny", "depth": 3}, "unknown model field 'depth'"),
        ({"family": "gpt"}, "the model's num_layers is missing"),
        ({"preset": "tiny", "num_heads": 3}, "hidden_size=128 is not divisible by num_heads=3"),
        ({"preset": "tiny", "name": ""}, "name='' is not a string of 1 to 64 characters"),
        (
            {"preset": "tiny", "rotary_base": 5e5},
            "rotary_base=500000 has no meaning for family=gpt",
        ),
        ({"preset": "tiny-llama", "rotary_base": 0}, "rotary_base=0 is not a number from 2 to 1e"),
        ({"preset": "tiny-llama", "rotary_base": "5e5"}, "rotary_base='5e5' is not a number from"),
    ],
)
def test_an_impossible_model_is_refused(described: Any, message: str) -> None:
    with pytest.raises(ModelShapeInvalidError, match=re.escape(message)):
        resolve_model(described)


def test_every_cluster_preset_and_the_local_cpu_survive_the_round_trip() -> None:
    for name, preset in CLUSTER_PRESETS.items():
        assert resolve_cluster(name) == (preset, None)
        assert resolve_cluster(preset.to_mapping()) == (preset, None)
    sixteen = replace(CLUSTER_PRESETS["frontier"], num_nodes=16)
    assert resolve_cluster({"preset": "frontier", "num_nodes": 16}) == (sixteen, None)
    cluster, warning = resolve_cluster("local-cpu")
    assert (cluster.num_nodes, cluster.devices_per_node, warning) == (1, CORES, None)
    assert resolve_cluster(cluster.to_mapping()) == (cluster, None)
    alone = detect_local_cpu(1)
    assert alone.device_memory_bytes >= cluster.device_memory_bytes * CORES
    limited, _ = resolve_cluster({"preset": "local-cpu", "device_memory_gb": 0.5})
    assert limited.device_memory_bytes == GIB // 2


def test_an_unknown_cluster_gets_generic_constants_and_a_warning_that_lists_them() -> None:
    cluster, warning = resolve_cluster(
        {"name": "hal", "num_nodes": 4, "devices_per_node": 4, "device_memory_gb": 40}
    )
    assert (cluster.num_devices, cluster.device_memory_bytes) == (16, 40 * GIB)
    assert cluster.source == "generic constants"
    assert warning.startswith("cluster 'hal' is not a preset (local-cpu, frontier,")
    assert "memory_bandwidth_bytes_per_s=" in warning
    assert "num_nodes" not in warning


def test_a_bare_name_that_is_unknown_is_refused_with_the_nearest_and_the_list() -> None:
    names = {"fronteer": "frontier", "a100-sxm4": "a100-sxm-4", "mi300": "mi300x", "h20": "h200"}
    for name, nearest in names.items():
        with pytest.raises(ClusterInvalidError) as caught:
            resolve_cluster(name)
        said = str(caught.value)
        start = f"unknown cluster {name!r} (did you mean {nearest!r}?); choose from local-"
        assert said.startswith(start)
        assert all(preset in said for preset in CLUSTER_PRESETS)
        assert "a mapping with name:" in said
        assert resolve_cluster({"name": name})[0].name == name


def test_presets_have_the_peaks_and_memory_of_their_data_sheets() -> None:
    """Dense rates, which are half of those with sparsity that data sheets print first."""
    expected = {
        "a100-sxm-4": (4, 80, 312e12, None, 2.039e12),
        "h200": (8, 141, 989.4e12, 1978.9e12, 4.8e12),
        "h800": (8, 80, 989.4e12, 1978.9e12, 3.35e12),
        "a100-pcie": (8, 80, 312e12, None, 1.935e12),
        "mi300x": (8, 192, 1307.4e12, 2614.9e12, 5.3e12),
        "mi355x": (8, 288, 2516.6e12, 5033.2e12, 8e12),
        "gh200": (4, 96, 989.4e12, 1978.9e12, 4e12),
        "b200": (8, 167, 2250e12, 4500e12, 7.7e12),
        "b300": (8, 244, 2250e12, 4500e12, 8e12),
        "gb200": (4, 186, 2500e12, 5000e12, 8e12),
        "gb300": (4, 259, 2500e12, 5000e12, 8e12),
        "alps": (4, 96, 989.4e12, 1978.9e12, 4e12),
        "frontier": (8, 64, 191.5e12, None, 1.6e12),
    }
    for name, figures in expected.items():
        cluster, _ = resolve_cluster(name)
        assert figures == (
            cluster.devices_per_node,
            cluster.device_memory_bytes / GIB,
            cluster.peak_flops_per_s["bf16"],
            cluster.peak_flops_per_s.get("fp8"),
            cluster.memory_bandwidth_bytes_per_s,
        )
        assert cluster.peak_flops_per_s["fp16"] == cluster.peak_flops_per_s["bf16"]
        assert name == "frontier" or "data sheet" in cluster.source
    v100, _ = resolve_cluster("v100")
    assert v100.peak_flops_per_s == {"fp32": 15.7e12, "fp16": 125e12}, "no bf16, no fp8"
    limited, nvl = resolve_cluster("h100-hbm2e")[0].peak_flops_per_s, DEVICE_PEAKS["H100 NVL"]
    assert all(nvl[each] < limited[each] < DEVICE_PEAKS["H100"][each] for each in limited)
    assert "fp8" in limited
    assert resolve_cluster("alps")[0].num_devices == 10_752
    assert resolve_cluster("frontier")[0].num_devices == 9856 * 8


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"preset": "local-cpu", "num_nodes": 2}, "num_nodes=2: local-cpu is this machine"),
        (
            {"preset": "local-cpu", "devices_per_node": CORES + 1},
            f"={CORES + 1} is more than the {CORES} cores",
        ),
        ({"preset": "fronteer"}, "unknown cluster preset 'fronteer' (did you mean 'frontier'?)"),
        ({"num_nodes": 4}, "the cluster has no name"),
        ({"preset": "frontier", "gpus": 4}, "unknown cluster field 'gpus'"),
        ({"preset": "frontier", "device_memory_gb": "64"}, "device_memory_gb='64' is not a number"),
        (
            {"preset": "frontier", "device_memory_gb": 64, "device_memory_bytes": 64},
            "device_memory_gb or device_memory_bytes, not both",
        ),
        (hal(peak_flops_per_s={"fp4": 1.0}), "peak_flops_per_s['fp4'] is not one of"),
        (hal(peak_flops_per_s=3), "peak_flops_per_s=3 is not a mapping"),
        (hal(intra_node_bandwidth_bytes_per_s={"a": 1}), "from numbers of ranks"),
        (hal(intra_node_bandwidth_bytes_per_s={"02": 3}), "'02' is not a number of"),
        (hal(intra_node_bandwidth_bytes_per_s={-4: 1}), "-4 is not a whole number"),
        (hal(intra_node_bandwidth_bytes_per_s={True: 1}), "True is not a number of"),
        (hal(intra_node_bandwidth_bytes_per_s={2: 1, "2": 3}), "_s: 2 is there more than once"),
        (hal(shared_intra_node_path=1), "shared_intra_node_path=1 is not true or false"),
        (hal(device_memory_gb=1e308), "device_memory_gb=1e+308 is more than 1048576"),
        (hal(device_memory_gb=10**400), "device_memory_gb=1000"),
        (hal(device="x" * 1001), "at most 1000 characters long"),
    ],
)
def test_an_impossible_cluster_is_refused(described: Any, message: str) -> None:
    with pytest.raises(ClusterInvalidError, match=re.escape(message)):
        resolve_cluster(described)


def test_a_presets_name_beside_guesses_is_refused_and_the_preset_offered() -> None:
    for name, stated in (
        ("frontier", {"num_nodes": 16}),
        ("local-cpu", {"devices_per_node": 2}),
        ("frontier", {"num_nodes": 16, "devices_per_node": 8, "device": "a GCD"}),
    ):
        with pytest.raises(ClusterInvalidError) as caught:
            resolve_cluster({"name": name, **stated})
        assert "device_memory_bytes would have to be guessed" in str(caught.value)
        assert f"say {{preset: {name}, ...}}" in str(caught.value)
    # A cluster that is written out may have a preset's name; a warning lists the guessed values.
    limits = {"num_nodes": 1, "devices_per_node": 640, "device_memory_gb": 2, "device": "CPU core"}
    cluster, warning = resolve_cluster({"name": "local-cpu", **limits})
    assert (cluster.devices_per_node, cluster.device_memory_bytes) == (640, 2 * GIB)
    assert "not a preset" not in warning
    assert "generic constants stand in for memory_bandwidth_bytes_per_s=" in warning


def test_an_error_knows_the_field_that_it_comes_from() -> None:
    error = SearchSpaceError("3 is too few", field="tp").within("space").within("campaign")
    assert str(error) == "campaign.space.tp: 3 is too few"
    assert error.field == "campaign.space.tp"
    whole = SearchSpaceError("all of it is wrong").within("space")
    assert str(whole) == "space: all of it is wrong"


def test_columns_and_spaces_have_the_knobs_of_a_layout_and_devices_their_product() -> None:
    *of_layout, job, jobs, texts = fields(LayoutColumns)
    assert (job.name, jobs.name, texts.name) == ("job", "jobs", "texts")
    assert tuple(field.name for field in of_layout) == tuple(KNOBS)
    kinds = {"Ints": True, "Codes": False}
    assert {field.name: kinds[str(field.type)] for field in of_layout} == {
        name: knob.is_number for name, knob in KNOBS.items()
    }
    space = SearchSpace(global_batch_size=8)
    defaults = {name: (knob.default,) for name, knob in KNOBS.items() if name not in DERIVABLE}
    assert space.choices == defaults
    headings = [knob.heading for knob in KNOBS.values() if knob.heading]
    assert len(set(headings)) == len(headings)
    layout = replace(Layout(), **{name: place for place, name in enumerate(DEGREES, start=2)})
    product = math.prod(getattr(layout, name) for name in DEGREES)
    assert layout.num_devices == LayoutColumns.of(layout).num_devices == product


@pytest.mark.parametrize("knob", KNOBS.values(), ids=lambda each: each.name)
def test_a_knob_has_its_default_its_codes_and_its_column(knob: Knob) -> None:
    assert knob.problem(knob.default) is None
    assert getattr(Layout(), knob.name) == knob.default
    is_number = knob.is_number or knob.name == "recompute_layers"
    for of_another_type in (None, 1.5, "other", [], True if is_number else 1):
        assert knob.problem(of_another_type) is not None
    codes = [knob.code(choice) for choice in knob.choices]
    assert codes == list(range(len(knob.choices)))
    assert knob.is_count == (not codes)
    # A measurement table has a column for what does not follow from others.
    has_column = knob.name in (*COLUMNS, *EXTRA_COLUMNS)
    assert has_column == (knob.table_column != "derived")


TINY = model_preset("tiny-moe")


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),  # arXiv:2401.04088
        ("mixtral-8x22b", 141, 39),  # mistral.ai/news/mixtral-8x22b
        ("qwen3-30b-a3b", 30.5, 3.3),  # arXiv:2505.09388 and the models' cards
        ("qwen3-235b-a22b", 235, 22),
        ("gpt-oss-120b", 116.8, 5.1),  # arXiv:2508.10925; active without the embedding
    ],
)
def test_presets_have_the_published_numbers_of_parameters(
    name: str, billions: float, active: float
) -> None:
    model = model_preset(name)
    left_out = model.num_embedding_parameters if "attention sinks" in model.lacks else 0
    assert model.num_parameters / 1e9 == pytest.approx(billions, rel=0.003)
    assert (model.num_active_parameters - left_out) / 1e9 == pytest.approx(active, rel=0.017)


def test_work_counts_the_experts_that_a_token_takes_and_the_width_of_dense_layers() -> None:
    """Six operations for each active matrix parameter but the embedding, and attention's."""
    shape = replace(TINY, shared_expert_ffn_hidden_size=64)
    norms = shape.num_layers * (2 * shape.hidden_size + 2 * shape.head_size) + shape.hidden_size
    matrices = shape.num_active_parameters - shape.num_embedding_parameters - norms
    attention = 3 * 4 * shape.num_layers * shape.seq_length * shape.query_size
    assert shape.model_flops_per_token == 6 * matrices + attention
    more = replace(shape, num_experts=16)
    router = shape.num_layers * 8 * shape.hidden_size
    assert more.model_flops_per_token == shape.model_flops_per_token + 6 * router
    mixed = replace(TINY, ffn_hidden_size=512, num_dense_layers=1)
    assert [mixed.has_experts(i) for i in range(4)] == [False, True, True, True]
    dense = 4 * 128 * 128 - 2 * 128 * 64 + 3 * 128 * 512 + 2 * 128 + 2 * 32
    assert mixed.dense.num_layer_parameters == dense
    assert mixed.num_parameters - TINY.num_parameters == dense - TINY.num_layer_parameters
    flops = mixed.model_flops_per_token - TINY.model_flops_per_token
    assert flops == 6 * (3 * 128 * 512 - 2 * 3 * 128 * 128 - 8 * 128)


@pytest.mark.parametrize("window", [1, 5, 31, 32, 40])
def test_a_window_counts_twice_the_pairs_inside_it(window: int) -> None:
    shape = replace(TINY, seq_length=32, attention_window=window, full_attention_every=4)
    pairs = sum(1 for i in range(32) for j in range(32) if 0 <= i - j < window)
    inside = 2 * pairs - min(window, 32)  # of the causal square likewise, 2 n (n + 1) / 2 - n = n^2
    assert shape.attention_positions == 32 + 3 * (inside // 32)
    assert [shape.window_of(i) is None for i in range(4)] == [window >= 32] * 3 + [True]


def test_documents_state_new_fields_only_where_they_say_something() -> None:
    dense = model_preset("llama-8b")
    assert not {"head_dim", "num_experts", "lacks"} & dense.to_mapping().keys()
    assert ModelShape.from_mapping({**dense.to_mapping(), "head_dim": 128}) == dense
    assert model_preset("qwen3-30b-a3b").to_mapping()["head_dim"] == 128
    for name, model in MODEL_PRESETS.items():
        assert model.name == name
        assert ModelShape.from_mapping(model.to_mapping()) == model
    # The width of experts is that of the feed-forward unless both are stated.
    mapping = TINY.to_mapping()
    del mapping["moe_ffn_hidden_size"]
    assert ModelShape.from_mapping(mapping) == TINY
    narrow = resolve_model({"preset": "tiny-moe", "moe_ffn_hidden_size": 64})
    assert narrow.ffn_hidden_size == narrow.moe_ffn_hidden_size == 64


DENSE = {"preset": "tiny"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"experts_per_token": 9}, "experts_per_token=9 is not from 1 to num_experts=8"),
        ({"ffn_hidden_size": 64}, "ffn_hidden_size=64 is the width of dense layers and there are"),
        (
            {"num_dense_layers": 4, "ffn_hidden_size": 64},
            "num_dense_layers=4 leaves none of num_layers=4 with experts",
        ),
        ({"head_dim": 31}, "head size 31 is odd"),
        ({"num_heads": 6, "num_kv_heads": 6}, "state head_dim if heads have a width of their own"),
        ({"full_attention_every": 2}, "full_attention_every=2 needs attention_window"),
        ({"qk_norm": 1}, "qk_norm=1 is not true, false or width"),
        ({"lacks": "a\nb"}, "is not a line of text"),
        (
            {"num_layers": 1 << 14, "num_experts": 4096}
            | {"moe_ffn_hidden_size": 1 << 20, "hidden_size": 1 << 20},
            "FLOPs per token; at most",
        ),
        (
            {**DENSE, "num_experts": 8, "experts_per_token": 2, "moe_ffn_hidden_size": 64},
            "num_experts=8 has no meaning for family=gpt, which has dense feed-forwards alone",
        ),
        ({**DENSE, "qk_norm": True}, "qk_norm=true has no meaning for family=gpt"),
        ({**DENSE, "experts_per_token": 2}, "experts_per_token=2 needs experts: state num_experts"),
    ],
    ids=str,
)
def test_an_impossible_mixture_of_experts_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelShapeInvalidError, match=re.escape(says)):
        resolve_model({"preset": "tiny-moe", **changes})


def make_constants(**changes: Any) -> MeasuredConstants:
    values: dict[str, Any] = {
        "cluster": "local-cpu",
        "host": "box",
        "measured_at": "2026-03-01T12:00:00+00:00",
        "versions": {"torch": "2.13.0"},
        "num_devices": 2,
        "constants": {
            "peak_flops_per_s": {"fp32": 1e11, "bf16": 2e11},
            "memory_bandwidth_bytes_per_s": 2e10,
            "intra_node_bandwidth_bytes_per_s": {"2": 3e9},
            "intra_node_latency_s": 4e-5,
            "host_operation_s": 3e-6,
        },
        "fits": ({"operation": "all_reduce", "ranks": 2, "error": 0.1},),
        "timings": ({"operation": "host", "seconds": 3e-6},),
        "noise": 0.05,
        "warnings": (),
    }
    return MeasuredConstants(**(values | changes))


def test_what_is_kept_reads_back_equal_and_what_was_never_measured_is_not_there(
    tmp_path: Path,
) -> None:
    assert read_constants(tmp_path, "local-cpu") is None
    assert with_measured_constants("local-cpu", tmp_path) == "local-cpu"
    measured = make_constants()
    path = write_constants(tmp_path, measured)
    assert path == constants_file(tmp_path, "local-cpu")
    assert read_constants(tmp_path, "local-cpu") == measured
    assert [file.name for file in path.parent.iterdir()] == ["local-cpu.json"]


def changed_file(**changes: Any) -> bytes:
    return json.dumps(make_constants().to_mapping() | changes).encode()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        *(
            (text, "not a readable file of measured constants")
            for text in (b"", b"{]", b"\xff\xfe")
        ),
        (b"[1, 2]", "the document is [1, 2], not a mapping"),
        (b"{}", "format=None version=None is not 'layout-tuner/measured-constants' 1"),
        (changed_file(version=2), "version=2 is not"),
        (changed_file(colour="green"), "unknown field 'colour'"),
        (changed_file(constants={"num_nodes": 4}), "unknown constant 'num_nodes'"),
        (
            changed_file(constants={"host_operation_s": -1}),
            "=-1 is not a number from 1e-15 to 10 s",
        ),
        (changed_file(constants={"peak_flops_per_s": {"int8": 1.0}}), "'int8'] is not one of fp32"),
        (changed_file(constants=3), "constants is 3, not a mapping"),
        (changed_file(cluster="frontier"), "the constants are those of cluster 'frontier'"),
        (changed_file(timings="none"), "timings='none' is not a list"),
    ],
)
def test_a_wrong_file_is_refused_with_its_path_and_what_to_do(
    tmp_path: Path, content: bytes, sentence: str
) -> None:
    path = constants_file(tmp_path, "local-cpu")
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(MeasuredConstantsInvalidError) as refused:
        read_constants(tmp_path, "local-cpu")
    assert str(refused.value).startswith(str(path))
    assert sentence in str(refused.value)
    assert "run `layout-tuner calibrate` again, or remove the file" in str(refused.value)


def test_constants_take_the_place_of_a_presets_and_say_where_they_come_from(tmp_path: Path) -> None:
    write_constants(tmp_path, make_constants())
    for described in ("local-cpu", {"preset": "local-cpu"}, {"name": "local-cpu"}):
        cluster, warning = resolve_cluster(with_measured_constants(described, tmp_path))
        assert warning is None
        assert cluster.name == "local-cpu"
        assert cluster.intra_node_bandwidth_bytes_per_s == {2: 3e9}
        assert cluster.peak_flops_per_s["bf16"] == 2e11
        assert cluster.source == (
            "measured by layout-tuner calibrate on box, 2026-03-01T12:00:00+00:00"
        )
        assert cluster.device_memory_bytes == resolve_cluster("local-cpu")[0].device_memory_bytes


def test_what_a_description_states_itself_stays(tmp_path: Path) -> None:
    write_constants(tmp_path, make_constants())
    described = {"preset": "local-cpu", "memory_bandwidth_bytes_per_s": 7e9, "devices_per_node": 1}
    cluster, _ = resolve_cluster(with_measured_constants(described, tmp_path))
    assert (cluster.memory_bandwidth_bytes_per_s, cluster.devices_per_node) == (7e9, 1)
    assert cluster.host_operation_s == 3e-6
    full = resolve_cluster("local-cpu")[0].to_mapping()
    assert with_measured_constants(full, tmp_path) == full
    assert with_measured_constants(["nonsense"], tmp_path) == ["nonsense"]


def test_a_measured_cluster_that_is_no_preset_still_warns_of_what_is_guessed(
    tmp_path: Path,
) -> None:
    write_constants(tmp_path, make_constants(cluster="ours"))
    cluster, warning = resolve_cluster(with_measured_constants({"name": "ours"}, tmp_path))
    assert cluster.host_operation_s == 3e-6
    assert "device_memory_bytes" in warning
    assert "memory_bandwidth_bytes_per_s" not in warning
    assert with_measured_constants("ours", tmp_path) == "ours", "its size is not known"
