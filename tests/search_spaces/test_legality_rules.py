from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from layout_tuner.errors import LayoutInvalidError
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.clusters.network_levels import NetworkLevel
from layout_tuner.search_spaces.layouts.global_batch import GlobalBatch
from layout_tuner.search_spaces.layouts.layout import PRECISIONS, Layout, Precision
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.layouts.narrow_formats import NARROW
from layout_tuner.search_spaces.layouts.recomputation import RECOMPUTE_MODES
from layout_tuner.search_spaces.legality_rules import (
    OTHER_TRAINER_SCOPES,
    PROBE_SCOPES,
    RULES,
    violations,
)
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.node_scaling import scaled
from layout_tuner.search_spaces.rule import RuleContext
from layout_tuner.search_spaces.untrained_models import UNTRAINED
from layout_tuner.units import GIB
from layout_tuner.workers.trainer.open_training import unsupported

NODES = Cluster(name="box", device="card", num_nodes=4, devices_per_node=8, device_memory_bytes=GIB)
TRAYS = replace(
    NODES,
    devices_per_node=4,
    levels=(
        NetworkLevel(name="tray", devices=4),
        NetworkLevel(name="domain", devices=8, bandwidth_bytes_per_s=1e12),
        NetworkLevel(name="fabric"),
    ),
)

WITHOUT_TRAINER = OTHER_TRAINER_SCOPES


def make_model(**changes: Any) -> ModelShape:
    shape = {
        "name": "twelve",
        "family": "llama",
        "num_layers": 12,
        "hidden_size": 768,
        "ffn_hidden_size": 3072,
        "num_heads": 24,
        "num_kv_heads": 24,
        "seq_length": 96,
        "vocab_size": 960,
        "tied_embeddings": False,
    }
    return ModelShape(**{**shape, **changes})


def case(
    rule: str,
    sentence: str,
    *,
    model: dict[str, Any] | None = None,
    cluster: Cluster = NODES,
    batch: int | GlobalBatch | None = None,
    **layout: Any,
) -> Any:
    """A layout that breaks one rule alone, and what is said of it."""
    context = {"cluster": cluster, "global_batch": batch}
    return pytest.param(
        Layout(**layout), make_model(**model or {}), context, sentence, id=f"{rule}: {sentence}"
    )


EXPERTS = {"num_experts": 4, "experts_per_token": 2}
EXPERTS |= {"moe_ffn_hidden_size": 96, "num_dense_layers": 1}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}

DELTA = {"layer_kinds": ("gated_delta_net+dense", "full+dense")}
DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 8}
DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
MAMBA = {"layer_kinds": ("mamba2", "dense", "full"), "mamba_num_heads": 6, "mamba_num_groups": 2}
MAMBA |= {"mamba_head_dim": 16, "mamba_state_dim": 16}

