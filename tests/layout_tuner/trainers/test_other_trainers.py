"""Adapters of other trainers: what they lack, what they refuse, and what they print."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.exports.export import export
from layout_tuner.trainers.exports.export_source import ExportSource
from layout_tuner.trainers.registry import ADAPTERS
from tests.kit.layouts import EVERY_KNOB

LLAMA = model_preset("small-llama")
"""8 layers, 8 heads over 4 key heads, sequences of 256, a vocabulary of 4096."""
GPT = model_preset("tiny")


def job(model: ModelShape = LLAMA, **layout: Any) -> TrainerJob:
    return TrainerJob(model=model, layout=Layout(**layout))


def values(name: str, **layout: Any) -> Any:
    return ADAPTERS[name].values(job(**layout))


def lacking(name: str, **layout: Any) -> dict[str, str]:
    return dict(ADAPTERS[name].all_lacking(job(**layout)))


def refusals(name: str, model: ModelShape = LLAMA, **layout: Any) -> str:
    return "; ".join(ADAPTERS[name].refusals(job(model, **layout)))


TITANS = ["torchtitan-0.2", "torchtitan-0.3", "torchtitan-main"]
BF16 = {"precision": "bf16"}
FP8 = {"precision": "fp8", "dp": 2}
EVERYTHING = EVERY_KNOB.to_mapping() | {"recompute": "selective"}


LEVERS = {"recompute_layers", "offload", "optimizer_states"}
OF_TITANS = {"zero_stage", "schedule", "rank_order", *LEVERS}
STAGES = {"schedule", "rank_order", "pipeline_layout", "zero_replicas", *LEVERS}
LACKING = [
    ("torchtitan-0.2", EVERYTHING, OF_TITANS),
    ("torchtitan-0.3", EVERYTHING, OF_TITANS | {"cp_comm_type"}),
    ("torchtitan-main", EVERYTHING, (OF_TITANS | {"cp_comm_type"}) - {"optimizer_states"}),
    ("nanotron", EVERYTHING, STAGES | {"vpp", "recompute"}),
    ("deepspeed", EVERYTHING, (STAGES | {"vpp", "etp", "sequence_parallel"}) - {"offload"}),
    # Its plugin for Megatron-LM states a number of layers.
    ("accelerate", EVERYTHING, (STAGES | {"vpp", "recompute"}) - {"recompute_layers"}),
    ("axonn", EVERYTHING, {"zero_stage", "sequence_parallel", *STAGES} - {"zero_replicas"}),
    ("megatron-deepspeed", EVERYTHING, STAGES | {"vpp", "cp_comm_type"}),
    ("command", EVERYTHING, set[str]()),
    ("nanotron", {"dp": 2, "zero_stage": 2, **BF16}, {"zero_stage"}),
    ("accelerate", {"cp": 2, "cp_comm_type": "p2p", "recompute": "full"}, set[str]()),
    ("accelerate", {"cp": 2, "recompute": "full"}, {"cp_comm_type"}),
    ("accelerate", {"dp": 2, "tp": 2, "zero_stage": 3}, {"zero_stage", "recompute"}),
    ("accelerate", {"tp": 2, "recompute": "full"}, set[str]()),
    ("deepspeed", {"dp": 4, "zero_stage": 3, "zero_replicas": 2}, set[str]()),
    ("deepspeed", {"dp": 4, "zero_stage": 2, "zero_replicas": 2}, {"zero_replicas"}),
    ("torchtitan-0.2", {"tp": 2, **BF16}, {"sequence_parallel", "precision"}),
    ("torchtitan-0.3", {"tp": 2, **BF16}, set[str]()),
    ("torchtitan-0.3", {"precision": "fp16"}, {"precision"}),
    ("deepspeed", {"precision": "fp16"}, set[str]()),
]


@pytest.mark.parametrize(("name", "layout", "knobs"), LACKING)
def test_knobs_that_a_trainer_lacks_are_named(
    name: str, layout: dict[str, Any], knobs: set[str]
) -> None:
    found = lacking(name, **layout)
    assert set(found) == knobs
    assert all("without" in sentence for sentence in found.values())


@pytest.mark.parametrize("name", TITANS)
@pytest.mark.parametrize(
    ("comm_type", "method"), [("all_gather", "allgather"), ("p2p", "alltoall")]
)
def test_torchtitan_gathers_keys_or_passes_them_around(
    name: str, comm_type: str, method: str
) -> None:
    knobs = {"cp": 2, "cp_comm_type": comm_type, **BF16}
    parallelism = values(name, **knobs)["parallelism"]
    assert parallelism["context_parallel_degree"] == 2
    is_choice = name == "torchtitan-0.2"  # the others have no such key, and gather
    assert parallelism.get("context_parallel_rotate_method") == (method if is_choice else None)
    is_lacking = "cp_comm_type" in lacking(name, **knobs)
    assert is_lacking == (comm_type == "p2p" and not is_choice)


@pytest.mark.parametrize("name", TITANS)
def test_torchtitan_states_no_context_degree_without_cp(name: str) -> None:
    assert "context_parallel_degree" not in values(name, **BF16)["parallelism"]


@pytest.mark.parametrize("name", TITANS)
def test_torchtitan_lacks_a2a_and_unsharded_weights_with_cp(name: str) -> None:
    found = lacking(name, cp=2, cp_comm_type="a2a", **BF16)
    assert set(found) == {"zero_stage", "cp_comm_type"}
    assert "cp=2" in found["zero_stage"]


@pytest.mark.parametrize("name", TITANS)
def test_torchtitan_cuts_sequences_over_tp_and_the_context(name: str) -> None:
    refused = refusals(name, cp=128, tp=2, sequence_parallel=True)
    assert "not divisible by 2 * tp * cp = 512" in refused


@pytest.mark.parametrize("name", TITANS)
def test_torchtitan_replicates_shards_over_dp_alone(name: str) -> None:
    shared = {"cp": 4, "zero_stage": 3, "zero_replicas": 2, **BF16}
    assert "dp=1 is not divisible by zero_replicas=2" in refusals(name, dp=1, **shared)
    assert "zero_replicas" not in refusals(name, dp=2, **shared)


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_plain_layout_of_a_llama_is_accepted_by_all_and_tensor_columns_by_few(name: str) -> None:
    if name != "megatron-lm":
        assert lacking(name, dp=2, num_microbatches=4, **BF16) == {}
        assert refusals(name, dp=2, num_microbatches=4, **BF16) == ""
    said = "; ".join(ADAPTERS[name].refusals(job(tp_columns=2)))
    is_refused = f"tp_columns=2 has no counterpart in {name}" in said
    assert is_refused == (name not in ("embedded", "axonn", "command"))


@pytest.mark.parametrize("name", TITANS)
def test_torchtitans_fsdp_is_zero_2_or_3_with_copies(name: str) -> None:
    layout = {"dp": 4, "tp": 2, "sequence_parallel": True, "zero_replicas": 2, **BF16}
    for zero_stage, reshard in ((2, "never"), (3, "always")):
        assert lacking(name, zero_stage=zero_stage, **layout) == {}
        parallelism = values(name, zero_stage=zero_stage, **layout)["parallelism"]
        assert parallelism["fsdp_reshard_after_forward"] == reshard
        assert parallelism["data_parallel_replicate_degree"] == 2
        assert parallelism["data_parallel_shard_degree"] == 2
    said = lacking(name, dp=2, zero_stage=1, **BF16)["zero_stage"]
    assert "no ZeRO-1; without it every replica holds whole optimizer states" in said


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_autotp_shards_with_every_stage_and_leaves_the_batch_to_the_engine(zero_stage: int) -> None:
    layout = {"dp": 2, "tp": 2, "zero_stage": zero_stage, **BF16}
    assert refusals("deepspeed", **layout) == ""
    assert "train_batch_size" not in values("deepspeed", **layout)
    assert values("deepspeed", dp=2, zero_stage=zero_stage)["train_batch_size"] == 2
    notes = " ".join(ADAPTERS["deepspeed"].notes(job(**layout)))
    assert "both are 2 times those of a step" in notes
    assert ("needs DeepSpeed 0.19.4" in notes) == (zero_stage == 3)


@pytest.mark.parametrize("name", ["deepspeed", "megatron-deepspeed"])
def test_deepspeed_accumulates_bf16_gradients_in_fp32_only_with_zero(name: str) -> None:
    assert values(name, dp=2, zero_stage=1, **BF16)["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "data_types" not in values(name, dp=2, **BF16)
    without = " ".join(ADAPTERS[name].notes(job(dp=2, **BF16)))
    assert "with zero_stage=1 it accumulates in fp32" in without
    assert "data_types" not in values(name, dp=2, zero_stage=1)


def test_nanotrons_own_cut_is_noted() -> None:
    assert "they have 4, 3, 1, 0 layers" in " ".join(
        ADAPTERS["nanotron"].notes(job(replace(LLAMA, vocab_size=16384), pp=4, **BF16))
    )


@pytest.mark.parametrize("name", ADAPTERS)
def test_rules_have_names_and_sources(name: str) -> None:
    rules = ADAPTERS[name].rules
    assert len({rule.name for rule in rules}) == len(rules)
    assert all(rule.source for rule in rules)


def test_accelerates_fsdp_is_zero_2_or_3_with_copies() -> None:
    third = values("accelerate", dp=4, zero_stage=3, zero_replicas=2)
    assert third["distributed_type"] == "FSDP"
    assert third["fsdp_config"]["fsdp_reshard_after_forward"] is True
    sizes = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}
    assert third["parallelism_config"] == sizes
    second = values("accelerate", dp=4, zero_stage=2, recompute="full")
    assert second["fsdp_config"]["fsdp_reshard_after_forward"] is False
    assert second["fsdp_config"]["fsdp_activation_checkpointing"] is True


def test_deepspeed_and_megatron_fsdp_have_the_stages() -> None:
    layout = {"dp": 4, "zero_stage": 3, "zero_replicas": 2}
    zero = values("deepspeed", dp=4, zero_stage=3)["zero_optimization"]
    assert zero == {"stage": 3, "overlap_comm": True}
    words = " ".join(ADAPTERS["megatron-lm"].arguments(job(**layout)))
    for flags in (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
        "--ckpt-format fsdp_dtensor",
        "--num-distributed-optimizer-instances 2",
    ):
        assert flags in words
    bridge = values("megatron-bridge", **layout | {"zero_stage": 2})
    assert bridge["ddp"]["data_parallel_sharding_strategy"] == "optim_grads"
    assert bridge["dist"] == {"use_megatron_fsdp": True}
    assert bridge["checkpoint"] == {"ckpt_format": "fsdp_dtensor"}


def test_torchtitan_0_2_shards_where_it_cannot_replicate_and_says_so() -> None:
    said = lacking("torchtitan-0.2", dp=4, tp=2, sequence_parallel=True, **BF16)["zero_stage"]
    assert "tp=2, pp=1" in said
    assert "FSDP shards weights, gradients and optimizer states over dp=4" in said
    both = values("torchtitan-0.2", dp=4, tp=2)["parallelism"]
    assert both["data_parallel_shard_degree"] == 4
    alone = values("torchtitan-0.2", dp=4)["parallelism"]
    assert alone["data_parallel_replicate_degree"] == 4


def test_selective_recomputation_of_torchtitan_is_by_operator() -> None:
    checkpointing = values("torchtitan-0.2", recompute="selective")["activation_checkpoint"]
    assert checkpointing == {"mode": "selective", "selective_ac_option": "op"}
    for name in TITANS[1:]:
        source = ExportSource(campaign="c", trial=1, job=job(recompute="selective"))
        content = next(each for each in export(name, source).files if each.name.endswith(".py"))
        assert "import SelectiveAC\n" in content.content
        assert "activation_checkpoint = SelectiveAC.Config()\n" in content.content


def test_fp8_under_the_keys_of_those_who_have_it() -> None:
    arguments = ADAPTERS["megatron-lm"].arguments(job(**FP8))
    assert " --bf16 --fp8-format hybrid --fp8-recipe tensorwise " in " ".join(arguments)
    bridge = values("megatron-bridge", **FP8)
    assert bridge["mixed_precision"] == "bf16_with_fp8_current_scaling_mixed"
    titan = values("torchtitan-0.2", **FP8)
    assert titan["model"]["converters"] == ["quantize.linear.float8"]
    assert titan["quantize"]["linear"]["float8"] == {"recipe_name": "rowwise"}
    assert titan["training"]["mixed_precision_param"] == "bfloat16"
    accelerate = values("accelerate", **FP8)
    assert (accelerate["mixed_precision"], accelerate["fp8_config"]["backend"]) == ("fp8", "TE")


@pytest.mark.parametrize(
    ("precision", "zero_stage", "flags", "bridge"),
    [
        (
            "fp8_block",
            1,
            "--bf16 --fp8-format hybrid --fp8-recipe blockwise",
            "bf16_with_fp8_subchannel_scaling_mixed",
        ),
        (
            "mxfp8",
            1,
            "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather "
            "--reuse-grad-buf-for-mxfp8-param-ag",
            "bf16_with_mxfp8_mixed",
        ),
        ("mxfp8", 0, "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", "bf16_with_mxfp8_mixed"),
        (
            "nvfp4",
            1,
            "--bf16 --fp4-format e2m1 --fp4-recipe nvfp4 --fp4-param-gather",
            "bf16_with_nvfp4_mixed",
        ),
    ],
)
def test_types_with_blocks_under_megatrons_words(
    precision: str, zero_stage: int, flags: str, bridge: str
) -> None:
    knobs = {"precision": precision, "zero_stage": zero_stage, "dp": 2}
    words = " ".join(ADAPTERS["megatron-lm"].arguments(job(**knobs)))
    assert f" {flags} " in f"{words} "
    assert words.count("param-gather") == flags.count("param-gather") + bool(zero_stage)
    assert values("megatron-bridge", **knobs)["mixed_precision"] == bridge


def test_mxfp8_under_the_keys_of_torchtitan_and_accelerate() -> None:
    titan = values("torchtitan-0.2", precision="mxfp8", dp=2)
    assert titan["model"]["converters"] == ["quantize.linear.mx"]
    assert titan["quantize"] == {"linear": {"mx": {"recipe_name": "mxfp8_cublas"}}}
    assert titan["training"]["mixed_precision_param"] == "bfloat16"
    accelerate = values("accelerate", precision="mxfp8", dp=2)
    keys = {"backend": "TE", "fp8_format": "E4M3", "use_mxfp8_block_scaling": True}
    assert (accelerate["mixed_precision"], accelerate["fp8_config"]) == ("fp8", keys)
    both = {"precision": "mxfp8", "tp": 2, "dp": 2, "zero_stage": 3, "sequence_parallel": True}
    lacks = ADAPTERS["torchtitan-0.2"].all_lacking
    assert "precision" not in lacks(job(**both))
    said = lacks(replace(job(**both), compile=True))["precision"]
    assert said.startswith("torchtitan 0.2 has mxfp8 with tp=2 only without torch.compile")


ODD = replace(LLAMA, seq_length=254, vocab_size=4095)
TIED = replace(LLAMA, tied_embeddings=True)
WIDE = replace(LLAMA, vocab_size=128256)
MIXTRAL = model_preset("mixtral-8x7b")
FEW = "num_microbatches=3 is less than pp=4: torch's Schedule1F1B takes"
WITHOUT_NVFP4 = ("torchtitan-0.2", "torchtitan-0.3", "deepspeed", "accelerate", "axonn")
WITHOUT_FP8 = ("deepspeed", "megatron-deepspeed", "nanotron", "torchtitan-0.3", "torchtitan-main")


@pytest.mark.parametrize(
    ("name", "model", "layout", "said"),
    [
        ("torchtitan-0.3", GPT, {}, "family=gpt"),
        ("nanotron", GPT, BF16, "family=gpt"),
        ("nanotron", LLAMA, {}, "precision=fp32"),
        ("nanotron", LLAMA, {"precision": "fp16"}, "precision=fp16"),
        *((name, LLAMA, FP8, "precision=fp8") for name in WITHOUT_FP8),
        ("accelerate", LLAMA, {"tp": 2, **FP8}, "accelerate's plugin"),
        *((name, LLAMA, {"precision": "nvfp4"}, "precision=nvfp4") for name in WITHOUT_NVFP4),
        ("accelerate", LLAMA, {"precision": "fp8_block"}, "which has those of fp8 and mxfp8"),
        ("torchtitan-0.3", LLAMA, {"tp": 8}, "num_kv_heads=4 is not divisible by tp=8"),
        ("nanotron", LLAMA, {**BF16, "tp": 8}, "num_kv_heads=4 is not divisible by tp=8"),
        (
            "torchtitan-0.2",
            LLAMA,
            {"pp": 3},
            "=8 is not divisible by pp*vpp=3*1: torchtitan "
            "would cut uneven stages; state them as pipeline_layout",
        ),
        ("torchtitan-0.2", ODD, {"tp": 2}, "seq_length=254 is not divisible by 2 * tp = 4"),
        ("torchtitan-0.3", ODD, {"tp": 4, "sequence_parallel": True}, "not divisible by tp = 4"),
        *((name, LLAMA, {**BF16, "pp": 4, "num_microbatches": 3}, FEW) for name in TITANS),
        ("nanotron", LLAMA, {**BF16, "pp": 4, "num_microbatches": 2}, "is less than pp-1=3"),
        ("nanotron", WIDE, {**BF16, "pp": 4, "num_microbatches": 4}, "stage 2 of 4 no weights"),
        ("deepspeed", MIXTRAL, {"dp": 2, "pp": 2, "ep": 2}, "ep=2 with pp=2"),
        (
            "deepspeed",
            LLAMA,
            {"dp": 4, "zero_stage": 3, "zero_replicas": 2},
            "DeepSpeed removed MiCS, its only smaller groups for weights, in 0.19.7",
        ),
        ("megatron-deepspeed", LLAMA, {"cp": 2, "tp": 2}, "cp=2 with tp=2 and pp=1"),
        ("axonn", LLAMA, {"dp": 5, "zero_stage": 3}, "queries=65536, keys=32768, feed-forward="),
        ("nanotron", ODD, {"tp": 2, **BF16}, "vocab_size=4095 is not divisible by tp=2"),
        ("torchtitan-0.2", TIED, {}, "tied_embeddings=true"),
        ("torchtitan-0.3", TIED, {"pp": 2}, "tied_embeddings=true with pp=2"),
        ("deepspeed", LLAMA, {"tp": 2, "pp": 4}, "tp=2 with pp=4"),
        ("deepspeed", LLAMA, {"dp": 2, "pp": 2, "zero_stage": 2}, "zero_stage=2 with pp=2"),
        (
            "megatron-deepspeed",
            LLAMA,
            {"dp": 2, "pp": 2, "zero_stage": 2},
            "zero_stage=2 with pp=2",
        ),
        ("nanotron", LLAMA, {"cp": 2, **BF16}, "cp=2: "),
        ("deepspeed", LLAMA, {"cp": 2, **BF16}, "cp=2: "),
        ("axonn", LLAMA, {"pp": 2}, "pp=2: AxoNN"),
        ("axonn", MIXTRAL, {}, "num_experts="),
    ],
)
def test_a_layout_that_a_trainer_refuses_is_refused_with_its_numbers(
    name: str, model: ModelShape, layout: dict[str, Any], said: str
) -> None:
    assert said in refusals(name, model, **layout)
    assert refusals("torchtitan-0.3", TIED) == ""


def test_torchtitan_is_told_what_counts_as_a_layer() -> None:
    """Its stages are (layers + less of the first and of the last) / layers per stage."""
    for split, num_layers, ends in (
        ("layers", 8, (0, 0)),
        ("embedding", 7, (1, 0)),
        ("head", 7, (0, 1)),
        ("embedding_and_head", 6, (1, 1)),
    ):
        model = replace(LLAMA, num_layers=num_layers)
        uneven = {"pp": 2, "vpp": 2, "num_microbatches": 2, "pipeline_split": split}
        for name in TITANS:
            assert refusals(name, model, **uneven) == ""
            parallelism = ADAPTERS[name].values(job(model, **uneven))["parallelism"]
            assert parallelism["pipeline_parallel_layers_per_stage"] == 2
            assert parallelism["pipeline_parallel_first_stage_less_layers"] == ends[0]
            assert parallelism["pipeline_parallel_last_stage_less_layers"] == ends[1]
    said = refusals("torchtitan-0.3", pp=2, vpp=2, pipeline_split="embedding")
    assert "num_layers+1=9 is not divisible by pp*vpp=2*2" in said


def test_accelerate_takes_the_backend_that_has_the_layout() -> None:
    for kind, layout in (
        ("NO", {}),
        ("MULTI_GPU", {"dp": 2}),
        ("DEEPSPEED", {"dp": 2, "zero_stage": 1}),
        ("MEGATRON_LM", {"pp": 2}),
        ("MEGATRON_LM", {"tp": 2, "dp": 2}),
        ("MEGATRON_LM", {"cp": 2, "cp_comm_type": "p2p"}),
    ):
        found = values("accelerate", **layout)
        assert found["distributed_type"] == kind
        cp = found.get("megatron_lm_config", {}).get("megatron_lm_context_parallel_size", 1)
        assert cp == layout.get("cp", 1)
    assert "every block is recomputed" in lacking("accelerate", tp=2)["recompute"]
    assert "unless your script does it" in lacking("accelerate", recompute="full")["recompute"]


def test_what_a_users_script_must_do_itself_is_noted() -> None:
    pipeline = " ".join(ADAPTERS["deepspeed"].notes(job(pp=4, recompute="selective")))
    assert "PipelineModule(num_stages=4)" in pipeline
    assert "recompute=selective is for your script" in pipeline
    assert "AutoTP" in " ".join(ADAPTERS["deepspeed"].notes(job(tp=2)))
    sharded = " ".join(ADAPTERS["accelerate"].notes(job(dp=2, zero_stage=1)))
    assert "install deepspeed and transformers" in sharded
    assert "batch_size=3" in " ".join(ADAPTERS["accelerate"].notes(job(micro_batch_size=3)))


def test_a_file_of_accelerate_says_that_deepspeed_adds_up_micro_batches_in_bf16() -> None:
    def said(**layout: Any) -> str:
        return " ".join(ADAPTERS["accelerate"].notes(job(dp=2, precision="bf16", **layout)))

    assert "grad_accum_dtype" in said(zero_stage=1, num_microbatches=4)
    assert "its 4 micro-batches" in said(zero_stage=1, num_microbatches=4)
    for other in ({"zero_stage": 2}, {"zero_stage": 0}, {"zero_stage": 1, "tp": 2}):
        assert "grad_accum_dtype" not in said(num_microbatches=4, **other)
    assert "grad_accum_dtype" not in said(zero_stage=1, num_microbatches=1)
    wide = ADAPTERS["accelerate"].notes(job(dp=2, zero_stage=1, num_microbatches=4))
    assert "grad_accum_dtype" not in " ".join(wide)


RED, GREEN, OFF = "\x1b[31m", "\x1b[32m", "\x1b[39m"
TITAN = (
    f"[titan] 2026-11-01 10:00:00,000 - root - INFO - {RED}step:  9  {GREEN}loss:  3.50858  "
    f"{OFF}grad_norm:  5.9444  memory:  0.25GiB(0.00%)  tps: 1,060  tflops: 0.04  mfu: 0.01%"
)
NANOTRON = (
    "11/01/2026 10:00:00 [INFO|DP=0|PP=0|TP=0]: iteration: 3 / 10 | consumed_tokens: 98.3K | "
    "elapsed_time_per_iteration_ms: 1.24K | tokens_per_sec: 26.4K | tokens_per_sec_per_gpu: "
    "3.3K | global_batch_size: 16 | lm_loss: 10.4 | lr: 0.0001"
)
DEEPSPEED = "steps: 2 loss: 6.4141 iter time (s): 0.026 samples/sec: 309.369"


@pytest.mark.parametrize(
    ("trainers", "line", "expected"),
    [
        (
            TITANS,
            TITAN,
            {"index": 9, "loss": 3.50858, "peak_memory_gib": 0.25, "tokens_per_s_per_device": 1060},
        ),
        (TITANS, "validate step:  9  loss:  3.5085  memory:  0.25GiB(0.00%)  tps: 1,060", None),
        (["deepspeed"], DEEPSPEED, {"index": 2, "loss": 6.4141, "step_time_s": 0.026}),
        (["deepspeed"], "[Rank 0] time (ms) | fwd: 7.63 | bwd: 20.90 | step: 6.53", None),
        # Its times are rounded.
        (["nanotron"], NANOTRON, {"index": 3, "loss": 10.4}),
        # What a user's program prints is unknown.
        (["accelerate", "command"], "step: 1 loss: 2.0", None),
    ],
)
def test_the_line_of_a_step_is_read(
    trainers: list[str], line: str, expected: dict[str, float] | None
) -> None:
    for name in trainers:
        assert ADAPTERS[name].log.read(line) == expected


def test_all_forward_passes_first_is_an_engine_of_torchtitan_and_nanotron() -> None:
    titans = dict.fromkeys(TITANS, ("pipeline_parallel_schedule", "GPipe"))
    for name, (key, word) in {**titans, "nanotron": ("pp_engine", "afab")}.items():
        parallelism = values(name, pp=2, schedule="gpipe", **BF16)["parallelism"]
        assert parallelism[key] == word
        assert "schedule" not in lacking(name, pp=2, schedule="gpipe", **BF16)
        late = lacking(name, pp=2, schedule="zero_bubble", **BF16)
        assert late["schedule"].startswith(f"{name} has no schedule=zero_bubble")


def test_axonn_divides_by_rows_columns_depth_and_data() -> None:
    layout = {"tp": 2, "tp_columns": 4, "dp": 8, "zero_stage": 3, "zero_replicas": 2, **BF16}
    assert not refusals("axonn", **layout)
    assert not lacking("axonn", **layout)
    grid = values("axonn", **layout)["grid"]
    assert grid == {"G_inter": 1, "G_data": 2, "G_intra_r": 2, "G_intra_c": 4, "G_intra_d": 4}
    replicas = values("axonn", tp=2, dp=4)["grid"]
    assert (replicas["G_data"], replicas["G_intra_d"]) == (4, 1)
    assert "another model" in " ".join(ADAPTERS["axonn"].notes(job(**layout)))


@pytest.mark.parametrize("name", TITANS)
def test_torchtitan_is_told_the_modules_of_unequal_stages(name: str) -> None:
    stated = {"pp": 2, "num_microbatches": 4, **BF16}
    written = values(name, pipeline_layout=f"Ett|t*{LLAMA.num_layers - 2}L", **stated)
    parallelism = written["parallelism"]
    first, last = parallelism["module_fqns_per_model_part"]
    assert first == ["tok_embeddings", "layers.0", "layers.1"]
    output = "output" if name == "torchtitan-0.2" else "lm_head"
    assert last[-3:] == [f"layers.{LLAMA.num_layers - 1}", "norm", output]
    assert "pipeline_parallel_layers_per_stage" not in parallelism
    v = values(name, schedule="zbv", vpp=2, **stated)["parallelism"]
    assert v["pipeline_parallel_schedule"] == "ZBVZeroBubble"
    assert "schedule" not in lacking(name, schedule="zbv", vpp=2, **stated)
    assert lacking(name, schedule="v_half", vpp=2, **stated)["schedule"] == (
        f"{name} has no schedule=v_half; without it the schedule is interleaved 1F1B"
    )
