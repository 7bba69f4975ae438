"""Layers of several kinds and latents from Megatron's options."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from layout_tuner.search_spaces.models.layer_kinds import repeated, stated_kinds
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.found_jobs.completed_job import completed
from tests.layout_tuner.trainers.found_jobs.megatron.command_lines import (
    GPT,
    LLAMA,
    MOE,
    PLACED,
    found,
    open_of,
)

MLA = LLAMA.replace("--group-query-attention --num-query-groups 8", "--multi-latent-attention")
HYBRID = LLAMA.replace("--num-layers 32", "").replace("--swiglu", "--squared-relu")
DELTA = "--experimental-attention-variant gdn --linear-attention-freq 4"


def model_of(options: str) -> ModelShape:
    job = found(f"{options} {PLACED}")
    assert not job.not_understood
    return completed(job, num_nodes=1, devices_per_node=8).model


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (
            f"{MLA} --qk-layernorm --q-lora-rank 1536 --kv-lora-rank 512",
            {
                "q_lora_rank": 1536,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
                "qk_norm": False,
                "num_kv_heads": 32,
                "lacks": "",
            },
        ),
        (MLA, {"q_lora_rank": 0, "kv_lora_rank": 32, "lacks": "no norms of latents"}),
        (
            f"{LLAMA} --mtp-num-layers 2 --attention-output-gate --softmax-type learnable",
            {"num_mtp_layers": 2, "attention_output_gate": True, "attention_sinks": True},
        ),
        (
            f"{LLAMA} --rotary-percent 0.5 --add-qkv-bias --normalization LayerNorm",
            {"rotary_fraction": 0.5, "biases": "qkv", "norm": "layer", "lacks": ""},
        ),
        (
            f"{GPT} --position-embedding-type rope --squared-relu --padded-vocab-size 1024",
            {"family": "llama", "activation": "relu2", "biases": "all", "norm": "layer"},
        ),
        (
            f"{GPT} --position-embedding-type none --padded-vocab-size 1024",
            {"family": "llama", "activation": "gelu", "rotary_fraction": 0},
        ),
        (LLAMA.replace("--swiglu", "--quick-geglu"), {"activation": "geglu"}),
        (
            f"{MOE} --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
            "--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-latent-size 1024 "
            "--moe-router-topk-scaling-factor 2.5 --moe-shared-expert-gate "
            "--moe-shared-expert-intermediate-size 512",
            {
                "router_score": "sigmoid",
                "router_bias": True,
                "router_groups": 8,
                "router_topk_groups": 4,
                "router_scaling_factor": 2.5,
                "expert_latent_size": 1024,
                "shared_expert_gate": True,
            },
        ),
        (f"{MOE} --moe-router-num-groups 1 --moe-router-group-topk 1", {"router_groups": 0}),
    ],
)
def test_what_models_of_2026_have_is_read_into_fields(options: str, fields: dict[str, Any]) -> None:
    model = model_of(options)
    assert {name: getattr(model, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ("--moe-layer-freq 2", {"layer_kinds": ["full+experts", "full+dense"]}),
        ("--moe-layer-freq '([0,1]*16)'", {"experts_every": 2}),
        ("--moe-layer-freq '([0]*3+[1]*29)'", {"num_dense_layers": 3}),
        (
            "--window-size 127,0 --window-attn-skip-freq '([0]+[1]*3)*8'",
            {"layer_kinds": ["full+experts", {"window+experts": 3}], "attention_window": 128},
        ),
        ("--window-size 127,0 --window-attn-skip-freq 1", {}),
        (
            "--window-size 127,0 --window-attn-skip-freq 2 --moe-layer-freq '([0]*1+[1]*31)'",
            {"attention_window": 128, "full_attention_every": 2, "num_dense_layers": 1},
        ),
        (
            f"{DELTA} --moe-layer-freq '([0]+[1]*31)' --linear-num-key-heads 8",
            {
                "layer_kinds": [
                    "gated_delta_net+dense",
                    {"gated_delta_net+experts": 2},
                    *["full+experts", {"gated_delta_net+experts": 3}] * 7,
                    "full+experts",
                ],
                "linear_num_key_heads": 8,
                "linear_num_value_heads": 32,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
            },
        ),
    ],
)
def test_layers_are_of_the_kinds_that_options_list(options: str, fields: dict[str, Any]) -> None:
    base = model_of(MOE).to_mapping()
    told = model_of(f"{MOE} {options}").to_mapping()
    changed = {name: told[name] for name in told if told[name] != base.get(name)}
    changed.pop("ffn_hidden_size", None)
    assert changed == fields


def test_a_pattern_names_each_layer_and_the_depths() -> None:
    pattern = "M-M-|*-ME|M-M-|*EME/*E/*E"
    experts = "--num-experts 8 --moe-ffn-hidden-size 512"
    model = model_of(f"{HYBRID} {experts} --hybrid-layer-pattern '{pattern}' --mamba-head-dim 32")
    letters = {"mamba2": "M", "dense": "-", "experts": "E", "full": "*"}
    named = "".join(letters[kind] for kind in model.kind_of_layers)
    assert named == pattern.partition("/")[0].replace("|", "")
    assert model.num_mtp_layers == 2
    assert (model.mamba_head_dim, model.mamba_num_heads, model.mamba_num_groups) == (32, 256, 8)
    former = model_of(f"{HYBRID} --hybrid-override-pattern M-*-M-*- --swiglu")
    assert former.to_mapping()["layer_kinds"] == ["mamba2", "dense", "full", "dense"]
    windows = "--hybrid-layer-pattern *-*- --window-size 7,0 --window-attn-skip-freq [1,1,0,1]"
    assert model_of(f"{HYBRID} {windows}").kind_of_layers == ("window", "dense", "full", "dense")


def test_a_pattern_that_is_not_understood_stays_open_beside_lists_of_layers() -> None:
    lists = "--moe-layer-freq 2 --num-experts 8 --window-size 7,0 --window-attn-skip-freq x"
    job = found(f"{HYBRID} {PLACED} {lists} --hybrid-layer-pattern MD*E")
    assert "model.layer_kinds" in open_of(job)
    windows = found(f"{HYBRID} {PLACED} {lists} --hybrid-layer-pattern M-*E")
    assert "model.full_attention_every" in open_of(windows)


@pytest.mark.parametrize(
    ("pattern", "fields"),
    [
        ("M-|M-|M-|*-", {"vpp": 1, "pipeline_layout": None}),
        ("M-|M-|M-|*-|M-|M-|M-|*-", {"vpp": 2}),
        ("M-M|-M|-M-|*-", {"pipeline_layout": "Et*3|tt|t*3|ttL"}),
        ("M-M-M-*-", {"vpp": None}),
    ],
)
def test_a_pattern_has_the_stages_of_the_pipeline(pattern: str, fields: dict[str, Any]) -> None:
    job = found(f"{HYBRID} {PLACED} --hybrid-layer-pattern '{pattern}'")
    assert {name: job.value(name) for name in fields} == fields
    five = found(f"{HYBRID} {PLACED} --hybrid-layer-pattern 'M-|M-|M-|M-|*-'")
    assert open_of(five) == {"vpp", "pipeline_split"}


def test_depths_before_the_loss_are_no_layers_of_a_stage() -> None:
    stages = "--pipeline-model-parallel-layout 'Et*7|(t*8|)*2t*9mL' --mtp-num-layers 1"
    job = found(f"{LLAMA} {PLACED} {stages}")
    assert job.value("pipeline_layout") == "Et*7|(t*8|)*2t*9L"
    own = found(f"{LLAMA} {PLACED} {stages.replace('mL', '|mL')}")
    assert open_of(own) == {"vpp", "pipeline_split"}


@pytest.mark.parametrize(
    "kinds",
    [
        ("full+dense",) * 3,
        ("window+dense", "full+dense") * 2,
        ("full+dense",) * 2 + ("full+experts",) * 3,
        ("full+dense", "full+experts") * 3,
        ("full+experts", "full+dense") * 3,
        ("mamba2", "experts", "full"),
    ],
)
def test_short_forms_say_the_same_kinds(kinds: tuple[str, ...]) -> None:
    stated = stated_kinds(kinds)
    fields: dict[str, Any] = {"attention_window": 8} if "window" in str(kinds) else {}
    if "experts" in str(kinds):
        fields |= {"num_experts": 4, "experts_per_token": 1, "moe_ffn_hidden_size": 16}
    if "mamba2" in kinds:
        names = ("num_heads", "head_dim", "state_dim", "num_groups")
        fields |= {f"mamba_{name}": 4 for name in names}
    sizes = {"hidden_size": 64, "num_heads": 4, "seq_length": 32, "vocab_size": 64}
    if "dense" in str(kinds):
        fields["ffn_hidden_size"] = 32
    model = ModelShape.from_mapping(
        {"family": "llama", "num_layers": len(kinds), **sizes, **fields, **stated}
    )
    assert model.kind_of_layers == kinds == repeated(kinds, len(kinds))
    assert ("layer_kinds" in stated) == (kinds[0] in ("mamba2", "full+experts"))


def test_options_that_are_quoted_lists_are_read_without_running_them() -> None:
    text = shlex.quote("__import__('os').system('x')")
    assert open_of(found(f"{LLAMA} {PLACED} {DELTA.replace('4', text)}")) == {"model.layer_kinds"}