CASES = [
    case("moe_act_needs_experts", "recompute=moe_act+layernorm: moe_act is the activation of "
         "experts, and the model has none; leave it out", recompute="layernorm+moe_act"),
    case("mlp_needs_dense_layers", "recompute=mlp: mlp is the feed-forward of dense layers, and "
         "all layers of the model have experts; leave it out, or take moe_act",
         recompute="mlp", model=EXPERTS | {"num_dense_layers": 0, "ffn_hidden_size": 96}),
    case("mla_up_proj_needs_latent_attention", "recompute=mla_up_proj: mla_up_proj is a part of "
         "latent attention, and the model has none; leave it out", recompute="mla_up_proj"),
    case("recompute_layers_by_rank", "recompute_layers=2/1 has 2 numbers, and pp=4: give one for "
         "each pipeline rank, or one for all", pp=4, recompute="full", recompute_layers="2/1"),
    case("recompute_layers_without_recompute", "recompute_layers=2 with recompute=none is the "
         "same job as recompute_layers=all", recompute_layers=2),
    case("recompute_layers_are_some", "recompute_layers=3 of 3 layers of a stage is the same job "
         "as recompute=none, or as recompute_layers=all",
         pp=2, vpp=2, num_microbatches=2, recompute="full", recompute_layers=3),
    case("recompute_layers_are_some", "recompute_layers=0 of 12 layers of a stage is the same job "
         "as recompute=none, or as recompute_layers=all", recompute="mlp", recompute_layers=0),
    case("recompute_layers_are_some", "recompute_layers=8 of 8 layers of a stage is the same job "
         "as recompute=none, or as recompute_layers=all",
         pp=2, pipeline_layout="Et*4|t*8L", recompute="full", recompute_layers=8),
    case("recompute_layers_of_a_rank", "recompute_layers=5/3/1/0 is the same job as "
         "recompute_layers=3/3/1/0, by the layers of each rank's stages",
         pp=4, recompute="full", recompute_layers="5/3/1/0"),
    case("recompute_layers_of_a_rank", "recompute_layers=5/8 is the same job as "
         "recompute_layers=all, by the layers of each rank's stages",
         pp=2, pipeline_layout="Et*4|t*8L", recompute="full", recompute_layers="5/8"),
    case("recompute_layers_of_a_rank", "recompute_layers=6/4 is the same job as "
         "recompute_layers=6, by the layers of each rank's stages",
         pp=2, pipeline_layout="Et*8|t*4L", recompute="full", recompute_layers="6/4"),
    case("offload_of_activations", "offload=activations with pp=1 and recompute=full: activations "
         "are offloaded without a pipeline and without recomputation alone, as Megatron-LM has it",
         recompute="full", offload="activations"),
    case("heads_over_tp", "num_heads=12 is not divisible by tp=8",
         tp=8, model={"num_heads": 12, "num_kv_heads": 4}),
    case("kv_heads_over_tp", "num_kv_heads=4 is not divisible by tp=8, and key/value heads are "
         "not replicated over tensor-parallel ranks", tp=8, model={"num_kv_heads": 4}),
    case("heads_over_tp", "window_num_heads=12 is not divisible by tp=8", tp=8,
         model={"attention_window": 8, "full_attention_every": 2, "window_num_heads": 12,
                "window_num_kv_heads": 4}),
    case("heads_over_tp", "linear_num_key_heads=2 is not divisible by tp=4", tp=4, model=DELTA),
    case("heads_over_tp", "mamba_num_groups=2 is not divisible by tp=4", tp=4,
         model=MAMBA | {"mamba_num_heads": 8}),
    case("kv_heads_over_tp", "window_num_kv_heads=4 is not divisible by tp=8, and key/value heads "
         "are not replicated over tensor-parallel ranks", tp=8,
         model={"attention_window": 8, "full_attention_every": 2, "window_num_kv_heads": 4}),
    case("columns_without_kinds", "tp_columns=2: no trainer divides layers of the kind mamba2 by "
         "columns; use tp", tp_columns=2, model=MAMBA),
    case("columns_without_kinds", "tp_columns=2: no trainer divides multi-token prediction by "
         "columns; use tp", tp_columns=2, model={"num_mtp_layers": 1}),
    case("states_over_cp", "linear_num_key_heads=2 is not divisible by tp*cp=2*2=4: layers without "
         "softmax attention exchange tokens for heads", tp=2, cp=2, model=DELTA),
    case("states_over_cp", "mamba_num_heads=6 is not divisible by tp*cp=1*4=4: layers without "
         "softmax attention exchange tokens for heads", cp=4, model=MAMBA),
    case("states_over_cp", "cp=3 neither divides mamba_num_groups/tp=2/1 nor is a multiple of it: the "
         "ranks of cp exchange tokens for heads, and share the groups", cp=3, model=MAMBA),
    case("ffn_over_tp", "ffn_hidden_size=3076 is not divisible by tp=8",
         tp=8, model={"ffn_hidden_size": 3076}),
    case("expert_width_over_etp", "moe_ffn_hidden_size=100 is not divisible by etp=3",
         dp=3, etp=3, model=EXPERTS | {"moe_ffn_hidden_size": 100}),
    case("experts_over_ep", "num_experts=4 is not divisible by ep=3", dp=6, ep=3, model=EXPERTS),
    case("shared_expert_over_tp", "shared_expert_ffn_hidden_size=100 is not divisible by tp=8",
         tp=8, sequence_parallel=True, model=EXPERTS | {"shared_expert_ffn_hidden_size": 100}),
    case("vocab_over_tp", "vocab_size=1001 is not divisible by tp=8",
         tp=8, model={"vocab_size": 1001}),
    case("layers_over_stages", "num_layers=12 is not divisible by pp*vpp=4*2=8; state unequal "
         "stages as pipeline_layout, if the trainer takes it", pp=4, vpp=2, num_microbatches=4),
    case("layers_over_stages", "num_layers=3 is not divisible by pp*vpp=8*1=8", pp=8,
         model={"num_layers": 3}),
    case("layers_over_stages", "num_layers=126 is not divisible by pp*vpp=8*1=8; it would be with "
         "pipeline_split=embedding_and_head; or state unequal stages as pipeline_layout, if the "
         "trainer takes it", pp=8, model={"num_layers": 126}),
    case("layers_over_stages", "num_layers+embedding+head=7+1+1=9 is not divisible by "
         "pp*vpp=2*2=4; it would be with pipeline_split=embedding or head; or state unequal stages "
         "as pipeline_layout, if the trainer takes it",
         pp=2, dp=4, vpp=2, num_microbatches=2, pipeline_split="embedding_and_head",
         model={"num_layers": 7}),
    case("layout_over_stages", "pipeline_layout=Et*5|t*4|t*3L has 3 stages, and pp*vpp=4*1=4",
         pp=4, pipeline_layout="Et*5|t*4|t*3L"),
    case("layout_of_the_layers", "pipeline_layout=Et*4|t*7L has 11 layers t, and num_layers=12",
         pp=2, pipeline_layout="Et*4|t*7L"),
    case("layout_and_split", "pipeline_layout=Et*5|t*7L says which layers a stage has; leave out "
         "pipeline_split=head", pp=2, pipeline_layout="Et*5|t*7L", pipeline_split="head"),
    case("split_needs_pipeline", "pipeline_split=head with pp=1 is the same job as "
         "pipeline_split=layers", pipeline_split="head"),
    case("schedule_interleaved", "vpp=2 interleaves schedule=1f1b, not schedule=gpipe; take vpp=1 "
         "or schedule=1f1b", pp=2, vpp=2, num_microbatches=4, schedule="gpipe"),
    case("v_has_two_chunks", "schedule=v_half has two chunks on each rank, in the shape of a V; take "
         "vpp=2, not vpp=1", pp=2, num_microbatches=4, schedule="v_half"),
    case("rank_order_needs_both", "rank_order=tp_cp_pp_dp with pp=2 and dp=1 is the same job as "
         "rank_order=tp_cp_dp_pp", pp=2, dp=1, rank_order="tp_cp_pp_dp"),
    case("schedule_needs_pipeline", "schedule=zero_bubble with pp=1 is the same job as "
         "schedule=1f1b", schedule="zero_bubble"),
    case("interleaving_needs_pipeline", "vpp=2 has no pipeline to interleave: pp=1", vpp=2),
    case("interleaved_microbatches", "num_microbatches=5 is not divisible by pp=2, which the "
         "interleaved schedule of vpp=2 needs", pp=2, vpp=2, num_microbatches=5),
    case("sequence_over_tp", "seq_length=100 is not divisible by tp=8, which sequence_parallel "
         "needs", tp=8, sequence_parallel=True, model={"seq_length": 100}),
    case("sequence_over_tp", "seq_length=100 is not divisible by 2*cp*tp=2*2*2=8, which "
         "sequence_parallel needs", tp=2, cp=2, sequence_parallel=True, model={"seq_length": 100}),
    case("sequence_over_cp", "seq_length=100 is not divisible by 2*cp=2*4=8: each "
         "context-parallel rank holds two equal chunks of every sequence",
         cp=4, model={"seq_length": 100}),
    case("heads_over_cp", "num_kv_heads=4 is not divisible by tp*cp=2*4=8, which cp_comm_type=a2a "
         "needs; take all_gather or p2p",
         tp=2, cp=4, cp_comm_type="a2a", model={"num_kv_heads": 4}),
    case("ep_needs_experts", "ep=2 and etp=1 divide experts, and the model has none; leave them "
         "out", dp=2, ep=2),
    case("ep_needs_experts", "ep=1 and etp=2 divide experts, and the model has none; leave them "
         "out", tp=2, etp=2),
    case("ranks_over_experts", "tp*cp*dp=1*2*3=6 is not divisible by etp*ep=1*4=4: the ranks of a "
         "stage divide its experts",
         cp=2, dp=3, ep=4, zero_stage=1, zero_replicas=2, model=EXPERTS),
    case("experts_need_sequence_parallel", "tp=2 with sequence_parallel=false: all "
         "tensor-parallel ranks would send the same tokens to the experts; a model with experts "
         "needs sequence_parallel=true", tp=2, model=EXPERTS),
    case("experts_in_order_of_ranks", "rank_order=tp_cp_pp_dp with pp=2: experts need etp*ep=1*2 "
         "equal to tp*cp=1*1, so that they do not leave the ranks of a replica; Megatron-LM "
         "asserts it too", rank_order="tp_cp_pp_dp", pp=2, dp=2, ep=2, model=EXPERTS),
    case("cp_comm_type_needs_cp", "cp_comm_type=p2p with cp=1 is the same job as "
         "cp_comm_type=all_gather", cp_comm_type="p2p"),
    case("vocab_over_tp", "vocab_size=962 is not divisible by tp*tp_columns=2*2=4",
         tp=2, tp_columns=2, model={"vocab_size": 962}),
    case("hidden_over_columns", "hidden_size=768 is not divisible by tp_columns=5", tp_columns=5),
    case("columns_without_experts", "tp_columns=2: tensor columns divide the features of tokens, "
         "and experts get whole tokens; use ep and tp for a model with experts",
         tp_columns=2, model=EXPERTS),
    case("columns_without_latents", "tp_columns=2: the latents of attention are whole on each rank "
         "(kv_lora_rank=32); use tp", tp_columns=2, model=LATENT),
    case("tp_within_node", "tp*tp_columns=4*4=16 is more than devices_per_node=8, so that tensor "
         "parallelism leaves the node (allow_tp_across_nodes is false)",
         num_nodes=2, tp=4, tp_columns=4),
    case("tp_within_node", "tp=16 is more than the 8 devices of a domain, so that tensor "
         "parallelism leaves the domain (allow_tp_across_nodes is false)",
         num_nodes=4, tp=16, cluster=TRAYS, model={"num_heads": 48, "num_kv_heads": 48}),
    case("tp_within_node", "tp=6 is no multiple of devices_per_node=4, so that tensor "
         "parallelism leaves the node (allow_tp_across_nodes is false)",
         num_nodes=3, tp=6, dp=2, cluster=TRAYS),
    case("nodes_exist", "num_nodes=5 is more than the 4 of box", num_nodes=5, dp=40),
    case("tp_within_node", "tp=24 is more than devices_per_node=8, so that tensor parallelism "
         "leaves the node (allow_tp_across_nodes is false)", num_nodes=3, tp=24),
    case("tp_within_node", "devices_per_node=8 is not divisible by tp=6 on num_nodes=3, so that "
         "tensor parallelism leaves the node (allow_tp_across_nodes is false)",
         num_nodes=3, tp=6, dp=4),
    case("world_size", "tp*pp*dp=2*3*2=12 is more than num_nodes*devices_per_node=1*8=8",
         tp=2, pp=3, dp=2),
    case("world_size", "tp*pp*dp=2*3*2=12 does not fill num_nodes*devices_per_node=2*8=16",
         num_nodes=2, tp=2, pp=3, dp=2),
    case("precision_of_device", "precision=fp16 is not one that box states a peak for (fp32, bf16)",
         precision="fp16",
         cluster=replace(NODES, peak_flops_per_s={"fp32": 1e12, "bf16": 2e12})),
    case("global_batch", "global_batch_size=16 is not divisible by dp*micro_batch_size=2*3=6",
         batch=16, dp=2, micro_batch_size=3, num_microbatches=2),
    case("global_batch", "dp*micro_batch_size*num_microbatches=2*4*3=24 is not "
         "global_batch_size=16", batch=16, dp=2, micro_batch_size=4, num_microbatches=3),
    case("global_batch", "dp*micro_batch_size*num_microbatches=2*4*3=24 lies outside "
         "global_batch_size from 1 to 23",
         batch=GlobalBatch(minimum=1, maximum=23), dp=2, micro_batch_size=4, num_microbatches=3),
    case("zero_groups_over_dp", "dp=4 is not divisible by zero_replicas=3",
         dp=4, zero_stage=1, zero_replicas=3),
    case("zero_groups_over_dp", "dp*cp=2*2=4 is not divisible by zero_replicas=3",
         dp=2, cp=2, zero_stage=1, zero_replicas=3),
    case("zero_groups_over_edp", "tp*cp*dp/(etp*ep)=2 ranks hold the same experts, which is not "
         "divisible by zero_replicas=4", dp=8, ep=4, zero_stage=1, zero_replicas=4, model=EXPERTS),
    case("zero_groups_need_zero", "zero_replicas=2 has no sharded optimizer states to copy: "
         "zero_stage=0", dp=4, zero_replicas=2),
    case("zero_needs_groups", "zero_stage=1 with zero_replicas=4 of dp=4 is the same job as "
         "zero_stage=0: every rank would hold all optimizer states",
         dp=4, zero_stage=1, zero_replicas=4),
    case("zero_needs_replicas", "zero_stage=1 with dp=1 is the same job as zero_stage=0",
         zero_stage=1),
    case("zero_needs_replicas", "zero_stage=3 with dp=1 is the same job as zero_stage=0",
         zero_stage=3),
    case("sequence_parallel_needs_tp", "sequence_parallel=true with tp=1 is the same job as "
         "sequence_parallel=false", sequence_parallel=True),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "model", "context", "sentence"), CASES)
