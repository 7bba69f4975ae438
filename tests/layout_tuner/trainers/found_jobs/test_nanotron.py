"""nanotron's YAML files and commands, read as jobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.found_jobs.completed_job import completed
from layout_tuner.trainers.found_jobs.found_job import FoundJob, JobFileInvalidError
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.nanotron import read_command
from layout_tuner.trainers.found_jobs.program_command import ProgramCommand, Word
from layout_tuner.trainers.found_jobs.read_job import read_job
from layout_tuner.trainers.registry import ADAPTERS
from tests.exports.exported_files import write_export
from tests.exports.legal_jobs import legal_jobs

JOB = """
general: {project: mine, run: a_%j, seed: 1}
parallelism:
  dp: 4
  tp: 2
  pp: 2
  pp_engine: 1f1b
  tp_mode: REDUCE_SCATTER
  tp_linear_async_communication: true
  recompute_layer: true
tokens:
  sequence_length: 2048
  train_steps: 70_000
  micro_batch_size: 2
  batch_accumulation_per_replica: 8
  limit_val_batches:
model:
  dtype: bfloat16
  make_vocab_size_divisible_by: 128
  init_method: {std: !!python/object/apply:numpy.core.multiarray.scalar [a, b]}
  model_config:
    is_llama_config: true
    hidden_size: 1024
    intermediate_size: 4096
    num_hidden_layers: 12
    num_attention_heads: 16
    num_key_value_heads: null
    max_position_embeddings: 4096
    rope_theta: 500000.0
    tie_word_embeddings: true
    vocab_size: 50257
optimizer:
  zero_stage: 1
  accumulate_grad_in_fp32: true
  learning_rate_scheduler: {learning_rate: 3e-4}
