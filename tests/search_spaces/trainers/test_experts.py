"""Models with experts as other trainers get them, or why these refuse them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from api.exporters import ExportSource, export
from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.models import model_preset
from search_spaces.trainers.accelerate import ACCELERATE
from search_spaces.trainers.base import TrainerAdapter, TrainerJob
from search_spaces.trainers.deepspeed import DEEPSPEED
from search_spaces.trainers.embedded import EMBEDDED
from search_spaces.trainers.megatron_bridge import MEGATRON_BRIDGE
from search_spaces.trainers.megatron_deepspeed import MEGATRON_DEEPSPEED
from search_spaces.trainers.megatron_lm import MEGATRON_LM
from search_spaces.trainers.nanotron import NANOTRON
from search_spaces.trainers.torchtitan import TORCHTITAN_0_2, TORCHTITAN_0_3, TORCHTITAN_MAIN

LAYOUT = Layout(
    tp=2, dp=2, micro_batch_size=1, num_microbatches=2, sequence_parallel=True, precision="bf16"
)
TINY = model_preset("tiny-moe")
"""8 experts of width 128, 2 of them a token."""


def flags(job: TrainerJob) -> str:
    return " ".join(MEGATRON_LM.arguments(job))


def test_megatron_gets_experts_heads_and_norms() -> None:
    job = TrainerJob(model=model_preset("qwen3-30b-a3b"), layout=LAYOUT)
    found = flags(job)
    expected = (
        "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-grouped-gemm "
        "--moe-router-dtype fp32 --moe-router-load-balancing-type none --kv-channels 128 "
        "--qk-layernorm --moe-token-dispatcher-type alltoall"
    )
    for part in re.findall(r"--[a-z-]+(?: [a-z0-9]+)?", expected):
        assert f"{part} " in found, part
    # Where nothing is stated, etp is tp.
    assert "--expert-model-parallel-size 1 --expert-tensor-parallel-size 1 " in found
    assert "force-load-balancing" not in found
    assert "--moe-router-force-load-balancing" in flags(replace(job, balanced_routing=True))
    dense = flags(TrainerJob(model=model_preset("llama-8b"), layout=LAYOUT, balanced_routing=True))
    assert not any(word in dense for word in ("moe", "expert", "kv-channels"))


def test_megatron_gets_windows_shared_experts_dense_layers_and_degrees() -> None:
    found = flags(TrainerJob(model=model_preset("gpt-oss-120b"), layout=LAYOUT))
    assert "--window-size 127,0 --window-attn-skip-freq 2" in found
    mixed = replace(TINY, num_dense_layers=1, shared_expert_ffn_hidden_size=64)
    job = TrainerJob(model=mixed, layout=replace(LAYOUT, dp=8, ep=4, etp=2))
    assert "--moe-layer-freq [0,1,1,1]" in flags(job)
    assert "--moe-shared-expert-intermediate-size 64" in flags(job)
    assert "--expert-model-parallel-size 4 --expert-tensor-parallel-size 2 " in flags(job)
    assert not MEGATRON_LM.refusals(job)
    bridge = MEGATRON_BRIDGE.values(job)["model"]
    expected = {"moe_layer_freq": [0, 1, 1, 1], "num_moe_experts": 8, "qk_layernorm": True}
    expected |= {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 2}
    assert bridge | expected == bridge
    odd = replace(mixed, shared_expert_ffn_hidden_size=63)
    (said,) = MEGATRON_LM.refusals(TrainerJob(model=odd, layout=LAYOUT))
    assert said == "shared_expert_ffn_hidden_size=63 is not divisible by tp=2"


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ({"ep": 3, "dp": 6}, "num_experts=8 is not divisible by ep=3"),
        ({"etp": 3, "dp": 6}, "moe_ffn_hidden_size=128 is not divisible by etp=3"),
        ({"ep": 8}, "tp*cp*dp=4 is not divisible by etp*ep=8"),
        ({"sequence_parallel": False}, "experts need the sequence shared over tp"),
        (
            {"ep": 2, "dp": 4, "zero_stage": 1, "zero_replicas": 4, "tp": 1},
            "tp*cp*dp/(etp*ep)=2 is not divisible by zero_replicas=4",
        ),
    ],
)
def test_megatron_refuses_layouts_of_experts(layout: dict[str, Any], why: str) -> None:
    changed = replace(LAYOUT, **{"sequence_parallel": layout.get("tp", 2) > 1} | layout)
    (said,) = MEGATRON_LM.refusals(TrainerJob(model=TINY, layout=changed))
    assert why in said
    dense = MEGATRON_LM.refusals(
        TrainerJob(model=model_preset("tiny-llama"), layout=replace(LAYOUT, ep=2))
    )
    assert dense == ["ep=2 and etp=1 need a model with experts"]


def test_deepspeed_divides_experts_and_keeps_each_whole_and_accelerate_divides_none() -> None:
    job = TrainerJob(model=TINY, layout=replace(LAYOUT, ep=4))
    assert DEEPSPEED.values(job)["expert_parallel"] == {"enabled": True, "autoep_size": 4}
    assert any("deepspeed.moe.layer.MoE(ep_size=4)" in note for note in DEEPSPEED.notes(job))
    assert set(DEEPSPEED.lacking(job)) == {"sequence_parallel"}
    folded = replace(job, layout=replace(LAYOUT, etp=2))
    assert "a rank holds 2 times what was measured" in DEEPSPEED.lacking(folded)["etp"]
    assert "expert_parallel" not in DEEPSPEED.values(folded)
    job = TrainerJob(model=TINY, layout=Layout(dp=4, ep=2, etp=2, zero_stage=3))
    found = ACCELERATE.lacking(job)
    assert "without ep every rank holds all experts" in found["ep"]
    assert "without etp every rank holds whole experts" in found["etp"]
    assert not ACCELERATE.lacking(job.without(found))


@pytest.mark.parametrize(
    "adapter",
    [ACCELERATE, MEGATRON_DEEPSPEED, NANOTRON, TORCHTITAN_0_2, TORCHTITAN_0_3, TORCHTITAN_MAIN],
    ids=lambda adapter: adapter.name,
)
def test_trainers_without_experts_say_so(adapter: TrainerAdapter) -> None:
    reasons = "; ".join(adapter.refusals(TrainerJob(model=TINY, layout=LAYOUT)))
    assert "num_experts=8 has no counterpart in " in reasons
    assert "qk_norm=true has no counterpart in " in reasons
    dense = adapter.refusals(TrainerJob(model=model_preset("tiny-llama"), layout=LAYOUT))
    assert "counterpart in" not in "; ".join(dense)


@pytest.mark.parametrize("name", ["megatron-lm", "megatron-bridge", "embedded"])
def test_exports_name_what_the_published_model_has_besides(name: str) -> None:
    job = TrainerJob(model=model_preset("gpt-oss-120b"), layout=LAYOUT)
    notes = export(name, ExportSource(campaign="c", trial=1, job=job)).notes
    assert any("as published also has biases, attention sinks" in note for note in notes)
    assert EMBEDDED.values(job)["model"]["experts_per_token"] == 4