def test_a_broken_rule_names_the_offending_numbers(
    layout: Layout, model: ModelShape, context: dict[str, Any], sentence: str
) -> None:
    assert violations(layout, model, scopes=WITHOUT_TRAINER, **context) == [sentence]


def test_every_rule_outside_the_trainer_has_a_case() -> None:
    rules = {str(each.id).split(":")[0] for each in CASES}
    # A layout whose text is a split is that split: spaces alone break the other rule.
    of_spaces = {"layout_is_split"}
    assert rules | of_spaces == {rule.name for rule in RULES if rule.scope in WITHOUT_TRAINER}


@pytest.mark.parametrize("precision", list(NARROW))
def test_the_embedded_trainer_refuses_narrow_types(precision: Precision) -> None:
    (said,) = violations(Layout(precision=precision), make_model(), NODES, scopes={"trainer"})
    assert said.startswith(f"precision={precision} is not supported by the embedded trainer")


def test_a_device_without_the_format_is_refused_with_its_formats() -> None:
    cluster = CLUSTER_PRESETS["h100-sxm"]
    for precision in ("mxfp8", "nvfp4"):
        said = f"precision={precision} is not one that h100-sxm states a peak for (fp32, bf16, fp16, fp8, fp8_block)"
        found = violations(Layout(precision=precision), make_model(), cluster, scopes={"device"})
        assert found == [said]
    block = Layout(precision="fp8_block")
    assert not violations(block, make_model(), cluster, scopes={"device"})
    assert cluster.default_precision == "bf16"


