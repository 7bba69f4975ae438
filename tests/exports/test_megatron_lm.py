"""megatron-core accepts the arguments of exports to Megatron-LM, and reads the same layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.megatron_lm import MEGATRON_LM
from tests.exports.exported_files import READERS, written_job
from tests.exports.trainer_environments import read

pytestmark = [pytest.mark.exports, pytest.mark.timeout(300)]

GPT, LLAMA = model_preset("gpt-22b"), model_preset("llama-8b")
LAYOUTS = (
    Layout(),
    Layout(dp=4, zero_stage=1, precision="bf16", num_microbatches=2),
    Layout(tp=2, sequence_parallel=True, precision="fp16", recompute="selective"),
    Layout(pp=2, num_microbatches=8, recompute="full", precision="bf16"),
    Layout(tp=4, pp=4, vpp=2, num_microbatches=8, recompute="full", sequence_parallel=True),
)
EXPERTS = model_preset("mixtral-8x7b")
ONE_EXPERT = replace(EXPERTS, experts_per_token=1)
"""Without --moe-router-pre-softmax megatron-core refuses it."""
DROPPING = replace(GPT, attention="fused", attention_dropout=0.1, hidden_dropout=0.25)
UNFUSED = replace(DROPPING, attention="unfused")
LAYOUTS_OF_EXPERTS = (
    Layout(tp=2, dp=4, ep=4, sequence_parallel=True, zero_stage=1, precision="bf16"),
    Layout(tp=2, pp=2, dp=4, ep=2, etp=2, sequence_parallel=True, precision="bf16"),
)


def read_back(folder: Path, jobs: Sequence[TrainerJob], name: str) -> list[dict[str, Any]]:
    """What megatron-core makes of each job as an export of this format."""
    paths = [written_job(folder / f"{number}", name, job) for number, job in enumerate(jobs)]
    ranks = [job.layout.num_devices for job in jobs]
    return read("megatron-core", READERS[name][1], paths, ranks)


@pytest.mark.parametrize("name", ["megatron-lm", "megatron-bridge"])
def test_megatron_core_reads_back_the_layouts_and_the_model(tmp_path: Path, name: str) -> None:
    chosen = [
        *((model, layout) for model in (GPT, LLAMA) for layout in LAYOUTS),
        *((EXPERTS, layout) for layout in LAYOUTS_OF_EXPERTS),
        *((ONE_EXPERT, layout) for layout in LAYOUTS_OF_EXPERTS),
        *((DROPPING, layout) for layout in LAYOUTS),
        *((UNFUSED, layout) for layout in LAYOUTS if name == "megatron-lm"),
    ]
    jobs = [TrainerJob(model=model, layout=layout) for model, layout in chosen]
    sizes = ("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads")
    knobs = ("tp", "pp", "ep", "vpp", "sequence_parallel", "recompute")
    for (model, layout), answer in zip(chosen, read_back(tmp_path, jobs, name), strict=True):
        assert answer == {
            **{name: getattr(model, name) for name in (*sizes, "num_experts")},
            **{name: getattr(layout, name) for name in knobs},
            # Where no experts state it, it is tp.
            "etp": layout.etp if model.num_experts else layout.tp,
            "pre_softmax": model.experts_per_token == 1,
            "norm_epsilon": 1e-5,
            "init_std": 0.02,
            "dropout": [model.attention_dropout or 0.0, model.hidden_dropout or 0.0],
            "attention_backend": "unfused" if model.attention == "unfused" else "auto",
        }


def test_megatron_core_refuses_what_the_adapter_refuses(tmp_path: Path) -> None:
    jobs = [
        TrainerJob(model=GPT, layout=Layout(tp=5)),
        TrainerJob(model=LLAMA, layout=Layout(sequence_parallel=True)),
    ]
    for job, answer in zip(jobs, read_back(tmp_path, jobs, "megatron-lm"), strict=True):
        assert MEGATRON_LM.refusals(job)
        assert "refused" in answer, answer


MLA, NEXT = model_preset("deepseek-v3"), model_preset("qwen3-next-80b-a3b")
SUPER, OSS = model_preset("nemotron-3-super-120b-a12b"), model_preset("gpt-oss-20b")
FIELDS_OF_KINDS: list[tuple[ModelShape, dict[str, Any]]] = [
    (
        MLA,
        {
            "multi_latent_attention": True,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_head_dim": 128,
            "qk_pos_emb_head_dim": 64,
            "v_head_dim": 128,
            "rope_type": "rope",
            "mtp_num_layers": 1,
            "moe_layer_freq": [0] * 3 + [1] * 58,
            "moe_router_num_groups": 8,
            "moe_router_topk_scaling_factor": 2.5,
        },
    ),
    (replace(MLA, q_lora_rank=0), {"q_lora_rank": None}),
    (
        NEXT,
        {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": 4,
            "linear_num_value_heads": 32,
            "attention_output_gate": True,
            "moe_shared_expert_gate": True,
        },
    ),
    (
        SUPER,
        {
            "is_hybrid_model": True,
            "mamba_num_heads": 128,
            "moe_latent_size": 1024,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
    ),
    (OSS, {"softmax_type": "learnable", "add_bias_linear": True, "window_attn_skip_freq": 2}),
]


@pytest.mark.parametrize("name", ["megatron-lm", "megatron-bridge"])
def test_megatron_core_reads_back_fields_of_kinds(tmp_path: Path, name: str) -> None:
    paths = [
        written_job(tmp_path / str(number), name, TrainerJob(model=model, layout=Layout()), [*said])
        for number, (model, said) in enumerate(FIELDS_OF_KINDS)
    ]
    answers = read("megatron-core", READERS[name][1], paths, [1] * len(paths))
    for (model, said), answer in zip(FIELDS_OF_KINDS, answers, strict=True):
        assert {field: answer.get(field) for field in said} == said, (model.name, answer)
        assert answer["num_layers"] == model.num_layers
