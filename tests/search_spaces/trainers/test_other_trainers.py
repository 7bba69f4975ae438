"""Adapters of other trainers: what they lack, what they refuse, and what they print."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape
from search_spaces.spec.presets.models import model_preset
from search_spaces.trainers.base import TrainerJob
from search_spaces.trainers.registry import ADAPTERS
from tests.kit.layouts import EVERY_KNOB

LLAMA = model_preset("small-llama")
"""8 layers, 8 heads over 4 key heads, sequences of 256, a vocabulary of 4096."""
GPT = model_preset("tiny")


def job(model: ModelShape = LLAMA, **layout: Any) -> TrainerJob:
    return TrainerJob(model=model, layout=Layout(**layout))


def lacking(name: str, **layout: Any) -> dict[str, str]:
    return dict(ADAPTERS[name].all_lacking(job(**layout)))


def refusals(name: str, model: ModelShape = LLAMA, **layout: Any) -> str:
    return "; ".join(ADAPTERS[name].refusals(job(model, **layout)))


TITANS = ["torchtitan-0.2", "torchtitan-0.3", "torchtitan-main"]
BF16 = {"precision": "bf16"}
EVERYTHING = EVERY_KNOB.to_mapping() | {"recompute": "selective"}


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        *((name, {"zero_stage", "recompute", "schedule", "rank_order"}) for name in TITANS),
        (
            "nanotron",
            {"vpp", "schedule", "rank_order", "pipeline_split", "zero_replicas", "recompute"},
        ),
        (
            "deepspeed",
            {
                "etp",
                "vpp",
                "schedule",
                "rank_order",
                "pipeline_split",
                "zero_replicas",
                "sequence_parallel",
            },
        ),
        (
            "accelerate",
            {"vpp", "schedule", "rank_order", "pipeline_split", "zero_replicas", "recompute"},
        ),
        ("axonn", {"zero_stage", "sequence_parallel", "schedule", "rank_order"}),
        (
            "megatron-deepspeed",
            {"vpp", "schedule", "rank_order", "pipeline_split", "cp_comm_type", "zero_replicas"},
        ),
        ("command", set()),
    ],
)
def test_knobs_that_a_trainer_lacks_are_named(name: str, knobs: set[str]) -> None:
    found = lacking(name, **EVERYTHING)
    assert set(found) == knobs
    assert all("without" in sentence for sentence in found.values())


@pytest.mark.parametrize("name", TITANS)
def test_torchtitan_gathers_keys_or_passes_them_around_beside_fsdp(name: str) -> None:
    for comm_type, method in (("all_gather", "allgather"), ("p2p", "alltoall")):
        values = ADAPTERS[name].values(job(cp=2, cp_comm_type=comm_type, **BF16))["parallelism"]
        assert values["context_parallel_degree"] == 2
        assert values["context_parallel_rotate_method"] == method
    found = lacking(name, cp=2, cp_comm_type="a2a", **BF16)
    assert set(found) == {"zero_stage", "cp_comm_type"}
    assert "cp=2" in found["zero_stage"]
    assert "not divisible by 2 * tp * cp = 512" in refusals(name, cp=128, tp=2)
    assert "context_parallel_degree" not in ADAPTERS[name].values(job(**BF16))["parallelism"]


def test_accelerate_passes_cp_on_to_megatron_lm() -> None:
    values = ADAPTERS["accelerate"].values(job(cp=2, cp_comm_type="p2p"))
    assert values["distributed_type"] == "MEGATRON_LM"
    assert values["megatron_lm_config"]["megatron_lm_context_parallel_size"] == 2
    assert lacking("accelerate", cp=2, cp_comm_type="p2p", recompute="full") == {}
    assert set(lacking("accelerate", cp=2, recompute="full")) == {"cp_comm_type"}


@pytest.mark.parametrize("name", ["nanotron", "deepspeed"])
def test_trainers_without_context_parallelism_refuse_it_by_name(name: str) -> None:
    assert "cp=2: " in refusals(name, cp=2, **BF16)


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "megatron-lm"])
def test_a_plain_layout_of_a_llama_is_accepted_by_all(name: str) -> None:
    assert lacking(name, dp=2, num_microbatches=4, **BF16) == {}
    assert refusals(name, dp=2, num_microbatches=4, **BF16) == ""


@pytest.mark.parametrize("name", TITANS)
def test_zero_1_has_no_counterpart_in_torchtitan(name: str) -> None:
    said = lacking(name, dp=2, zero_stage=1, **BF16)["zero_stage"]
    assert "no ZeRO-1; without it every replica holds whole optimizer states" in said


@pytest.mark.parametrize("name", TITANS)
@pytest.mark.parametrize(("zero_stage", "reshard"), [(2, "never"), (3, "always")])
def test_torchtitans_fsdp_is_zero_2_or_3_with_copies(
    name: str, zero_stage: int, reshard: str
) -> None:
    layout = {"dp": 4, "tp": 2, "sequence_parallel": True, "zero_replicas": 2, **BF16}
    assert lacking(name, zero_stage=zero_stage, **layout) == {}
    values = ADAPTERS[name].values(job(zero_stage=zero_stage, **layout))["parallelism"]
    assert values["fsdp_reshard_after_forward"] == reshard
    assert values["data_parallel_replicate_degree"] == 2
    assert values["data_parallel_shard_degree"] == 2


def test_accelerates_fsdp_is_zero_2_or_3_with_copies() -> None:
    values = ADAPTERS["accelerate"].values(job(dp=4, zero_stage=3, zero_replicas=2))
    assert values["distributed_type"] == "FSDP"
    assert values["fsdp_config"]["fsdp_reshard_after_forward"] is True
    assert values["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 2,
    }
    second = ADAPTERS["accelerate"].values(job(dp=4, zero_stage=2, recompute="full"))
    assert second["fsdp_config"]["fsdp_reshard_after_forward"] is False
    assert second["fsdp_config"]["fsdp_activation_checkpointing"] is True
    assert set(lacking("accelerate", dp=2, tp=2, zero_stage=3)) == {"zero_stage", "recompute"}


def test_deepspeed_has_the_stages_where_it_can_train_with_them() -> None:
    zero = ADAPTERS["deepspeed"].values(job(dp=4, zero_stage=3, zero_replicas=2))
    assert zero["zero_optimization"] == {"stage": 3, "overlap_comm": True, "mics_shard_size": 2}
    assert lacking("deepspeed", dp=4, zero_stage=3, zero_replicas=2) == {}
    assert set(lacking("deepspeed", dp=4, zero_stage=2, zero_replicas=2)) == {"zero_replicas"}
    for name in ("deepspeed", "megatron-deepspeed"):
        assert "zero_stage=2 with pp=2" in refusals(name, dp=2, pp=2, zero_stage=2)
    assert "zero_stage=3 with tp=2" in refusals("deepspeed", tp=2, dp=2, zero_stage=3)


def test_megatron_fsdp_has_the_stages() -> None:
    layout = {"dp": 4, "zero_stage": 3, "zero_replicas": 2}
    words = " ".join(ADAPTERS["megatron-lm"].arguments(job(**layout)))
    for flags in (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
        "--ckpt-format fsdp_dtensor",
        "--num-distributed-optimizer-instances 2",
    ):
        assert flags in words
    bridge = ADAPTERS["megatron-bridge"].values(job(**layout | {"zero_stage": 2}))
    assert bridge["ddp"]["data_parallel_sharding_strategy"] == "optim_grads"
    assert bridge["dist"] == {"use_megatron_fsdp": True}
    assert bridge["checkpoint"] == {"ckpt_format": "fsdp_dtensor"}


def test_nanotron_lacks_the_stages_above_1() -> None:
    assert set(lacking("nanotron", dp=2, zero_stage=2, **BF16)) == {"zero_stage"}


def test_torchtitan_0_2_shards_where_it_cannot_replicate_and_says_so() -> None:
    said = lacking("torchtitan-0.2", dp=4, tp=2, sequence_parallel=True, **BF16)["zero_stage"]
    assert "tp=2, pp=1" in said
    assert "FSDP shards weights, gradients and optimizer states over dp=4" in said
    values = ADAPTERS["torchtitan-0.2"].values(job(dp=4, tp=2))["parallelism"]
    assert values["data_parallel_shard_degree"] == 4
    alone = ADAPTERS["torchtitan-0.2"].values(job(dp=4))["parallelism"]
    assert alone["data_parallel_replicate_degree"] == 4


def test_torchtitan_0_2_shares_the_sequence_and_has_half_precision_with_fsdp_only() -> None:
    found = lacking("torchtitan-0.2", tp=2, **BF16)
    assert set(found) == {"sequence_parallel", "precision"}
    assert lacking("torchtitan-0.3", tp=2, **BF16) == {}


FP8 = {"precision": "fp8", "dp": 2}


@pytest.mark.parametrize(
    "name",
    ["deepspeed", "megatron-deepspeed", "nanotron", "torchtitan-0.3", "torchtitan-main"],
)
def test_fp8_is_refused_by_those_who_lack_it(name: str) -> None:
    assert "precision=fp8" in refusals(name, **FP8)


def test_fp8_under_the_keys_of_those_who_have_it() -> None:
    arguments = ADAPTERS["megatron-lm"].arguments(job(**FP8))
    assert " --bf16 --fp8-format hybrid --fp8-recipe tensorwise " in " ".join(arguments)
    bridge = ADAPTERS["megatron-bridge"].values(job(**FP8))
    assert bridge["mixed_precision"] == "bf16_with_fp8_current_scaling_mixed"
    titan = ADAPTERS["torchtitan-0.2"].values(job(**FP8))
    assert titan["model"]["converters"] == ["quantize.linear.float8"]
    assert titan["quantize"]["linear"]["float8"] == {"recipe_name": "rowwise"}
    assert titan["training"]["mixed_precision_param"] == "bfloat16"
    accelerate = ADAPTERS["accelerate"].values(job(**FP8))
    assert (accelerate["mixed_precision"], accelerate["fp8_config"]["backend"]) == ("fp8", "TE")
    assert "accelerate's plugin" in refusals("accelerate", tp=2, **FP8)


@pytest.mark.parametrize("name", TITANS)
def test_copies_of_shards_over_cp_are_refused_by_torchtitan(name: str) -> None:
    shared = {"cp": 4, "zero_stage": 3, "zero_replicas": 2, **BF16}
    assert "dp=1 is not divisible by zero_replicas=2" in refusals(name, dp=1, **shared)
    assert "zero_replicas" not in refusals(name, dp=2, **shared)


def test_half_precision_of_fp16_is_named_by_those_who_lack_it() -> None:
    assert set(lacking("torchtitan-0.3", precision="fp16")) == {"precision"}
    assert "precision=fp16" in refusals("nanotron", precision="fp16")
    assert lacking("deepspeed", precision="fp16") == {}


@pytest.mark.parametrize(
    ("name", "model", "layout", "said"),
    [
        ("torchtitan-0.3", GPT, {}, "family=gpt"),
        ("nanotron", GPT, BF16, "family=gpt"),
        ("nanotron", LLAMA, {}, "precision=fp32"),
        ("torchtitan-0.3", LLAMA, {"tp": 8}, "num_kv_heads=4 is not divisible by tp=8"),
        ("nanotron", LLAMA, {**BF16, "tp": 8}, "num_kv_heads=4 is not divisible by tp=8"),
        ("torchtitan-0.2", LLAMA, {"pp": 3}, "num_layers=8 is not divisible by pp*vpp=3*1"),
        ("deepspeed", LLAMA, {"tp": 2, "pp": 4}, "tp=2 with pp=4"),
    ],
)
def test_a_layout_that_a_trainer_refuses_is_refused_with_its_numbers(
    name: str, model: ModelShape, layout: dict[str, Any], said: str
) -> None:
    assert said in refusals(name, model, **layout)


def test_lengths_and_vocabularies_have_to_divide() -> None:
    odd = replace(LLAMA, seq_length=254, vocab_size=4095)
    assert "seq_length=254 is not divisible by 2 * tp = 4" in refusals("torchtitan-0.3", odd, tp=2)
    assert "vocab_size=4095 is not divisible by tp=2" in refusals("nanotron", odd, tp=2, **BF16)


def test_tied_weights_are_refused_where_torchtitan_cannot_tie_them() -> None:
    tied = replace(LLAMA, tied_embeddings=True)
    assert "tied_embeddings=true" in refusals("torchtitan-0.2", tied)
    assert refusals("torchtitan-0.3", tied) == ""
    assert "tied_embeddings=true with pp=2" in refusals("torchtitan-0.3", tied, pp=2)


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
            values = ADAPTERS[name].values(job(model, **uneven))["parallelism"]
            assert values["pipeline_parallel_layers_per_stage"] == 2
            assert values["pipeline_parallel_first_stage_less_layers"] == ends[0]
            assert values["pipeline_parallel_last_stage_less_layers"] == ends[1]
    said = refusals("torchtitan-0.3", pp=2, vpp=2, pipeline_split="embedding")
    assert "num_layers+1=9 is not divisible by pp*vpp=2*2" in said


def test_accelerate_recomputes_all_or_nothing_by_its_file() -> None:
    assert lacking("accelerate", tp=2, recompute="full") == {}
    assert "every block is recomputed" in lacking("accelerate", tp=2)["recompute"]
    assert "unless your script does it" in lacking("accelerate", recompute="full")["recompute"]


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ({}, "NO"),
        ({"dp": 2}, "MULTI_GPU"),
        ({"dp": 2, "zero_stage": 1}, "DEEPSPEED"),
        ({"pp": 2}, "MEGATRON_LM"),
        ({"tp": 2, "dp": 2}, "MEGATRON_LM"),
    ],
)
def test_accelerate_takes_the_backend_that_has_the_layout(
    layout: dict[str, Any], kind: str
) -> None:
    assert ADAPTERS["accelerate"].values(job(**layout))["distributed_type"] == kind


def test_what_a_users_script_must_do_itself_is_noted() -> None:
    pipeline = " ".join(ADAPTERS["deepspeed"].notes(job(pp=4, recompute="selective")))
    assert "PipelineModule(num_stages=4)" in pipeline
    assert "recompute=selective is for your script" in pipeline
    assert "AutoTP" in " ".join(ADAPTERS["deepspeed"].notes(job(tp=2)))
    sharded = " ".join(ADAPTERS["accelerate"].notes(job(dp=2, zero_stage=1)))
    assert "install deepspeed and transformers" in sharded
    assert "batch_size=3" in " ".join(ADAPTERS["accelerate"].notes(job(micro_batch_size=3)))


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
            {
                "index": 9,
                "loss": 3.50858,
                "peak_memory_gib": 0.25,
                "tokens_per_s_per_device": 1060,
            },
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


@pytest.mark.parametrize(
    ("name", "key", "word"),
    [
        *((name, "pipeline_parallel_schedule", "GPipe") for name in TITANS),
        ("nanotron", "pp_engine", "afab"),
    ],
)
def test_all_forward_passes_first_is_an_engine_of_torchtitan_and_nanotron(
    name: str, key: str, word: str
) -> None:
    values = ADAPTERS[name].values(job(pp=2, schedule="gpipe", **BF16))["parallelism"]
    assert values[key] == word
    assert "schedule" not in lacking(name, pp=2, schedule="gpipe", **BF16)
    late = lacking(name, pp=2, schedule="zero_bubble", **BF16)
    assert late["schedule"].startswith(f"{name} has no schedule=zero_bubble")


@pytest.mark.parametrize("name", ADAPTERS)
def test_trainers_without_tensor_columns_refuse_them_by_name(name: str) -> None:
    said = ADAPTERS[name].every_refusal(job(tp_columns=2))
    is_refused = f"tp_columns=2 has no counterpart in {name}" in "; ".join(said)
    assert is_refused == (name not in ("embedded", "axonn", "command"))


def test_axonn_divides_by_rows_columns_depth_and_data() -> None:
    layout = {"tp": 2, "tp_columns": 4, "dp": 8, "zero_stage": 3, "zero_replicas": 2, **BF16}
    assert not refusals("axonn", **layout)
    assert not lacking("axonn", **layout)
    grid = ADAPTERS["axonn"].values(job(**layout))["grid"]
    assert grid == {"G_inter": 1, "G_data": 2, "G_intra_r": 2, "G_intra_c": 4, "G_intra_d": 4}
    replicas = ADAPTERS["axonn"].values(job(tp=2, dp=4))["grid"]
    assert (replicas["G_data"], replicas["G_intra_d"]) == (4, 1)
    assert "another model" in " ".join(ADAPTERS["axonn"].notes(job(**layout)))
    assert "pp=2: AxoNN" in refusals("axonn", pp=2)
    assert "num_experts=" in refusals("axonn", model_preset("mixtral-8x7b"))