def test_what_the_embedded_trainer_lacks_is_refused_unless_that_scope_is_left_out() -> None:
    fp8, model = Layout(tp=5, precision="fp8"), make_model(attention_window=16)
    said = "precision=fp8 is not supported by the embedded trainer (fp32, bf16, fp16)"
    assert violations(fp8, model, NODES, scopes={"trainer"}) == [said]
    assert said not in violations(fp8, model, NODES, scopes=WITHOUT_TRAINER)
    by_hand = violations(fp8, model, NODES, scopes=PROBE_SCOPES)
    assert (len(by_hand), by_hand[-1]) == (3, said), "it is held to the model and the trainer"
    for comm_type in ("all_gather", "p2p"):
        layout = Layout(cp=2, cp_comm_type=comm_type)
        assert violations(layout, model, NODES, scopes={"trainer"}) == [
            f"cp=2 with cp_comm_type={comm_type}: the embedded trainer has the attention_window=16 "
            "only with cp_comm_type=a2a"
        ]
        assert violations(layout, make_model(), NODES, scopes={"trainer"}) == []
    assert violations(Layout(cp=2, cp_comm_type="a2a"), model, NODES, scopes={"trainer"}) == []
    names = {rule.name for rule in RULES if rule.scope == "trainer"}
    assert names == {
        "trainer_precision",
        "trainer_window_over_cp",
        "trainer_attention",
        "trainer_schedule",
        "trainer_offload",
        *(f"trainer_{name}" for name in UNTRAINED),
    }