"""


def found(*changes: tuple[str, str]) -> FoundJob:
    text = JOB
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return read_job(JobFile(name="config.yaml", text=text))


@given(job=legal_jobs("nanotron"))
@settings(max_examples=40, suppress_health_check=[*HealthCheck], deadline=None)
def test_what_is_exported_is_read_back(tmp_path: Path, job: TrainerJob) -> None:
    assume(not ADAPTERS["nanotron"].all_lacking(job))
    write_export(tmp_path, "nanotron", job)
    for name in ("nanotron.yaml", "nanotron.sh"):
        job_found = read_job(JobFile.open(tmp_path / name))
        read = completed(job_found, num_nodes=job.layout.num_nodes)
        assert read.layout == job.layout
        as_read = {"name": read.model.name, "attention": None, "attention_dropout": None}
        assert read.model == replace(job.model, **as_read)


def test_a_job_has_all_its_values() -> None:
    job = completed(found(), num_nodes=2, devices_per_node=8)
    assert job.layout == Layout(
        num_nodes=2,
        tp=2,
        pp=2,
        dp=4,
        micro_batch_size=2,
        num_microbatches=8,
        zero_stage=1,
        recompute="full",
        sequence_parallel=True,
        precision="bf16",
    )
    assert job.model == ModelShape(
        name="custom",
        family="llama",
        num_layers=12,
        hidden_size=1024,
        ffn_hidden_size=4096,
        num_heads=16,
        num_kv_heads=16,
        seq_length=2048,
        vocab_size=50432,  # a multiple of 128 * tp
        tied_embeddings=True,
        rotary_base=5e5,
    )


def test_defaults_are_those_of_nanotron() -> None:
    job = found(
        ("  pp_engine: 1f1b\n  tp_mode: REDUCE_SCATTER\n", ""),
        ("  tp_linear_async_communication: true\n  recompute_layer: true\n", ""),
        ("  dtype: bfloat16\n", ""),
        ("    is_llama_config: true\n", ""),
    )
    assumed = {each.field: each.value for each in job.assumed}
    assert {
        "schedule": "gpipe",
        "sequence_parallel": False,
        "recompute": "none",
        "precision": "bf16",
        "model.family": "llama",
    }.items() <= assumed.items()


def test_zero_over_one_replica_shards_nothing() -> None:
    assert found(("dp: 4", "dp: 1")).value("zero_stage") == 0


def test_zero_shards_over_dp_alone() -> None:
    ring = "is_llama_config: true\n    _attn_implementation: llama3_ring_attention"
    job = found(("tp: 2", "tp: 2\n  context_parallel_size: 2"), ("is_llama_config: true", ring))
    layout = completed(job, num_nodes=4, devices_per_node=8).layout
    assert (layout.zero_group_size, layout.cp_comm_type) == (4, "all_gather")


@pytest.mark.parametrize(
    ("before", "after", "field"),
    [
        ("accumulate_grad_in_fp32: true", "accumulate_grad_in_fp32: false", "precision"),
        ("dtype: bfloat16", "dtype: fp8", "precision"),
        ("tp: 2", "tp: 2\n  sequence_parallel_size: 2", "dp"),
        ("tp: 2", "tp: 2\n  context_parallel_size: 2", "cp_comm_type"),
        ("tp_mode: REDUCE_SCATTER", "tp_mode: SCATTER", "sequence_parallel"),
        ("zero_stage: 1", "zero_stage: 3", "zero_stage"),
        ("pp_engine: 1f1b", "pp_engine: dualpipe", "schedule"),
        ("is_llama_config", "is_starcoder2_config", "model.family"),
        ("is_llama_config", "is_mamba_config", "model.family"),
        ("hidden_size: 1024", "hidden_act: gelu\n    hidden_size: 1024", "model.family"),
        ("vocab_size: 50257", "vocab_size: -1", "model.vocab_size"),
        ("tp: 2", "tp: !!int '2'\n  recompute_granularity: some", "recompute"),
        ("dp: 4", "dp: !new 4", "dp"),
        ("dp: 4", "dp: 4\n  dp_engine: fsdp2", "zero_stage"),
        ("dp: 4", "dp: 4\n  pp_layer_partition: [4, 8]", "pipeline_split"),
        ("hidden_size: 1024", "hidden_size: 1024\n    head_dim: 128", "model.family"),
    ],
)
def test_what_has_no_counterpart_leaves_its_field_open(before: str, after: str, field: str) -> None:
    job = found((before, after))
    assert field in job.open_fields
    with pytest.raises(JobFileInvalidError, match=r"--set|--model"):
        completed(job, num_nodes=2, devices_per_node=8)


QWEN = """is_qwen2_config: true
    attention_bias: true
    no_rope_layer: 4
    sliding_window_size: 512
    moe_config: {num_experts: 8, top_k: 2, moe_intermediate_size: 512, enable_shared_expert: true,
      shared_expert_intermediate_size: 256, layers: [LAYERS]}"""


@pytest.mark.parametrize(("layers", "dense"), [("-1", 0), ("2,3,4,5,6,7,8,9,10,11", 2)])
def test_a_mixture_of_qwen_has_its_experts(layers: str, dense: int) -> None:
    job = found(("is_llama_config: true", QWEN.replace("LAYERS", layers)))
    model = completed(job, num_nodes=2, devices_per_node=8).model
    assert (model.num_experts, model.experts_per_token, model.moe_ffn_hidden_size) == (8, 2, 512)
    assert (model.shared_expert_ffn_hidden_size, model.num_dense_layers) == (256, dense)
    assert (model.attention_window, model.full_attention_every) == (512, 4)
    assert (model.biases, model.lacks) == ("qkv", "layers without rotary positions")


@pytest.mark.parametrize("layers", ["1,3,5,7,9,11", "0,5"])
def test_experts_are_in_the_layers_that_are_listed(layers: str) -> None:
    job = found(("is_llama_config: true", QWEN.replace("LAYERS", layers)))
    model = completed(job, num_nodes=2, devices_per_node=8).model
    has_experts = [layer for layer in range(12) if model.has_experts(layer)]
    assert has_experts == [int(each) for each in layers.split(",")]
    windows = [model.window_of(layer) for layer in range(12)]
    assert windows == [512, 512, 512, None] * 3


@pytest.mark.parametrize("layers", ["", "1,12"])
def test_ranks_of_experts_and_layers_that_are_not_there_are_open(layers: str) -> None:
    ep = ("tp: 2", "tp: 2\n  expert_parallel_size: 2")
    mixture = QWEN.replace("LAYERS", layers)
    job = found(("is_llama_config: true", mixture), ep)
    assert {"model.num_dense_layers", "ep"} <= set(job.open_fields)


def test_stages_of_different_length_are_named() -> None:
    job = found(("num_hidden_layers: 12", "num_hidden_layers: 13"))
    assert "9, 4 layers" in next(each.said for each in job.not_understood if "stages" in each.said)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("tp: 2", "tp: two", "parallelism.tp"),
        ("tp: 2", "tp: 0", "parallelism.tp"),
        ("sequence_length: 2048", "sequence_length: 2048.5", "tokens.sequence_length"),
        ("recompute_layer: true", "recompute_layer: 1", "parallelism.recompute_layer"),
        ("rope_theta: 500000.0", "rope_theta: large", "rope_theta"),
        ("tp: 2", "tp: 2\n  tp: 4", "twice"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(before: str, after: str, said: str) -> None:
    with pytest.raises(JobFileInvalidError, match=said):
        found((before, after))


def started(folder: Path, words: str) -> FoundJob | None:
    (folder / "config.yaml").write_text(JOB)
    command = ProgramCommand(
        words=tuple(Word(text=each, said=each, line=1) for each in words.split())
    )
    return read_command(command, JobFile(name="run.sh", text=words, folder=folder))


def test_the_file_of_a_command_is_read_beside_it(tmp_path: Path) -> None:
    job = started(tmp_path, "/opt/nanotron/run_train.py --config-file examples/config.yaml")
    assert job is not None
    assert (job.value("tp"), job.value("pp")) == (2, 2)
    assert not any(each.place for each in job.read)


def test_a_file_that_is_not_there_leaves_all_fields_open(tmp_path: Path) -> None:
    job = started(tmp_path, "run_train.py --config-file other.yaml")
    assert job is not None
    fields: Any = {"tp", "pp", "dp", "precision", "recompute", "zero_stage", "model.family"}
    assert fields <= set(job.open_fields)
    assert not job.assumed


def test_another_program_is_none(tmp_path: Path) -> None:
    assert started(tmp_path, "train.py --config-file config.yaml") is None


@pytest.mark.parametrize(("name", "is_known"), [("adamW", True), ("sgd", False)])
def test_another_optimizer_than_adam_is_named(name: str, is_known: bool) -> None:
    job = found(("  zero_stage: 1", f"  zero_stage: 1\n  optimizer_factory: {{name: {name}}}"))
    said = [each.said for each in job.not_understood if "Adam" in each.why]
    assert said == ([] if is_known else ["optimizer.optimizer_factory.name: sgd"])
