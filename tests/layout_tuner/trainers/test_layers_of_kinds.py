"""Latent attention, layers of several kinds, routing and norms in exports, and who refuses them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import SHAPE_FIELDS, TrainerJob
from layout_tuner.trainers.exports.export import export
from layout_tuner.trainers.exports.export_source import (
    ExportImpossibleError,
    ExportSource,
    KnobsLackingError,
)
from layout_tuner.trainers.megatron_bridge import MEGATRON_BRIDGE, recipe_of
from layout_tuner.trainers.megatron_lm import MEGATRON_LM
from layout_tuner.trainers.placeholders import environment_values, placeholder_values
from layout_tuner.trainers.registry import ADAPTERS
from tests.layout_tuner.trainers.test_megatron import flags_of

LLAMA = model_preset("tiny-llama")
MLA = model_preset("tiny-mla")
NEXT = model_preset("qwen3-next-80b-a3b")
NANO = model_preset("nemotron-3-nano-30b-a3b")
SUPER = model_preset("nemotron-3-super-120b-a12b")
NEW = ("deepseek-v3", "kimi-k2", "glm-4.5", "qwen3-next-80b-a3b", "nemotron-3-nano-30b-a3b")
EXPORTED = (*NEW, "nemotron-3-super-120b-a12b", "llama-4-maverick", "gpt-oss-20b", "tiny-mla")
WINDOWS = {"attention_window": 16}


def changed(model: ModelShape, **fields: Any) -> ModelShape:
    return ModelShape.from_mapping(model.to_mapping() | fields)


def flags(model: ModelShape, layout: Layout | None = None) -> dict[str, list[str]]:
    """The words after each flag of Megatron-LM."""
    given: dict[str, list[str]] = {}
    for word in MEGATRON_LM.arguments(TrainerJob(model=model, layout=layout or Layout())):
        if word.startswith("--"):
            words = given[word] = []
        else:
            words.append(word)
    return given


def bridge(model: ModelShape, layout: Layout | None = None) -> dict[str, Any]:
    values = MEGATRON_BRIDGE.values(TrainerJob(model=model, layout=layout or Layout()))
    return dict(values["model"])


def refusals(name: str, model: ModelShape, layout: Layout | None = None) -> str:
    return "; ".join(ADAPTERS[name].refusals(TrainerJob(model=model, layout=layout or Layout())))


@pytest.mark.parametrize("name", EXPORTED)
def test_every_flag_of_a_new_preset_exists(name: str) -> None:
    later = "--dataloader-inter-document-masking"
    assert not set(flags(model_preset(name))) - flags_of("megatron-lm") - {later}
    assert refusals("megatron-lm", model_preset(name)) == ""
    assert refusals("megatron-bridge", model_preset(name)) == ""


def test_latents_have_ranks_widths_and_norms() -> None:
    said = flags(MLA)
    assert {flag: said[flag] for flag in said if "lora" in flag or "head-dim" in flag} == {
        "--q-lora-rank": ["48"],
        "--kv-lora-rank": ["32"],
        "--qk-head-dim": ["32"],
        "--qk-pos-emb-head-dim": ["16"],
        "--v-head-dim": ["32"],
    }
    assert said["--rope-type"] == ["rope"]
    assert {"--multi-latent-attention", "--qk-layernorm", "--no-rope-fusion"} <= set(said)
    assert "--group-query-attention" not in said


def test_queries_without_a_latent_leave_their_rank_out() -> None:
    model = changed(MLA, q_lora_rank=0)
    assert "--q-lora-rank" not in flags(model)
    assert bridge(model)["q_lora_rank"] is None  # the class has 512


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ([{"window+dense": 3}, "full+dense"], ["4"]),
        (["window+dense", "window+dense", "full+dense", "full+dense"], ["[1,1,0,0]"]),
        (["full+dense", {"window+dense": 3}], ["[0,1,1,1]"]),
        (["window+dense"], None),
    ],
)
def test_windows_skip_layers_as_number_or_list(kinds: list[Any], said: list[str] | None) -> None:
    model = changed(LLAMA, layer_kinds=kinds, **WINDOWS)
    assert flags(model)["--window-size"] == ["15,0"]
    assert flags(model).get("--window-attn-skip-freq") == said


def test_windows_of_a_hybrid_count_its_letters() -> None:
    kinds = ["window+dense", "mamba2", "full+dense", "dense"]
    model = changed(LLAMA, layer_kinds=kinds, **WINDOWS, **_mamba(2, 2))
    assert flags(model)["--hybrid-layer-pattern"] == ["*-M*--"]
    assert flags(model)["--window-attn-skip-freq"] == ["[1,1,0,0,0,0]"]


def test_delta_nets_say_every_nth_full_layer() -> None:
    said = flags(NEXT)
    assert said["--linear-attention-freq"] == ["4"]
    assert said["--experimental-attention-variant"] == ["gated_delta_net"]
    assert said["--linear-num-value-heads"] == ["32"]
    first = [NEXT.kind_of_layers[-1], *NEXT.kind_of_layers[:3]]
    moved = flags(changed(NEXT, layer_kinds=first))
    assert moved["--linear-attention-freq"] == [f"[{','.join(['0,1,1,1'] * 12)}]"]
    assert {"--attention-output-gate", "--moe-shared-expert-gate"} <= set(said)
    assert said["--rotary-percent"] == ["0.25"]


def _mamba(heads: int, groups: int) -> dict[str, int]:
    widths = {"mamba_head_dim": 64, "mamba_state_dim": 16}
    return {"mamba_num_heads": heads, "mamba_num_groups": groups} | widths


def test_a_hybrid_s_pattern_has_stages_and_predictions() -> None:
    said = flags(SUPER, Layout(pp=4, vpp=2, num_microbatches=4))
    (pattern,) = said["--hybrid-layer-pattern"]
    main, depth = pattern.split("/")
    assert depth == "*E"
    assert [len(stage) for stage in main.split("|")] == [11] * 8
    whole = flags(SUPER)["--hybrid-layer-pattern"][0].split("/")[0]
    assert main.replace("|", "") == whole
    refused = ("virtual-stages", "account-for", "pipeline-model-parallel-layout")
    assert not [flag for flag in said if any(word in flag for word in refused)]
    assert said["--position-embedding-type"] == ["none"]
    assert {"--squared-relu", "--no-bias-gelu-fusion", "--moe-latent-size"} <= set(said)


def test_a_pattern_that_begins_with_a_dash_is_no_flag() -> None:
    model = changed(LLAMA, layer_kinds=["dense", "mamba2"], **_mamba(2, 2))
    written = MEGATRON_LM.placement_arguments(TrainerJob(model=model, layout=Layout()))
    assert "--hybrid-layer-pattern=-M-M" in written
    assert "--hybrid-layer-pattern" not in written


def test_uneven_stages_of_a_hybrid_are_in_its_pattern() -> None:
    model = changed(LLAMA, layer_kinds=["mamba2", "full", "dense", "mamba2+dense"], **_mamba(2, 2))
    written = Layout(pp=2, pipeline_layout="Et*3|tL")
    assert flags(model, written)["--hybrid-layer-pattern"] == ["M*-|M-"]
    split = Layout(pp=2, pipeline_split="embedding_and_head")
    assert flags(model, split)["--hybrid-layer-pattern"] == ["M*|-M-"]
    assert bridge(model, written)["hybrid_layer_pattern"] == "M*-|M-"
    assert bridge(model, written)["num_layers"] == 5
    words = MEGATRON_LM.placement_arguments(TrainerJob(model=model, layout=written))
    assert "M*-|M-" in words
    assert "--spec" not in words  # it is the script's


def test_depths_stand_before_the_loss_of_written_stages() -> None:
    model = changed(LLAMA, num_mtp_layers=2)
    layout = Layout(pp=2, pipeline_layout="Et*3|tL")
    assert flags(model, layout)["--pipeline-model-parallel-layout"] == ["Et*3|tmmL"]
    assert bridge(model, layout)["pipeline_model_parallel_layout"] == "Et*3|tmmL"
    assert flags(model)["--mtp-num-layers"] == ["2"]
    assert flags(LLAMA, layout)["--pipeline-model-parallel-layout"] == ["Et*3|tL"]


def test_experts_of_every_second_layer_are_a_list() -> None:
    said = flags(model_preset("tiny-hybrid"))
    assert said["--moe-layer-freq"] == ["[0,1,0,1]"]  # a number would mean the others
    assert "--moe-layer-freq" not in flags(NANO)
    assert "--moe-layer-freq" not in flags(model_preset("tiny-moe"))


def test_a_router_s_scores_groups_and_bias_have_flags() -> None:
    said = flags(model_preset("deepseek-v3"))
    routing = {flag: words for flag, words in said.items() if "--moe-router-" in flag}
    assert routing == {
        "--moe-router-topk": ["8"],
        "--moe-router-dtype": ["fp32"],
        "--moe-router-load-balancing-type": ["none"],
        "--moe-router-score-function": ["sigmoid"],
        "--moe-router-num-groups": ["8"],
        "--moe-router-group-topk": ["4"],
        "--moe-router-enable-expert-bias": [],
        "--moe-router-topk-scaling-factor": ["2.5"],
    }
    maverick = TrainerJob(model=model_preset("llama-4-maverick"), layout=Layout())
    assert "--moe-router-pre-softmax" not in MEGATRON_LM.arguments(maverick)
    assert not [note for note in MEGATRON_LM.notes(maverick) if "pre-softmax" in note]


@pytest.mark.parametrize(
    ("fields", "there", "missing"),
    [
        ({"biases": "qkv"}, {"--disable-bias-linear", "--add-qkv-bias"}, set()),
        ({"biases": "all"}, {"--swiglu"}, {"--disable-bias-linear", "--add-qkv-bias"}),
        ({"norm": "layer"}, {"--swiglu"}, {"--normalization"}),
        ({"activation": "gelu"}, {"--disable-bias-linear"}, {"--swiglu", "--squared-relu"}),
        ({"attention_sinks": True}, {"--softmax-type"}, set()),
    ],
)
def test_what_feed_forwards_and_norms_are_is_said(
    fields: dict[str, Any], there: set[str], missing: set[str]
) -> None:
    said = set(flags(changed(LLAMA, **fields)))
    assert there <= said
    assert not missing & said


def test_bridge_gets_the_functions_of_feed_forwards() -> None:
    def said(**fields: Any) -> list[Any]:
        values = bridge(changed(LLAMA, **fields))
        names = ("activation_func", "gated_linear_unit", "add_bias_linear", "normalization")
        return [values[name] for name in names]

    assert said() == ["silu", True, False, "RMSNorm"]
    assert said(activation="geglu", norm="layer") == ["gelu", True, False, "LayerNorm"]
    assert said(activation="relu2", biases="all") == ["squared_relu", False, True, "RMSNorm"]


def test_bridge_s_recipe_has_such_layers() -> None:
    recipes = {model.name: recipe_of(model).removesuffix("_pretrain_config") for model in MODELS}
    assert recipes == {
        "tiny-llama": "vanilla_gpt",
        "tiny-mla": "deepseek_v2_lite",
        "tiny-hybrid": "glm45_air_106b",
        "qwen3-next-80b-a3b": "qwen3_next_80b_a3b",
        "nemotron-3-nano-30b-a3b": "nemotronh_4b",
    }
    for model in MODELS:
        script = exported("megatron-bridge", model)
        assert f"--recipe {recipe_of(model)} --mode pretrain" in script
    assert bridge(NANO)["moe_router_num_groups"] is None  # the recipe's own model has 1
    assert "moe_router_num_groups" not in bridge(LLAMA)


MODELS = (LLAMA, MLA, model_preset("tiny-hybrid"), NEXT, NANO)


def exported(name: str, model: ModelShape, layout: Layout | None = None) -> str:
    job = TrainerJob(model=model, layout=layout or Layout())
    read = export(name, ExportSource(campaign="c", trial=1, job=job))
    return read.files[0].content


def test_the_script_starts_the_program_of_the_layers() -> None:
    assert 'PROGRAM=("$MEGATRON_DIR/pretrain_hybrid.py"' in exported("megatron-lm", NANO)
    assert 'PROGRAM=("$MEGATRON_DIR/pretrain_gpt.py"' in exported("megatron-lm", NEXT)
    spec = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
    assert spec in exported("megatron-lm", NANO)
    assert spec not in exported("megatron-lm", NEXT)


KDA = changed(
    NEXT,
    layer_kinds=[{"kda+experts": 3}, "full+experts"],
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 16),
)


@pytest.mark.parametrize("name", ["megatron-lm", "megatron-bridge"])
@pytest.mark.parametrize(
    ("model", "why"),
    [
        (KDA, "kda in layer_kinds"),
        (changed(LLAMA, qk_norm="width"), "qk_norm=width"),
        (changed(LLAMA, parallel_block=True), "parallel_block=true"),
        (changed(LLAMA, biases="attention"), "biases=attention (state qkv or all)"),
        (changed(model_preset("tiny-moe"), router_bias=True), "without router_score=sigmoid"),
        (changed(LLAMA, **WINDOWS, window_num_heads=8), "window_num_heads"),
        (changed(NANO, qk_norm=True), "qk_norm in a hybrid pattern"),
        (
            changed(LLAMA, **WINDOWS, full_attention_every=4, num_mtp_layers=1),
            "num_mtp_layers with other windows",
        ),
    ],
)
def test_what_megatron_core_lacks_is_named(name: str, model: ModelShape, why: str) -> None:
    said = refusals(name, model)
    assert said.startswith("megatron-core does not have ")
    assert why in said


def test_a_number_of_layers_that_recompute_needs_equal_counts() -> None:
    model = changed(LLAMA, layer_kinds=["mamba2+dense", "full+dense"], **_mamba(2, 2))
    layout = Layout(recompute="full", recompute_layers="2")
    assert "where a hybrid pattern counts sublayers" in refusals("megatron-lm", model, layout)
    assert refusals("megatron-lm", NANO, layout) == ""
    assert refusals("megatron-lm", LLAMA, layout) == ""


@pytest.mark.parametrize(
    ("model", "knobs", "why"),
    [
        (NEXT, {"tp": 2, "cp": 16}, "linear_num_key_heads=16 is not divisible by tp*cp=32"),
        (NANO, {"cp": 3}, "mamba_num_heads=64 is not divisible by tp*cp=3"),
        (changed(NANO, mamba_num_groups=2), {"tp": 4}, "mamba_num_groups=2 is not divisible by"),
        (
            changed(NANO, mamba_num_heads=48, mamba_num_groups=16),
            {"cp": 3},
            "of mamba_num_groups/tp=16 and cp=3 neither divides the other",
        ),
        (model_preset("gpt-oss-20b"), {"cp": 2}, "attention_sinks with cp=2 need a2a"),
        (model_preset("gpt-oss-20b"), {"tp": 2, "etp": 2}, "biases=all with etp=2"),
    ],
)
def test_states_sinks_and_biases_limit_degrees(
    model: ModelShape, knobs: dict[str, Any], why: str
) -> None:
    assert why in refusals("megatron-lm", model, Layout(**knobs))
    assert why in refusals("megatron-bridge", model, Layout(**knobs))


def test_each_megatron_refuses_what_it_alone_lacks() -> None:
    geglu = changed(LLAMA, activation="geglu")
    assert "activation=geglu: Megatron-LM has --quick-geglu alone" in refusals("megatron-lm", geglu)
    assert refusals("megatron-bridge", geglu) == ""
    layout = Layout(pp=2, vpp=2, num_microbatches=2)
    assert "vpp=2: Megatron-Bridge's hybrid models" in refusals("megatron-bridge", SUPER, layout)
    assert refusals("megatron-lm", SUPER, layout) == ""


OTHERS = ("megatron-deepspeed", "nanotron", "axonn", "torchtitan-0.2", "torchtitan-main")


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (changed(LLAMA, rotary_fraction=0.0), "rotary_fraction=0.0 has no counterpart in "),
        (changed(LLAMA, num_mtp_layers=1), "num_mtp_layers=1 has no counterpart in "),
        (changed(LLAMA, norm="layer"), "norm=layer has no counterpart in "),
        (changed(LLAMA, mean_document_length=64), "mean_document_length=64 has no counterpart in "),
        (MLA, "kv_lora_rank=32 has no counterpart in "),
        (NANO, "layer_kinds=[...] has no counterpart in "),
    ],
)
def test_others_refuse_later_fields_by_name(name: str, model: ModelShape, said: str) -> None:
    assert said in refusals(name, model)


@pytest.mark.parametrize("name", OTHERS)
def test_fields_that_say_the_family_s_own_are_no_refusal(name: str) -> None:
    own = changed(LLAMA, activation="swiglu", norm="rms", biases="none")
    job = {"layout": Layout(precision="bf16")}
    model = replace(own, vocab_size=320, num_kv_heads=4)
    usual = replace(LLAMA, vocab_size=320, num_kv_heads=4)
    assert ADAPTERS[name].refusals(TrainerJob(model=model, **job)) == (
        ADAPTERS[name].refusals(TrainerJob(model=usual, **job))
    )


def test_an_export_refuses_the_model_before_a_knob() -> None:
    layout = Layout(dp=8, zero_stage=1, sequence_parallel=True, tp=2, precision="bf16")
    source = ExportSource(campaign="c", trial=1, job=TrainerJob(model=NANO, layout=layout))
    with pytest.raises(ExportImpossibleError, match=r"layer_kinds=\[...\] has no counterpart"):
        export("axonn", source)
    with pytest.raises(KnobsLackingError, match="zero_stage"):
        export("axonn", replace(source, job=replace(source.job, model=LLAMA)))


def test_refusals_name_the_model_before_the_layout() -> None:
    layout = Layout(pp=2, cp=2, precision="bf16")
    said = ADAPTERS["axonn"].refusals(TrainerJob(model=changed(LLAMA, norm="layer"), layout=layout))
    assert [each.partition("=")[0] for each in said] == ["norm", "pp", "cp"]


@pytest.mark.parametrize(
    ("fields", "is_trained"),
    [
        ({}, True),
        ({"norm": "layer"}, True),
        ({"num_mtp_layers": 1}, False),
        ({"attention": "unfused"}, False),
        ({"attention": "fused"}, True),
    ],
)
def test_the_embedded_trainer_is_advised_for_its_models(
    fields: dict[str, Any], is_trained: bool
) -> None:
    model = changed(LLAMA, **fields)
    assert ("format embedded" in refusals("axonn", model, Layout(pp=2))) == is_trained
    assert ("format embedded" in refusals("nanotron", model, Layout(tp_columns=2))) == is_trained
    assert bool(refusals("embedded", model)) != is_trained


def test_fields_that_others_lack_are_those_of_models() -> None:
    assert set(SHAPE_FIELDS) <= set(LLAMA.__dataclass_fields__)


def test_documents_of_some_length_are_noted() -> None:
    job = TrainerJob(model=changed(LLAMA, mean_document_length=64), layout=Layout())
    for name in ("megatron-lm", "megatron-bridge"):
        (note,) = (each for each in ADAPTERS[name].notes(job) if "mean_document_length" in each)
        assert note.startswith("mean_document_length=64 is your data's")


def test_programs_get_kinds_and_what_counts_where_none_is_stated() -> None:
    job = TrainerJob(model=NANO, layout=Layout())
    variables = environment_values(job)
    assert variables["LAYOUT_LAYER_KINDS"].split(",")[:3] == ["mamba2", "experts", "mamba2"]
    assert variables["LAYOUT_ACTIVATION"] == "relu2"
    usual = TrainerJob(model=LLAMA, layout=Layout())
    assert "LAYOUT_LAYER_KINDS" not in environment_values(usual)
    assert "LAYOUT_NORM" not in environment_values(usual)
    values = placeholder_values(usual)
    said = [values[name] for name in ("layer_kinds", "activation", "norm", "biases")]
    assert said == ["", "swiglu", "rms", "none"]
    gpt = placeholder_values(TrainerJob(model=model_preset("tiny"), layout=Layout()))
    assert [gpt[name] for name in ("activation", "norm", "biases")] == ["gelu", "layer", "all"]