def test_moe_act_is_the_same_job_in_the_embedded_trainer_alone() -> None:
    for modules in ("moe_act", "mlp+moe_act"):
        layout, model = Layout(recompute=modules), make_model(**EXPERTS)
        assert violations(layout, model, NODES, scopes=WITHOUT_TRAINER | PROBE_SCOPES) == []
        assert violations(layout, model, NODES) == [
            f"recompute={modules} is the same job as without moe_act in the embedded trainer, "
            "which always computes the activations of experts again"
        ]
    assert violations(Layout(recompute="full"), make_model(**EXPERTS), NODES) == []


@pytest.mark.parametrize(
    "stated", [{"attention": "unfused"}, {"attention_dropout": 0.1}, {"hidden_dropout": 0.1}]
)
def test_the_embedded_trainer_refuses_unfused_attention_and_dropout(stated: dict[str, Any]) -> None:
    model = make_model(**stated)
    (said,) = violations(Layout(), model, NODES, scopes={"trainer"})
    assert said == (
        f"the model is {model.title}, and the embedded trainer has fused attention and no dropout: "
        "leave these fields out, or name another trainer (probe.trainer; for an estimate --software)"
    )
    assert violations(Layout(), model, NODES, scopes=WITHOUT_TRAINER) == []
    assert violations(Layout(), make_model(attention="fused"), NODES, scopes={"trainer"}) == []


