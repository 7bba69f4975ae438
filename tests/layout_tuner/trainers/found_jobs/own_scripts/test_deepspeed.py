"""ds_config.json: what we export is read back; what people write is read, or named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.found_jobs.completed_job import completed
from layout_tuner.trainers.found_jobs.found_job import FoundJob, JobFileInvalidError
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.read_job import read_job
from tests.exports.exported_files import exported_texts
from tests.exports.legal_jobs import legal_jobs_with_settings

MODEL = model_preset("tiny-llama")


def read(config: dict[str, Any] | str) -> FoundJob:
    text = config if isinstance(config, str) else json.dumps(config)
    return read_job(JobFile(name="ds_config.json", text=text))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(job=legal_jobs_with_settings("deepspeed"))
def test_an_exported_file_is_read_back(job: TrainerJob) -> None:
    text = exported_texts("deepspeed", job)["ds_config.json"]
    layout = job.layout
    if layout.pp == 1 or layout.recompute == "selective":
        layout = replace(layout, recompute="none")  # no key turns it on
    found = completed(
        read(text),
        model=job.model,
        num_nodes=layout.num_nodes,
        devices_per_node=job.ranks_per_node,
    )
    assert found.layout == layout
    assert not found.found.not_understood


ZERO = {"stage": 2, "overlap_comm": True}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"train_batch_size": 64}, {"micro_batch_size": 8, "num_microbatches": 1}),
        (
            {"train_batch_size": 64, "gradient_accumulation_steps": 4},
            {"micro_batch_size": 2, "num_microbatches": 4},
        ),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2},
            {"micro_batch_size": 2, "num_microbatches": 4},
        ),
        (
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            {"micro_batch_size": 2, "num_microbatches": 4},
        ),
        ({"train_micro_batch_size_per_gpu": 2}, {"micro_batch_size": 2, "num_microbatches": 1}),
        (
            {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 1,
                "train_batch_size": 999,
                "tensor_parallel": {"autotp_size": 4},
            },
            {"tp": 4, "dp": 2, "micro_batch_size": 2, "num_microbatches": 1},
        ),
        ({"train_batch_size": 8, "zero_optimization": {"stage": 3}}, {"zero_stage": 3, "dp": 8}),
        ({"train_batch_size": 8, "zero_optimization": True}, {"zero_stage": 1}),
        (
            {"train_batch_size": 8, "zero_optimization": {"stage": 3, "mics_shard_size": 2}},
            {"zero_stage": 3, "zero_replicas": 4},
        ),
        ({"train_batch_size": 8}, {"zero_stage": 0, "precision": "fp32"}),
        ({"train_batch_size": 8, "bf16": {"enabled": True}}, {"precision": "bf16"}),
        (
            {"train_batch_size": 8, "fp16": {"enabled": "auto"}, "bfloat16": {"enabled": True}},
            {"precision": "bf16"},
        ),
        (
            {"train_batch_size": 8, "fp16": {"enabled": True, "loss_scale": 0}},
            {"precision": "fp16"},
        ),
        (
            {"train_batch_size": 8, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
            {"precision": "bf16"},
        ),
        (
            {
                "train_batch_size": 8,
                "expert_parallel": {"enabled": True, "autoep_size": 4},
                "pipeline": {"stages": "auto"},
            },
            {"ep": 4, "pp": 1},
        ),
        (
            {
                "train_batch_size": 8,
                "pipeline": {"stages": 2, "activation_checkpoint_interval": 1},
            },
            {"pp": 2, "dp": 4, "recompute": "full"},
        ),
        (
            {"train_batch_size": 8, "zero_optimization": {**ZERO, "reduce_bucket_size": 1e8}},
            {"job": JobSettings({"reduce_bucket_millions": 100})},
        ),
        (
            {"train_batch_size": 8, "zero_optimization": {"stage": 2}},
            {"job": JobSettings({"overlap_comm": False})},
        ),
        ({"train_batch_size": 8, "zero_optimization": {"stage": 3}}, {"job": JobSettings()}),
    ],
)
def test_keys_are_read_with_the_defaults_of_deepspeed(
    config: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = completed(read(config), model=MODEL, num_nodes=1, devices_per_node=8)
    assert {name: getattr(found.layout, name) for name in expected} == expected
    assert not found.found.not_understood


@pytest.mark.parametrize(
    ("config", "field", "words"),
    [
        ({"train_batch_size": "auto"}, None, ""),
        ({"train_micro_batch_size_per_gpu": "auto"}, "micro_batch_size", "Trainer"),
        ({"train_batch_size": 8, "gradient_accumulation_steps": "auto"}, "num_microbatches", "Tr"),
        ({"train_batch_size": 8, "bf16": {"enabled": "auto"}}, "precision", "Trainer"),
        ({"train_batch_size": 8, "amp": {"enabled": True}}, "precision", "apex"),
        (
            {"train_batch_size": 8, "bf16": {"enabled": True}, "fp16": {"enabled": True}},
            "precision",
            "several",
        ),
        ({"train_batch_size": "8 * 4"}, "global_batch_size", "whole number"),
        ({"train_batch_size": True}, "global_batch_size", "whole number"),
        ({"train_batch_size": 8, "zero_optimization": {"stage": 4}}, "zero_stage", "0 to 3"),
        ({"train_batch_size": 8, "zero_optimization": "on"}, "zero_stage", "neither"),
        (
            {"train_batch_size": 8, "zero_optimization": {"zero_hpz_partition_size": 8}},
            "zero_replicas",
            "second copy",
        ),
        ({"train_batch_size": 8, "sequence_parallel_size": 4}, "cp", "attention"),
        (
            {"train_batch_size": 8, "seq_parallel_communication_data_type": "bf16"},
            "cp",
            "share sequences",
        ),
        ({"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}}, "global_batch_size", "tp"),
        ({"train_batch_size": 8, "tensor_parallel": {"tp": {"tp_size": 2}}}, "tp", "autotp_size"),
        ({"train_batch_size": 8, "elasticity": {"enabled": True}}, "global_batch_size", "ranks"),
        (
            {"train_batch_size": 8, "curriculum_learning": {"enabled": True}},
            "model.seq_length",
            "length",
        ),
        (
            {"train_batch_size": 8, "activation_checkpointing": {"partition_activations": True}},
            "recompute",
            "how the script",
        ),
        (
            {"train_batch_size": 8, "pipeline": {"activation_checkpoint_interval": 4}},
            "recompute",
            "several layers",
        ),
        (
            {"train_batch_size": 8, "zero_optimization": {"offload_param": {"device": "cpu"}}},
            "",
            "leave the device",
        ),
        ({"train_batch_size": 8, "optimizer": {"type": "OneBitAdam"}}, "", "Adam"),
        ({"train_batch_size": 8, "zero_optimization": {"reduce_bucket_size": 77}}, "", "millions"),
        ({"train_batch_size": 8, "hybrid_engine": {"max_out_tokens": 512}}, "", "not known here"),
    ],
)
def test_what_no_layout_says_is_named(
    config: dict[str, Any], field: str | None, words: str
) -> None:
    found = read(config)
    if field is None:
        assert not found.not_understood
        return
    (missed,) = found.not_understood
    assert missed.field == field
    assert words in missed.why
    assert missed.line is not None
    if field and not field.startswith("model."):
        with pytest.raises(JobFileInvalidError, match=field):
            completed(found, model=MODEL, num_nodes=1, devices_per_node=8)


def test_what_is_off_or_leaves_the_layout_as_it_is_is_not_listed() -> None:
    found = read(
        {
            "train_batch_size": 8,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "none", "pin_memory": True},
                "zero_hpz_partition_size": 1,
                "stage3_prefetch_bucket_size": "auto",
                "sub_group_size": 1e9,
            },
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            "amp": {"enabled": False},
            "activation_checkpointing": {"partition_activations": False},
            "gradient_clipping": 1.0,
            "steps_per_print": 10,
            "wall_clock_breakdown": False,
        }
    )
    assert found.not_understood == ()


def test_values_have_their_places() -> None:
    text = '{\n  "train_batch_size": 64, // all\n  "zero_optimization": {"stage": 3,},\n}\n'
    found = read(text)
    places = {each.field: each.place for each in found.read}
    stage, batch = places["zero_stage"], places["global_batch_size"]
    assert stage is not None
    assert batch is not None
    assert (text[stage.start : stage.end], stage.line) == ("3", 3)
    assert (text[batch.start : batch.end], batch.line) == ("64", 2)


def test_a_batch_that_its_factors_do_not_give_is_refused() -> None:
    config = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
    }
    with pytest.raises(JobFileInvalidError, match="global_batch_size=64"):
        completed(read(config), model=MODEL, num_nodes=1, devices_per_node=8)


def test_other_json_is_no_configuration_of_deepspeed() -> None:
    with pytest.raises(JobFileInvalidError, match="no job was found"):
        read({"model_type": "llama", "hidden_size": 4096})


@pytest.mark.parametrize(
    ("offloaded", "stage", "is_read"),
    [
        ({"device": "cpu"}, 2, True),
        ({"device": "cpu", "ratio": 1.0, "pin_memory": True}, 3, True),
        ({"device": "cpu", "ratio": 0.4}, 3, False),
        ({"device": "nvme", "nvme_path": "/scratch"}, 3, False),
        ({"device": "cpu"}, 0, False),
    ],
)
def test_an_optimizer_on_the_host_is_read(
    offloaded: dict[str, Any], stage: int, is_read: bool
) -> None:
    zero = {"stage": stage, "offload_optimizer": offloaded}
    found = read({"train_batch_size": 8, "zero_optimization": zero})
    assert (found.value("offload") == "optimizer") == is_read
    assert any("offload_optimizer" in each.said for each in found.not_understood) != is_read
