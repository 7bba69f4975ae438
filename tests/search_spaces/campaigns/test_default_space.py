"""What a space gets for the knobs that its document leaves out."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from layout_tuner.errors import SearchSpaceError
from layout_tuner.predictions.estimates.fitting import count_fitting
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.campaigns.default_space import MAX_AUTO_COMBINATIONS
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import KNOBS
from layout_tuner.search_spaces.layouts.pipeline_layout import stage_layers
from layout_tuner.search_spaces.layouts.recomputation import RECOMPUTE_CHOICES
from layout_tuner.search_spaces.legality_rules import violations
from layout_tuner.search_spaces.spaces.space_presets import SPACE_PRESETS
from tests.kit.campaigns import spec_of as least_of

BATCH = {"global_batch_size": 1024}


def document(**fields: Any) -> dict[str, Any]:
    least = {
        "name": "first",
        "model": "llama-8b",
        "cluster": {"preset": "h100-sxm", "num_nodes": 64},
        "space": BATCH,
        "budget": {"trials": 3},
    }
    return least | fields


def spec_of(**fields: Any) -> CampaignSpec:
    return CampaignSpec.from_document(document(**fields))


SIZES = [
    (4, ("llama-1b", "gpt-22b")),
    (32, ("llama-8b", "llama-70b")),
    (256, ("llama-70b", "gpt-175b")),
]
CASES = [
    (cluster, num_nodes, models[at % 2])
    for at, cluster in enumerate(CLUSTER_PRESETS)
    for num_nodes, models in SIZES
]
CASES += [
    ("h100-sxm", 8, "qwen3-30b-a3b"),
    ("frontier", 16, "gpt-oss-120b"),
    ("gb300", 64, "qwen3-235b-a22b"),
    ("h100-sxm", 64, "deepseek-v3"),
    ("gb200", 64, "kimi-k2"),
    ("h100-sxm", 32, "glm-4.5"),
    ("mi300x", 16, "glm-4.5-air"),
    ("h100-sxm", 16, "qwen3-next-80b-a3b"),
    ("h100-sxm", 4, "nemotron-3-nano-30b-a3b"),
    ("b200", 16, "nemotron-3-super-120b-a12b"),
    ("h100-sxm", 32, "minimax-m2"),
    ("h100-sxm", 16, "llama-4-scout"),
    ("h100-sxm", 64, "llama-4-maverick"),
    ("h100-sxm", 8, "olmo-3-32b"),
    ("a100-sxm", 4, "gpt-oss-20b"),
]
OF_OTHER_TRAINERS = frozenset(
    [
        "deepseek-v3",
        "kimi-k2",
        "glm-4.5",
        "glm-4.5-air",
        "qwen3-next-80b-a3b",
        "nemotron-3-nano-30b-a3b",
        "nemotron-3-super-120b-a12b",
        "minimax-m2",
        "gpt-oss-20b",
    ]
)
"""Models that the embedded trainer does not train."""


@pytest.mark.parametrize(("cluster", "num_nodes", "model"), CASES)
def test_every_preset_has_layouts_that_fit(cluster: str, num_nodes: int, model: str) -> None:
    probe = {"trainer": "megatron-lm"} if model in OF_OTHER_TRAINERS else {}
    spec = spec_of(model=model, cluster={"preset": cluster, "num_nodes": num_nodes}, probe=probe)
    legal = spec.legal_set()
    spec.refuse_if_too_large(legal)
    assert len(legal) >= 5
    assert count_fitting(legal, spec.model, spec.allowed_memory_bytes).num_fitting >= 5
    assert spec.space.num_combinations <= MAX_AUTO_COMBINATIONS
    assert num_nodes in spec.space.values("num_nodes")
    assert spec.space.values("precision") == (spec.cluster.default_precision,)
    assert spec.warned_of_space(legal).warnings == spec.warnings
    assert (len(set(legal.column("ep"))) > 1) == (spec.model.num_experts > 0)


@pytest.mark.parametrize(
    ("batch", "degrees"), [(8, (1,)), (4, (1, 2, 4)), ({"min": 2, "max": 4}, (1, 2, 4))]
)
def test_a_batch_of_fewer_sequences_than_devices_splits_a_model_that_fits(
    batch: Any, degrees: tuple[int, ...]
) -> None:
    node = {"preset": "h100-sxm", "num_nodes": 1}
    space = spec_of(model="gpt-125m", cluster=node, space={"global_batch_size": batch}).space
    assert space.values("tp") == space.values("pp") == degrees


def test_no_knob_of_the_trainer_is_proposed_that_the_document_does_not_name() -> None:
    spec = spec_of(model="llama-8b", cluster={"preset": "h100-sxm", "num_nodes": 2})
    assert spec.space.auto
    assert not spec.space.job
    asked = spec_of(space=BATCH | {"job": {"compile": [False, True]}})
    assert list(asked.space.job.knobs) == ["compile"]


def test_a_large_model_has_every_axis_and_a_small_one_keeps_degrees_of_one() -> None:
    large = spec_of(model="llama-70b").space
    for knob in ("tp", "pp", "vpp", "recompute", "sequence_parallel", "zero_stage"):
        assert len(large.values(knob)) > 1, knob
    assert large.values("zero_replicas") == (1,)
    small = spec_of(model="llama-1b", cluster={"preset": "mi300x", "num_nodes": 4}).space
    for knob in ("tp", "pp", "vpp"):
        assert small.values(knob) == (1,), knob
    assert small.values("recompute") == ("none",)
    cores = spec_of(model="tiny", cluster="local-cpu", space={"global_batch_size": 8}).space
    assert cores.num_combinations <= 64


def test_too_few_sequences_for_the_devices_open_the_degrees() -> None:
    spec = spec_of(
        model="llama-1b",
        cluster={"preset": "mi300x", "num_nodes": 64},
        space={"global_batch_size": 64},
        objective="tokens_per_s",
    )
    assert max(spec.space.values("tp")) * max(spec.space.values("pp")) >= 8
    assert len(spec.legal_set()) >= 5


def test_long_sequences_open_context_parallelism() -> None:
    def of(seq_length: int, **changes: Any) -> Any:
        model = {"preset": "llama-8b", "seq_length": seq_length}
        return spec_of(**{"model": model} | changes).space

    assert of(4096).values("cp") == (1,)
    assert of(4096).values("cp_comm_type") == ("all_gather",)
    assert "cp" not in of(4096).to_mapping()
    assert of(8192).values("cp") == (1, 2)
    assert of(8192).values("cp_comm_type") == ("all_gather", "p2p", "a2a")
    assert of(32768).values("cp") == (1, 2, 4, 8)
    assert of(32768, space={**BATCH, "cp": 4, "tp": 1}).values("cp") == (4,)
    # A sequence that fits no device is shared.
    small = {"preset": "h100-sxm", "num_nodes": 4, "device_memory_bytes": 8 << 30}
    assert (
        min(
            of(262144, model={"preset": "llama-1b", "seq_length": 262144}, cluster=small).values(
                "cp"
            )
        )
        > 1
    )


def experts_of(model: str, nodes: int, **space: Any) -> Any:
    cluster = {"preset": "h100-sxm", "num_nodes": nodes}
    return spec_of(
        model=model, cluster=cluster, space=BATCH | space, objective="tokens_per_s"
    ).space


def test_experts_are_divided_by_powers_of_two_that_fit_up_to_64_or_beyond_if_need_be() -> None:
    for model, nodes, degrees in (
        ("qwen3-30b-a3b", 2, (1, 2, 4, 8, 16)),
        ("qwen3-30b-a3b", 16, (1, 2, 4, 8, 16, 32, 64)),
        ("mixtral-8x7b", 16, (1, 2, 4, 8)),
        ("llama-8b", 16, (1,)),
    ):
        space = experts_of(model, nodes)
        assert space.values("ep") == degrees
        assert space.values("etp") == (1,)
        assert ("ep" in space.auto) == (degrees != (1,))
        assert "etp" not in space.to_mapping()
    whole = {**BATCH, "tp": 1, "pp": 1, "zero_stage": 0}
    for size, degrees in ((80, (16, 32, 64)), (34, (128,))):
        cluster = {"preset": "h100-sxm", "num_nodes": 32, "device_memory_bytes": size << 30}
        space = spec_of(model="qwen3-30b-a3b", cluster=cluster, space=whole).space
        assert space.values("ep") == degrees


def test_tokens_are_cut_wherever_tp_stands_beside_experts() -> None:
    many = {"num_microbatches": {"from": 1, "to": 300}, "dp": {"from": 1, "to": 64}}
    many["global_batch_size"] = {"min": 1, "max": 9999}
    for tp, expected in ((1, (False,)), ([1, 2], (False, True)), ([2, 4], (True,))):
        assert experts_of("qwen3-30b-a3b", 8, tp=tp).values("sequence_parallel") == expected
        large = experts_of("qwen3-30b-a3b", 8, tp=tp, **many)
        assert large.values("sequence_parallel") == expected
        assert large.num_combinations <= MAX_AUTO_COMBINATIONS


def test_fewer_nodes_are_tried_where_the_objective_is_per_device_or_cost() -> None:
    for objective, nodes in (
        ("tokens_per_s", (64,)),
        (["tokens_per_s", "memory_headroom"], (64,)),
        ("tokens_per_s_per_device", (16, 32, 64)),
        (["tokens_per_s", "tokens_per_node_hour"], (16, 32, 64)),
    ):
        assert spec_of(objective=objective).space.values("num_nodes") == nodes, objective
    baseline = spec_of(baseline={"tp": 8, "zero_stage": 1}).baseline
    assert baseline.num_nodes == 64, "it runs on the stated nodes"


def test_the_nodes_are_those_of_the_cluster_else_of_the_largest_allocation_else_asked_for() -> None:
    whole = document(cluster="frontier", objective="tokens_per_s")
    asked: list[str] = []

    def known(cluster: str) -> int:
        asked.append(cluster)
        return 12

    assert CampaignSpec.from_document(whole, known).space.values("num_nodes") == (12,)
    assert asked == ["frontier"]
    with pytest.raises(SearchSpaceError, match=r"space\.num_nodes: .* 9856 nodes of frontier"):
        CampaignSpec.from_document(whole)
    stated = {**whole, "space": {**BATCH, "num_nodes": 8}}
    assert CampaignSpec.from_document(stated).space.values("num_nodes") == (8,)


def test_a_stated_knob_is_left_as_it_is_and_the_word_auto_is_like_leaving_it_out() -> None:
    # A batch between bounds, so that num_microbatches is a knob.
    space = {"global_batch_size": {"min": 256, "max": 512}}
    absent = spec_of(space=space)
    values = {"precision": "fp16", "recompute": "full", "sequence_parallel": True, "zero_stage": 1}
    values |= {"pipeline_split": "head", "cp_comm_type": "p2p", "schedule": "gpipe"}
    values |= {"rank_order": "tp_cp_pp_dp", "pipeline_layout": "Et|t*79L"}
    values |= {"recompute_layers": "2", "offload": "optimizer", "optimizer_states": "bf16"}
    # A new knob at its default is in no document; the space is so large that cp has one way.
    left_out = ("dp", "tp_columns", "ep", "etp", "pipeline_split", "cp_comm_type")
    left_out += ("schedule", "rank_order", "pipeline_layout")
    left_out += ("recompute_layers", "offload", "optimizer_states")
    for knob in KNOBS:
        stated = spec_of(space={**space, knob: values.get(knob, 2)}).space
        assert stated.values(knob) == (values.get(knob, 2),)
        assert knob not in stated.auto
        assert (knob in absent.space.auto) == (knob not in left_out)
    for knob in ("tp", "num_microbatches", "precision", "schedule"):
        assert spec_of(space={**space, knob: "auto"}) == absent


def test_levers_of_memory_are_proposed_where_they_are_asked_for() -> None:
    plain = spec_of(model="llama-70b").space
    assert plain.values("recompute") == ("none", "selective", "full")
    assert plain.values("recompute_layers") == ("all",)
    stated = {**BATCH, "pp": [1, 4], "tp": 8, "vpp": 1, "micro_batch_size": 1, "num_nodes": 8}
    asked = {**stated, "recompute_layers": "auto", "optimizer_states": "auto", "offload": "auto"}
    space = spec_of(model="llama-70b", space=asked).space
    assert space.values("recompute") == ("none", "selective", "full", "mlp", "mlp+layernorm")
    # Of 80 layers, and of 20 of each of four stages.
    assert space.values("recompute_layers") == ("all", "10", "20/13/6/0", "40")
    assert space.values("optimizer_states") == ("fp32",)
    assert space.values("offload") == ("none",)


def test_modules_of_experts_are_proposed_to_trainers_that_keep_them() -> None:
    stated = {**BATCH, "tp": 1, "pp": 2, "ep": 2, "sequence_parallel": False, "num_nodes": 1}
    stated |= {"cp": 1, "vpp": 1, "recompute_layers": "auto", "micro_batch_size": 1}
    found = {}
    for trainer in ("embedded", "megatron-lm"):
        probe = {"probe": {"trainer": trainer}}
        spec = spec_of(model="mixtral-8x7b", space=stated, **probe)
        words = ("moe_act", "moe_act+layernorm", "layernorm")
        assert spec.space.values("recompute") == ("none", "selective", "full", *words)
        legal = spec.legal_set()
        codes = np.unique(legal.column("recompute"))
        found[trainer] = {RECOMPUTE_CHOICES[code] for code in codes} & set(words)
    assert found == {"embedded": {"layernorm"}, "megatron-lm": set(words)}


def test_modules_of_the_kinds_of_layers_are_proposed() -> None:
    asked = {**BATCH, "pp": 2, "vpp": 1, "micro_batch_size": 1, "recompute_layers": "auto"}
    for model, nodes, modules in (
        ("deepseek-v3", 64, "mlp+moe_act+mla_up_proj"),
        ("kimi-k2", 64, "mlp+moe_act+mla_up_proj"),
        ("nemotron-3-super-120b-a12b", 16, "moe_act"),
        ("qwen3-next-80b-a3b", 16, "moe_act"),
        ("llama-4-maverick", 64, "mlp+moe_act"),
    ):
        cluster = {"preset": "h100-sxm", "num_nodes": nodes}
        space = spec_of(model=model, cluster=cluster, space=asked).space
        _, _, _, inside, more, *_ = space.values("recompute")
        assert inside == modules
        assert set(more.split("+")) == {*modules.split("+"), "layernorm"}


def test_tp_divides_the_heads_of_every_kind_of_layer() -> None:
    """Those of Mamba-2 have 8 groups, of delta nets 16 heads; attention has 2 key heads here."""
    narrow = {"num_kv_heads": 32, "mamba_num_groups": 2}
    for model, degrees in (
        ({"preset": "nemotron-3-super-120b-a12b"}, {1, 2}),
        ({"preset": "nemotron-3-super-120b-a12b", "num_kv_heads": 32}, {1, 2, 4, 8}),
        ({"preset": "nemotron-3-super-120b-a12b", **narrow}, {1, 2}),
        ({"preset": "qwen3-next-80b-a3b", "num_kv_heads": 16}, {1, 2, 4, 8}),
        ({"preset": "qwen3-next-80b-a3b", "num_kv_heads": 16, "linear_num_key_heads": 2}, {1, 2}),
    ):
        cluster = {"preset": "h100-sxm", "num_nodes": 1}
        space = spec_of(model=model, cluster=cluster, space={"global_batch_size": 8}).space
        assert set(space.values("tp")) == degrees


def test_offload_is_proposed_where_nothing_fits() -> None:
    stated = {**BATCH, "num_nodes": 1, "tp": 1, "pp": 1, "zero_stage": 0, "cp": 1}
    for asked, found in (({}, ("none",)), ({"offload": "auto"}, ("none", "optimizer"))):
        space = spec_of(model="llama-70b", space={**stated, **asked}).space
        assert space.values("offload") == found


LAYERS_126 = {"preset": "llama-70b", "num_layers": 126}
"""As Llama 405B has: pipelines of 2, 3, 6, ... stages, and of 4, 8, 16 with the ends counted."""


def test_another_split_is_tried_where_it_makes_more_pipelines_legal() -> None:
    spec = spec_of(model=LAYERS_126)
    assert spec.space.values("pipeline_split") == ("layers", "embedding_and_head")
    assert {2, 4, 8} <= set(spec.space.values("pp"))
    assert "pipeline_split" in spec.space.auto
    assert {2, 4, 8} <= set(spec.legal_set().column("pp"))


def test_no_other_split_is_tried_where_the_layers_alone_divide() -> None:
    even = spec_of(model="llama-70b").space
    assert even.values("pipeline_split") == ("layers",)
    assert "pipeline_split" not in even.to_mapping()


def test_splits_and_stages_suit_the_other_where_one_is_stated() -> None:
    def stated(model: Any, **knobs: Any) -> Any:
        return spec_of(model=model, space=BATCH | knobs).space

    assert not {4, 8} & set(stated(LAYERS_126, pipeline_split="layers").values("pp"))
    odd = {"preset": "llama-70b", "num_layers": 127}
    assert stated(LAYERS_126, pp=8).values("pipeline_split") == ("embedding_and_head",)
    assert stated(odd, pp=8).values("pipeline_split") == ("embedding", "head")


def test_a_space_with_large_stated_knobs_stays_below_the_limit() -> None:
    space = {
        "global_batch_size": {"min": 1, "max": 1 << 16},
        "micro_batch_size": {"from": 1, "to": 100},
        "num_microbatches": {"from": 1, "to": 500},
    }
    spec = spec_of(model="llama-70b", space=space)
    assert spec.space.num_combinations <= MAX_AUTO_COMBINATIONS
    assert len(spec.space.values("tp")) > 1, "the axes that matter least are given up first"
    assert spec.space.values("num_microbatches") == tuple(range(1, 501))


def test_what_is_stored_keeps_its_choices_and_older_documents_their_single_values() -> None:
    resolved = spec_of()
    stored = json.loads(json.dumps(resolved.to_mapping()))
    assert CampaignSpec.from_mapping(stored) == resolved
    assert CampaignSpec.from_document(stored) == resolved
    older = CampaignSpec.from_mapping(document())
    assert older.space.num_combinations == 1
    assert older.space.auto == ()


def test_a_preset_of_a_space_states_all_of_its_knobs() -> None:
    preset = spec_of(model="gpt-175b", cluster="frontier", space="paper-table-v")
    assert preset.space == SPACE_PRESETS["paper-table-v"]
    tp = spec_of(
        model="gpt-175b", cluster="frontier", space={"preset": "paper-table-v", "tp": "auto"}
    )
    assert tp.space.auto == ("tp",)


def test_a_wrong_knob_is_refused_as_ever_beside_words_auto() -> None:
    for wrong, says in (
        ({"tp": 0}, r"space\.tp: 0 is not a whole number"),
        ({"tp": ["auto"]}, r"space\.tp: 'auto' is not a whole number"),
        ({"auto": ["tpp"]}, r"space\.auto: .* is not a list of knobs"),
    ):
        with pytest.raises(SearchSpaceError, match=says):
            spec_of(space={**BATCH, "pp": "auto", **wrong})


def test_few_legal_layouts_are_a_warning_once() -> None:
    few = {"tp": 8, "pp": 1, "zero_stage": 1, "micro_batch_size": 1, "num_nodes": 64, "cp": 1}
    spec = spec_of(space={**BATCH, **few, "recompute": "full"})
    legal = spec.legal_set()
    assert len(legal) == 2
    warned = spec.warned_of_space(legal)
    (warning,) = warned.warnings
    assert warning.startswith("the space has few layouts: 2 of 2 combinations legal")
    assert warned.warned_of_space(legal) == warned


GPU: dict[str, Any] = {"name": "ours", "device": "a device", "num_nodes": 1}
GPU |= {"devices_per_node": 2, "device_memory_bytes": 8 << 30}


@pytest.mark.parametrize(
    ("cluster", "peaks", "expected"),
    [
        *((name, {}, "fp16" if name == "v100" else "bf16") for name in CLUSTER_PRESETS),
        ("local-cpu", {}, "fp32"),
        ("local-cpu", {"fp32": 1e11, "bf16": 1e12}, "fp32"),
        ("local-cpu", {"bf16": 1e12}, "bf16"),
        (GPU, {"fp32": 15.7e12, "fp16": 125e12}, "fp16"),
        (GPU, {"fp32": 9e12}, "fp32"),
        (GPU, {}, "fp32"),
    ],
    ids=str,
)
def test_a_campaign_without_a_precision_takes_the_one_that_its_cluster_is_used_with(
    cluster: Any, peaks: dict[str, float], expected: str
) -> None:
    described = {"preset": cluster} if isinstance(cluster, str) else cluster
    described = described | ({"peak_flops_per_s": peaks} if peaks else {})
    spec = least_of(model="gpt-125m", cluster=described, space={"global_batch_size": 64})
    assert spec.to_mapping()["space"]["precision"] == expected
    assert spec.space.values("precision") == (spec.cluster.default_precision,) == (expected,)
    layout = spec.legal_set().layout(0)
    assert layout.precision == expected
    assert not violations(layout, spec.model, spec.cluster)
    assert CampaignSpec.from_mapping(spec.to_mapping()) == spec


def test_a_stated_precision_stays_and_so_does_that_of_a_preset_of_a_space() -> None:
    stated = least_of(space={"global_batch_size": 64, "precision": ["fp32", "fp16"]})
    assert stated.space.values("precision") == ("fp32", "fp16")
    for name, preset in SPACE_PRESETS.items():
        for space in (name, {"preset": name, "global_batch_size": 640}):
            found = least_of(model="gpt-125m", space=space).space.values("precision")
            assert found == preset.values("precision"), name


def test_the_choices_of_tp_and_ep_know_a_domain_of_nodes() -> None:
    experts = {"model": "qwen3-235b-a22b", "space": {**BATCH, "num_nodes": 32}}
    trays = spec_of(**experts, cluster={"preset": "gb200", "num_nodes": 32}).space
    assert max(trays.values("ep")) == 64
    dense = {"model": "gpt-1t", "space": {**BATCH, "num_nodes": 32}}
    for levels, most in ((None, 4), (CLUSTER_PRESETS["gb200"].to_mapping()["levels"], 16)):
        cluster = {"preset": "gb200", "num_nodes": 32, "levels": levels}
        assert max(spec_of(**dense, cluster=cluster).space.values("tp")) == most
    wide = [{"name": "tray", "devices": 4}]
    wide += [{"name": "domain", "devices": 128, "bandwidth_bytes_per_s": 720e9}]
    cluster = {"preset": "gb200", "num_nodes": 32, "levels": wide}
    assert max(spec_of(**experts, cluster=cluster).space.values("ep")) == 128


def test_balanced_stages_are_proposed_where_they_are_asked() -> None:
    space = {"global_batch_size": 64, "pp": [1, 4, 8], "vpp": [1, 2], "num_nodes": 8}
    left_out = spec_of(model="llama-8b", space=space)
    assert left_out.space.values("pipeline_layout") == ("split",)
    assert "pipeline_layout" not in left_out.space.to_mapping()
    asked = spec_of(model="llama-8b", space=space | {"pipeline_layout": "auto"})
    split, *texts = asked.space.values("pipeline_layout")
    assert split == "split"
    assert {len(stage_layers(text)) for text in texts} == {4, 8, 16}
    assert {sum(stage_layers(text)) for text in texts} == {32}
    # The output takes longer than a layer.
    assert all(stage_layers(text)[-1] < max(stage_layers(text)) for text in texts)
    assert "pipeline_layout" in asked.space.auto


def test_stages_are_written_out_where_no_split_divides_the_layers() -> None:
    cluster = {"preset": "h100-sxm", "num_nodes": 64}
    space = spec_of(model="deepseek-v3", cluster=cluster, space={"global_batch_size": 512}).space
    assert space.values("pp") == (1, 2, 4, 8, 16, 32)
    split, *written = space.values("pipeline_layout")
    assert split == "split"
    assert [len(stage_layers(text)) for text in written] == [4, 8, 16, 32]
    assert {sum(stage_layers(text)) for text in written} == {61}
    # A split that is stated is kept to, and so is a pipeline of a degree that one divides.
    stated = {"global_batch_size": 512, "pipeline_split": "embedding"}
    space = spec_of(model="deepseek-v3", cluster=cluster, space=stated).space
    assert (space.values("pp"), space.values("pipeline_layout")) == ((1, 2), ("split",))
    space = spec_of(model="kimi-k2", cluster=cluster, space={**BATCH, "pp": 2}).space
    assert space.values("pipeline_layout") == ("split",)


def test_stages_that_are_stated_get_their_pipelines() -> None:
    """As the campaign of a job states them, beside those of the job."""
    cluster = {"preset": "h100-sxm", "num_nodes": 64}
    stated = {"global_batch_size": 512, "pipeline_layout": ["split", "Et*7|(t*8|)*5t*7|t*7L"]}
    space = spec_of(model="deepseek-v3", cluster=cluster, space=stated).space
    assert (space.values("pp"), space.values("vpp")) == ((1, 2, 8), (1,))
    space = spec_of(model="deepseek-v3", cluster=cluster, space=stated | {"vpp": [1, 2]}).space
    assert space.values("pp") == (1, 2, 4, 8)