@pytest.mark.parametrize("layout", [{}, {"dp": 2, "zero_replicas": 2}])
def test_zero_is_no_waste_where_it_shards_experts_alone(layout: dict[str, Any]) -> None:
    """With etp below tp, more ranks hold the same experts than the same attention."""
    model = make_model(**EXPERTS)
    split = Layout(tp=2, sequence_parallel=True, zero_stage=1, **layout)
    assert split.zero_group_size < split.expert_zero_group_size
    assert violations(split, model, NODES) == []
    (sentence,) = violations(replace(split, etp=2), model, NODES)
    assert "is the same job as zero_stage=0" in sentence
    (sentence,) = violations(split, make_model(), NODES)
    assert "is the same job as zero_stage=0" in sentence


def test_each_broken_rule_gives_a_sentence_but_a_probe_by_hand_may_be_redundant() -> None:
    sentences = violations(Layout(tp=7, pp=5), make_model(), NODES)
    assert [sentence.split(" ")[0] for sentence in sentences] == [
        "num_heads=24",
        "ffn_hidden_size=3072",
        "vocab_size=960",
        "num_layers=12",
        "tp*pp*dp=7*5*1=35",
    ]
    layout = Layout(tp=4, pp=4, dp=1, zero_stage=1)
    assert len(violations(layout, make_model(), NODES)) == 2
    assert violations(layout, make_model(), NODES, scopes=PROBE_SCOPES) == []


