"""The Megatron family: flags that exist, what is refused, printed lines; experts in every trainer.

The lists of flags are those of the trainers' own parsers, at the revisions that the adapters state.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import CP_COMM_TYPES, Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.accelerate import ACCELERATE
from layout_tuner.trainers.adapter import TrainerAdapter, TrainerJob
from layout_tuner.trainers.deepspeed import DEEPSPEED
from layout_tuner.trainers.embedded import EMBEDDED
from layout_tuner.trainers.exports.export import export
from layout_tuner.trainers.exports.export_source import ExportSource
from layout_tuner.trainers.megatron_bridge import MEGATRON_BRIDGE
from layout_tuner.trainers.megatron_deepspeed import MEGATRON_DEEPSPEED
from layout_tuner.trainers.megatron_lm import MEGATRON_LM
from layout_tuner.trainers.nanotron import NANOTRON
from layout_tuner.trainers.program import read_trainers
from layout_tuner.trainers.registry import ADAPTERS
from layout_tuner.trainers.torchtitan import TORCHTITAN_0_2, TORCHTITAN_0_3, TORCHTITAN_MAIN
from tests.kit.layouts import EVERY_KNOB

GPT = model_preset("gpt-22b")
LLAMA = model_preset("llama-8b")
FAMILY = (MEGATRON_LM, MEGATRON_DEEPSPEED, MEGATRON_BRIDGE)


def flags_of(trainer: str) -> set[str]:
    name = f"{trainer.replace('-', '_')}_flags.txt"
    return set((Path(__file__).parent / name).read_text().split())


def value_after(adapter: TrainerAdapter, job: TrainerJob, flag: str) -> str:
    words = list(adapter.arguments(job))
    return words[words.index(flag) + 1]


EMBEDDING, LOSS = (f"--account-for-{end}-in-pipeline-split" for end in ("embedding", "loss"))


def test_megatron_lm_and_bridge_are_told_what_counts_as_a_layer() -> None:
    for split, flags in (
        ("layers", set()),
        ("embedding", {EMBEDDING}),
        ("head", {LOSS}),
        ("embedding_and_head", {EMBEDDING, LOSS}),
    ):
        job = TrainerJob(model=LLAMA, layout=Layout(pp=2, pipeline_split=split))
        assert set(MEGATRON_LM.arguments(job)) & {EMBEDDING, LOSS} == flags
        values = MEGATRON_BRIDGE.values(job)["model"]
        stated = {f"--{name.replace('_', '-')}" for name, value in values.items() if value is True}
        assert stated & {EMBEDDING, LOSS} == flags
        alone = TrainerJob(model=LLAMA, layout=Layout(pipeline_split=split))
        assert not set(MEGATRON_LM.arguments(alone)) & {EMBEDDING, LOSS}
        assert ("pipeline_split" in MEGATRON_DEEPSPEED.lacking(job)) == bool(flags)


@pytest.mark.parametrize("adapter", [MEGATRON_LM, MEGATRON_DEEPSPEED])
def test_every_flag_is_one_of_the_trainer_s_own(adapter: TrainerAdapter) -> None:
    known = flags_of(adapter.name)
    for model in (GPT, LLAMA, model_preset("tiny-moe")):
        for layout in (Layout(), EVERY_KNOB, Layout(recompute="selective")):
            words = adapter.arguments(TrainerJob(model=model, layout=layout))
            assert {word for word in words if word.startswith("--")} <= known, layout.key


@pytest.mark.parametrize(
    ("layout", "said", "unsaid"),
    [
        (
            EVERY_KNOB,
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 2 "
            "--global-batch-size 32 --pipeline-model-parallel-layout E|tt|t*5|tL --sequence-parallel "
            "--recompute-granularity full --recompute-method block --use-distributed-optimizer "
            "--optimizer-cpu-offload --exp-avg-dtype bf16 "
            "--num-distributed-optimizer-instances 2 --num-query-groups 8 --swiglu --bf16 "
            "--untie-embeddings-and-output-weights --rotary-base 500000",
            # The stages say how many there are; Megatron-LM refuses both.
            f"--num-virtual-stages-per-pipeline-rank {EMBEDDING} {LOSS}",
        ),
        # Megatron-LM refuses a method together with selective granularity.
        (
            Layout(recompute="selective"),
            "--recompute-granularity selective",
            "--recompute-method --bf16 --context-parallel-size",
        ),
        # Its optimizer shards fp32 parameters too (core/optimizer/__init__.py).
        (
            Layout(dp=2, zero_stage=1),
            "--use-distributed-optimizer",
            "--num-distributed-optimizer-instances",
        ),
    ],
    ids=["every knob", "selective", "zero"],
)
def test_every_knob_of_the_layout_reaches_megatron(layout: Layout, said: str, unsaid: str) -> None:
    words = MEGATRON_LM.arguments(TrainerJob(model=LLAMA, layout=layout))
    flags = re.findall(r"--[a-z0-9-]+(?: (?!--)\S+)?", said)
    assert [flag for flag in flags if f" {flag} " not in f" {' '.join(words)} "] == []
    assert not set(unsaid.split()) & set(words)


def test_the_arguments_of_the_placement_leave_out_model_seed_and_data() -> None:
    model, settings = model_preset("tiny-moe"), JobSettings({"moe_dispatcher": "deepep"})
    layout = Layout(tp=2, sequence_parallel=True, dp=8, ep=4, precision="fp16", job=settings)
    words = " ".join(MEGATRON_LM.placement_arguments(TrainerJob(model=model, layout=layout)))
    assert words == (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --sequence-parallel "
        "--micro-batch-size 1 --global-batch-size 8 --fp16 --expert-model-parallel-size 4 "
        "--expert-tensor-parallel-size 1 --moe-grouped-gemm --moe-token-dispatcher-type flex "
        "--moe-flex-dispatcher-backend deepep"
    )
    job = TrainerJob(model=LLAMA, layout=Layout(pp=2, zero_stage=1, recompute="full"))
    words = " ".join(MEGATRON_DEEPSPEED.placement_arguments(job))
    assert words == (
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --micro-batch-size 1 "
        "--global-batch-size 1 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --deepspeed --zero-stage 1 --deepspeed-activation-checkpointing"
    )


def test_the_rotary_base_and_the_vocabulary_of_the_model_reach_every_trainer() -> None:
    job = TrainerJob(model=LLAMA, layout=Layout())
    assert value_after(MEGATRON_DEEPSPEED, job, "--rotary-position-embeddings-theta") == "500000"
    assert MEGATRON_BRIDGE.values(job)["model"]["rotary_base"] == 500_000
    odd = TrainerJob(model=replace(LLAMA, rotary_base=1234.5), layout=Layout())
    said = ["rotary_base=1234.5 is not a whole number, which the flag needs"]
    assert all(adapter.refusals(odd) == said for adapter in FAMILY)
    job = TrainerJob(model=GPT, layout=Layout(tp=2))
    assert value_after(MEGATRON_LM, job, "--vocab-size") == "51200"
    assert value_after(MEGATRON_DEEPSPEED, job, "--vocab-size") == "51199"


@pytest.mark.parametrize("adapter", FAMILY, ids=lambda adapter: adapter.name)
def test_what_the_family_asserts_is_refused_with_the_numbers(adapter: TrainerAdapter) -> None:
    zero = {"dp": 3, "zero_stage": 1, "zero_replicas": 2, "precision": "bf16"}
    interleaved = {"pp": 4, "vpp": 2, "num_microbatches": 6}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"tp": 5}, "num_heads=48 is not divisible by tp=5"),
        ({"num_kv_heads": 8}, {"tp": 16}, "num_kv_heads=8 is not divisible by tp=16"),
        (
            {},
            {"pp": 5},
            "pp*vpp=5*1=5; Megatron-LM and Megatron-Bridge take unequal stages as pipeline_layout",
        ),
        ({}, {"vpp": 2}, "vpp=2 needs a pipeline, and pp=1"),
        ({}, interleaved, "num_microbatches=6 is not divisible by pp=4"),
        ({}, {"sequence_parallel": True}, "sequence_parallel=true needs tp over 1"),
        (
            {"seq_length": 2047},
            {"tp": 2, "sequence_parallel": True},
            "=2047 is not divisible by tp=2",
        ),
        ({"vocab_size": 50257}, {"tp": 2}, "vocab_size=50257 is not divisible by tp=2"),
        ({}, zero, "dp=3 is not divisible by zero_replicas=2"),
        ({"seq_length": 2044}, {"cp": 4, "tp": 2}, "=2044 is not divisible by 2*cp=8"),
        (
            {"num_heads": 12, "num_kv_heads": 12},
            {"cp": 4, "cp_comm_type": "a2a", "tp": 2},
            "num_heads=12 is not divisible by tp*cp=8",
        ),
        ({}, {"num_nodes": 2, "dp": 3}, "3 ranks are not the same number on each of num_nodes=2"),
    ]
    for shape, layout, why in cases:
        model = replace(GPT, **shape)
        said = adapter.refusals(TrainerJob(model=model, layout=Layout(**layout)))
        assert any(why in sentence for sentence in said), (why, said)
    # 46 layers, the embedding and the head are 48 on 4 stages.
    other = replace(EVERY_KNOB, ep=1, etp=1, tp_columns=1)
    if adapter is MEGATRON_DEEPSPEED:
        # It asserts that its sequence parallelism is alone.
        alone = "cp=2 with tp=2 and pp=2"
        assert alone in adapter.refusals(TrainerJob(model=GPT, layout=replace(other, vpp=1)))[-2]
        other = replace(other, cp=1, cp_comm_type="all_gather")
    assert not adapter.refusals(TrainerJob(model=replace(GPT, num_layers=46), layout=other))


def test_deepspeed_s_configuration_is_consistent_with_the_layout() -> None:
    job = TrainerJob(model=GPT, layout=EVERY_KNOB)
    config = MEGATRON_DEEPSPEED.values(job)
    per_rank = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert config["train_batch_size"] == per_rank * EVERY_KNOB.dp == 32
    offloaded = {"offload_optimizer": {"device": "cpu"}}
    assert config["zero_optimization"] == {"stage": 1, **offloaded}
    assert config["bf16"] == {"enabled": True}
    assert value_after(MEGATRON_DEEPSPEED, job, "--zero-stage") == "1"
    assert "--no-pipeline-parallel" not in MEGATRON_DEEPSPEED.arguments(job)
    alone = TrainerJob(model=GPT, layout=Layout())
    assert "--no-pipeline-parallel" in MEGATRON_DEEPSPEED.arguments(alone)
    assert not {"bf16", "fp16"} & MEGATRON_DEEPSPEED.values(alone).keys()
    layout = Layout(cp=2, cp_comm_type="a2a", tp=2, sequence_parallel=True)
    said = MEGATRON_DEEPSPEED.refusals(TrainerJob(model=GPT, layout=layout))
    assert any("cp=2 with sequence_parallel=true" in sentence for sentence in said), said


def test_bridge_s_arguments_are_its_values() -> None:
    job = TrainerJob(model=LLAMA, layout=EVERY_KNOB)
    words = MEGATRON_BRIDGE.arguments(job)
    assert "model.virtual_pipeline_model_parallel_size=2" in words
    assert "ddp.use_distributed_optimizer=true" in words
    assert "model.num_query_groups=8" in words
    assert "mixed_precision=bf16_mixed" in words
    plain = MEGATRON_BRIDGE.arguments(TrainerJob(model=GPT, layout=Layout()))
    assert "model.recompute_granularity=null" in plain
    assert "mixed_precision=null" in plain
    assert len(words) == sum(
        len(section) if isinstance(section, dict) else 1
        for section in MEGATRON_BRIDGE.values(job).values()
    )


# Lines in the form of `training_log` in megatron/training/training.py, megatron/training.py of
# Megatron-DeepSpeed, and megatron/bridge/training/utils/train_utils.py.
LM_LINE = (
    " [2026-11-20 10:11:12.123456] iteration        3/     100 | consumed samples:           48 | "
    "elapsed time per iteration (ms): 1234.5 | throughput per GPU (TFLOP/s/GPU): 45.6 | "
    "learning rate: 1.000000E-04 | global batch size:    16 | lm loss: 1.083437E+01 | "
    "loss scale: 1.0 | grad norm: 2.345 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 |"
)
LM_STEP = {"index": 3, "step_time_ms": 1234.5, "loss_scale": 1, "skipped": 0}
DEEPSPEED_LINE = (
    " iteration       12/     100 | consumed samples:          192 | consumed tokens:       393216 | "
    "elapsed time per iteration (ms): 876.5 | learning rate: 1.000E-04 | global batch size:    16 | "
    "lm loss: 9.871234E+00 | loss scale: 1.0 | actual seqlen:  2048 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: 18.254 | "
    "tokens per gpu per second (tgs): 4673.131 | TFLOPs: 21.40 |"
)
BRIDGE_LINE = LM_LINE.replace(".123456]", "]").replace(
    " | grad norm: 2.345", " | grad norm: 2.345 | max attention logit: 1.234"
)


@pytest.mark.parametrize(
    ("adapter", "line", "figures"),
    [
        (MEGATRON_LM, LM_LINE, {**LM_STEP, "loss": 10.83437}),
        (MEGATRON_BRIDGE, BRIDGE_LINE, {**LM_STEP, "loss": 10.83437}),
        (
            MEGATRON_DEEPSPEED,
            DEEPSPEED_LINE,
            {"index": 12, "step_time_ms": 876.5, "loss": 9.871234, "loss_scale": 1, "skipped": 0}
            | {"tokens_per_s_per_device": 4673.131},
        ),
        # The loss is not printed while it is negative or NaN.
        (
            MEGATRON_LM,
            LM_LINE.replace(" lm loss: 1.083437E+01 |", ""),
            LM_STEP,
        ),
    ],
    ids=["megatron-lm", "bridge", "deepspeed", "no loss"],
)
def test_the_line_of_a_step_is_read_and_others_end_no_step(
    adapter: TrainerAdapter, line: str, figures: dict[str, float]
) -> None:
    assert adapter.log.read(line) == figures
    for other in (
        "",
        "(min, max) time across ranks (ms):",
        " validation loss at iteration 100 | lm loss value: 1.0E+01 | lm loss PPL: 2.2E+04 | ",
        "[Rank 0] (after 1 iterations) memory (MB) | allocated: 5.0 | max allocated: 9.0",
        "Step Time : 1.23s GPU utilization: 45.6MODEL_TFLOP/s/GPU",
    ):
        assert adapter.log.read(other) is None, other


def test_adapters_state_what_they_need_and_the_example_what_arguments_leave_out() -> None:
    for name, adapter in ADAPTERS.items():
        assert adapter.name == name
        assert adapter.target_version
        assert adapter.needs
        assert not adapter.needs.endswith(".")
    document = yaml.safe_load((EXAMPLES / "trainers.yaml").read_text())
    entry = read_trainers(document, str(EXAMPLES))["megatron-lm"]
    assert ADAPTERS[entry.adapter].name == "megatron-lm"
    assert "{arguments}" in entry.command
    for flag in ("--train-iters={steps}", "--lr={learning_rate}", "--mock-data"):
        assert flag in entry.command


@pytest.mark.parametrize("comm_type", CP_COMM_TYPES)
def test_context_parallelism_has_flags_where_it_can(comm_type: Any) -> None:
    job = TrainerJob(model=GPT, layout=Layout(cp=4, cp_comm_type=comm_type, tp=2))
    assert value_after(MEGATRON_LM, job, "--context-parallel-size") == "4"
    assert value_after(MEGATRON_LM, job, "--cp-comm-type") == comm_type
    model = MEGATRON_BRIDGE.values(job)["model"]
    assert (model["context_parallel_size"], model["cp_comm_type"]) == (4, comm_type)
    assert value_after(MEGATRON_DEEPSPEED, job, "--ds-sequence-parallel-size") == "4"
    assert ("cp_comm_type" in MEGATRON_DEEPSPEED.lacking(job)) is (comm_type != "a2a")


def test_the_order_of_ranks_has_a_flag_where_it_can() -> None:
    layout = Layout(pp=2, dp=2, rank_order="tp_cp_pp_dp")
    job = TrainerJob(model=LLAMA, layout=layout)
    assert "--use-tp-pp-dp-mapping" in MEGATRON_LM.arguments(job)
    assert MEGATRON_BRIDGE.values(job)["dist"] == {"use_tp_pp_dp_mapping": True}
    assert "rank_order" in MEGATRON_DEEPSPEED.all_lacking(job)
    sharded = replace(job, layout=replace(layout, zero_stage=3))
    for adapter in (MEGATRON_LM, MEGATRON_BRIDGE):
        assert "rank_order=tp_cp_pp_dp with zero_stage=3" in "; ".join(adapter.refusals(sharded))


EXAMPLES = Path(__file__).parents[3] / "examples" / "trainers"


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


@pytest.mark.parametrize("adapter", [MEGATRON_LM, MEGATRON_BRIDGE], ids=lambda each: each.name)
def test_the_router_of_one_expert_weighs_by_the_share_among_all(adapter: TrainerAdapter) -> None:
    for per_token, is_first in ((1, True), (2, False)):
        model = replace(model_preset("mixtral-8x7b"), experts_per_token=per_token)
        job = TrainerJob(model=model, layout=Layout())
        words = " ".join(adapter.arguments(job))
        assert ("--moe-router-pre-softmax" in words or "pre_softmax=true" in words) == is_first
        assert ("and the probe by 1" in " ".join(adapter.notes(job))) == is_first