def test_tensor_parallelism_leaves_the_node_where_that_is_allowed() -> None:
    across = Layout(num_nodes=3, tp=24)
    assert violations(across, make_model(), NODES, allow_tp_across_nodes=True) == []


TINY = model_preset("tiny")
BASE = Layout(tp=2, pp=2, dp=2, num_microbatches=2)

FEATURES: list[dict[str, Any]] = [
    {},
    {"vpp": 2},
    {"sequence_parallel": True},
    {"zero_stage": 1},
    {"dp": 4, "zero_stage": 1, "zero_replicas": 2},
    *({"recompute": mode} for mode in RECOMPUTE_MODES),
    *({"precision": precision} for precision in PRECISIONS),
]


def test_the_space_refuses_exactly_what_the_trainer_refuses() -> None:
    for feature in FEATURES:
        layout = replace(BASE, **feature)
        refused = violations(layout, TINY, CLUSTER_PRESETS["frontier"], scopes={"trainer"})
        assert bool(refused) == bool(unsupported(layout, TINY)), feature


MODEL = model_preset("gpt-22b")
FRONTIER = CLUSTER_PRESETS["frontier"]
"""8 devices a node."""


def on(layout: Layout, num_nodes: int, cluster: Cluster = FRONTIER) -> Layout:
    return scaled(layout, num_nodes, model=MODEL, cluster=cluster)


def make_layout(**changes: object) -> Layout:
    """Two nodes and a global batch of 2 * 2 * 16 = 64 sequences."""
    fields = {"num_nodes": 2, "tp": 4, "pp": 2, "dp": 2, "micro_batch_size": 2}
    fields |= {"num_microbatches": 16, "zero_stage": 1}
    return Layout.from_mapping({**fields, "precision": "bf16"} | changes)


def test_more_nodes_are_more_replicas_that_accumulate_less() -> None:
    measured = make_layout()
    larger = on(measured, 8)
    assert (larger.num_nodes, larger.dp, larger.num_microbatches) == (8, 8, 4)
    assert larger.global_batch_size == measured.global_batch_size == 64
    assert larger.num_devices == 8 * 8
    assert replace(larger, num_nodes=2, dp=2, num_microbatches=16) == measured
    assert on(measured, 2) == measured
    half_as_many_again = on(make_layout(dp=2, micro_batch_size=1, num_microbatches=24), 3)
    assert (half_as_many_again.dp, half_as_many_again.num_microbatches) == (3, 16)
    described_smaller = replace(FRONTIER, num_nodes=2)
    assert on(measured, 4, described_smaller).num_nodes == 4, "it is taken as large enough"


@pytest.mark.parametrize(
    ("changes", "num_nodes", "why"),
    [
        ({}, 1, "num_nodes=1 is fewer than the 2 of the layout"),
        (
            {"dp": 1, "pp": 4, "num_microbatches": 32, "zero_stage": 0},
            3,
            "dp*num_nodes=1*3=3 is not divisible by the layout's num_nodes=2",
        ),
        ({}, 6, "global_batch_size=64 is not divisible by dp*micro_batch_size=6*2=12"),
        (
            {"vpp": 2, "num_microbatches": 4},
            8,
            "num_microbatches=1 is not divisible by pp=2, which the interleaved schedule of vpp=2",
        ),
        (
            {"micro_batch_size": 1, "num_microbatches": 12, "zero_replicas": 2},
            3,
            "dp=3 is not divisible by zero_replicas=2",
        ),
        (
            {"num_nodes": 1, "dp": 1, "pp": 1, "zero_stage": 0},
            2,
            "tp*pp*dp=4*1*2=8 does not fill num_nodes*devices_per_node=2*8=16",
        ),
    ],
)
def test_indivisible_layouts_are_refused_with_the_numbers(
    changes: dict[str, object], num_nodes: int, why: str
) -> None:
    with pytest.raises(LayoutInvalidError, match=re.escape(why)):
        on(make_layout(**changes), num_nodes)


def test_tensor_parallel_groups_may_fill_trays_of_a_domain() -> None:
    for tp, nodes in ((8, 2), (8, 4), (4, 2), (2, 1)):
        layout = Layout(num_nodes=nodes, tp=tp, dp=4 * nodes // tp)
        rules = violations(layout, make_model(), TRAYS, scopes=WITHOUT_TRAINER)
        assert rules == [], layout.key


def test_v_schedules_take_any_number_of_microbatches_but_not_in_the_trainer() -> None:
    layout = Layout(pp=2, dp=4, vpp=2, num_microbatches=5, schedule="zbv")
    assert violations(layout, make_model(), NODES, scopes=WITHOUT_TRAINER) == []
    assert violations(layout, make_model(), NODES, scopes={"trainer"}) == [
        "schedule=zbv is not supported by the embedded trainer (1f1b, gpipe, zero_bubble)"
    ]


def test_some_layers_of_the_fullest_stage_may_recompute() -> None:
    layout = Layout(pp=2, dp=4, pipeline_layout="Et*4|t*8L", recompute="full", recompute_layers="6")
    assert violations(layout, make_model(), NODES) == []


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 4, "recompute_layers": "3/2/1/0"},
        {"pp": 2, "recompute_layers": "2/8", "pipeline_layout": "Et*4|t*8L"},
        {"pp": 4, "recompute_layers": "2/1/1/1", "pipeline_layout": "Et|t*5|t*6L"},
    ],
)
def test_numbers_that_ranks_have_or_whose_stages_do_not_fit_are_kept(
    layout: dict[str, Any],
) -> None:
    rule = next(rule for rule in RULES if rule.name == "recompute_layers_of_a_rank")
    context = RuleContext(model=make_model(), cluster=NODES)
    columns = LayoutColumns.of(Layout(**{"recompute": "full", **layout}))
    assert not np.any(rule.illegal(columns, context))


def test_numbers_by_rank_are_judged_in_columns_as_alone() -> None:
    texts = ("20", "all", "2", "9/2/1/0", "3/2/1/0", "3/3/3/3", "4/1/0/0", "1/2")
    pipelines = (
        {"pp": 4},
        {"pp": 4, "vpp": 3},
        {"pp": 2},
        {"pp": 2, "pipeline_layout": "Et|t*11L"},
    )
    layouts = [
        Layout(recompute="mlp", recompute_layers=text, num_microbatches=4, **pipeline)
        for text in texts
        for pipeline in pipelines
    ]
    rule = next(rule for rule in RULES if rule.name == "recompute_layers_of_a_rank")
    context = RuleContext(model=make_model(), cluster=NODES)
    together = rule.illegal(LayoutColumns.of_each(layouts), context)
    alone = [bool(rule.illegal(LayoutColumns.of(each), context)) for each in layouts]
    assert np.asarray(together).tolist() == alone
    assert 0 < sum(alone) < len(alone)


def test_ranks_of_cp_may_share_groups_of_mamba() -> None:
    model = make_model(**MAMBA | {"mamba_num_heads": 8})
    for cp in (2, 4):  # a group each, and one for two ranks
        assert violations(Layout(cp=cp), model, NODES, scopes=frozenset({"model"})) == []
