"""Accelerate's YAML: what we export is read back; what people write is read, or named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.accelerate import ACCELERATE, accelerate_backend
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.found_jobs.completed_job import completed
from layout_tuner.trainers.found_jobs.found_job import FoundJob, JobFileInvalidError
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.read_job import read_job
from tests.exports.exported_files import exported_texts
from tests.exports.legal_jobs import legal_jobs

MODEL = model_preset("tiny-llama")
BATCH = {"micro_batch_size": 1, "num_microbatches": 2}
BASE = {
    "compute_environment": "LOCAL_MACHINE",
    "num_machines": 2,
    "num_processes": 16,
    "mixed_precision": "bf16",
    "machine_rank": 0,
    "rdzv_backend": "static",
    "tpu_env": [],
    "use_cpu": False,
    "downcast_bf16": "no",
}


def read(config: dict[str, Any] | str, folder: Path | None = None) -> FoundJob:
    text = config if isinstance(config, str) else yaml.safe_dump(config)
    return read_job(JobFile(name="accelerate.yaml", text=text, folder=folder))


def file(kind: str, **sections: Any) -> dict[str, Any]:
    return {**BASE, "distributed_type": kind, **sections}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(job=legal_jobs("accelerate"))
def test_an_exported_file_is_read_back(job: TrainerJob) -> None:
    without = ACCELERATE.all_lacking(job)
    text = exported_texts("accelerate", job, without=without)["accelerate.yaml"]
    expected, stated = job.layout, {"micro_batch_size": job.layout.micro_batch_size}
    kind = accelerate_backend(job.layout)
    if kind == "MEGATRON_LM":  # what the adapter says that a job without these knobs has
        comm = "p2p" if job.layout.cp > 1 else "all_gather"
        expected = replace(expected, recompute="full", cp_comm_type=comm)
    elif kind != "DEEPSPEED":  # the script exports it as a variable
        stated["num_microbatches"] = job.layout.num_microbatches
    found = read(text)
    assert completed(found.with_stated(stated), model=job.model).layout == expected
    compiled = ["dynamo_config.dynamo_backend: INDUCTOR"] if job.compile else []
    assert [each.said for each in found.not_understood] == compiled


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (file("MULTI_GPU"), {"dp": 16, "num_nodes": 2, "zero_stage": 0, "precision": "bf16"}),
        (file("NO", num_processes=1, num_machines=1), {"dp": 1, "num_nodes": 1}),
        (file("MULTI_GPU", mixed_precision="no"), {"precision": "fp32"}),
        (
            file("MULTI_GPU", mixed_precision="fp8", fp8_config={"backend": "TE"}),
            {"precision": "fp8"},
        ),
        (
            file("NO", mixed_precision="fp8", fp8_config={"use_mxfp8_block_scaling": True}),
            {"precision": "mxfp8"},
        ),
        (file("MULTI_GPU", mixed_precision=False), {"precision": "fp32"}),
        (file("FSDP", fsdp_config={"fsdp_sharding_strategy": 1}), {"zero_stage": 3}),
        (
            file("FSDP", fsdp_config={"fsdp_sharding_strategy": "SHARD_GRAD_OP"}),
            {"zero_stage": 2, "zero_replicas": 1},
        ),
        (file("FSDP", fsdp_config={"fsdp_sharding_strategy": "NO_SHARD"}), {"zero_stage": 0}),
        (
            file("FSDP", fsdp_config={"fsdp_sharding_strategy": "HYBRID_SHARD"}),
            {"zero_stage": 3, "zero_replicas": 2},
        ),
        (
            file("FSDP", fsdp_config={"fsdp_sharding_strategy": 5}),
            {"zero_stage": 2, "zero_replicas": 2},
        ),
        (file("FSDP", fsdp_config={}), {"zero_stage": 3, "recompute": "none"}),
        (
            file(
                "FSDP",
                fsdp_config={
                    "fsdp_version": 2,
                    "fsdp_reshard_after_forward": False,
                    "fsdp_activation_checkpointing": True,
                },
            ),
            {"zero_stage": 2, "recompute": "full"},
        ),
        (
            file("FSDP", fsdp_config={"fsdp_version": 2, "reshard_after_forward": "FULL_SHARD"}),
            {"zero_stage": 3},
        ),
        (
            file(
                "FSDP",
                fsdp_config={"fsdp_version": 2},
                parallelism_config={
                    "parallelism_config_dp_replicate_size": 2,
                    "parallelism_config_dp_shard_size": 2,
                    "parallelism_config_tp_size": 2,
                    "parallelism_config_cp_size": 2,
                    "parallelism_config_cp_comm_strategy": "alltoall",
                },
            ),
            {"dp": 4, "tp": 2, "cp": 2, "cp_comm_type": "p2p", "zero_replicas": 2},
        ),
        (
            file(
                "DEEPSPEED",
                deepspeed_config={
                    "zero_stage": 3,
                    "gradient_accumulation_steps": 4,
                    "offload_optimizer_device": "none",
                    "zero3_init_flag": True,
                    "deepspeed_multinode_launcher": "standard",
                },
            ),
            {"zero_stage": 3, "num_microbatches": 4},
        ),
        (file("DEEPSPEED", deepspeed_config={}), {"zero_stage": 2}),
        (
            file(
                "MEGATRON_LM",
                megatron_lm_config={
                    "megatron_lm_tp_degree": 4,
                    "megatron_lm_pp_degree": 2,
                    "megatron_lm_num_micro_batches": 8,
                    "megatron_lm_recompute_activations": True,
                    "megatron_lm_sequence_parallelism": True,
                    "megatron_lm_use_distributed_optimizer": True,
                    "megatron_lm_context_parallel_size": 1,
                    "megatron_lm_gradient_clipping": 1.0,
                },
            ),
            {
                "tp": 4,
                "pp": 2,
                "dp": 2,
                "num_microbatches": 8,
                "recompute": "selective",
                "sequence_parallel": True,
                "zero_stage": 1,
            },
        ),
    ],
)
def test_kinds_of_jobs_are_read_with_the_defaults_of_accelerate(
    config: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = read(config)
    stated = {name: each for name, each in BATCH.items() if found.value(name) is None}
    layout = completed(found.with_stated(stated), model=MODEL).layout
    assert {name: getattr(layout, name) for name in expected} == expected
    assert found.not_understood == ()


@pytest.mark.parametrize(
    ("config", "field", "words"),
    [
        (file("XLA"), "zero_stage", "kind of job"),
        (file("FSDP", fsdp_config={"fsdp_sharding_strategy": "HALF"}), "zero_stage", "strategy"),
        (
            file(
                "FSDP", fsdp_config={"fsdp_version": 2, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}
            ),
            "zero_stage",
            "does not read it",
        ),
        (
            file("FSDP", fsdp_config={"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}),
            "zero_stage",
            "FULL_SHARD by default",
        ),
        (file("FSDP", fsdp_config={"fsdp_version": 3}), "zero_stage", "versions 1 and 2"),
        (file("FSDP", fsdp_config={"fsdp_offload_params": True}), "", "leave the device"),
        (
            file("FSDP", parallelism_config={"parallelism_config_sp_size": 4}),
            "cp",
            "attention",
        ),
        (
            file("DEEPSPEED", deepspeed_config={"deepspeed_config_file": "/elsewhere/ds.json"}),
            "zero_stage",
            "not beside it",
        ),
        (
            file("DEEPSPEED", deepspeed_config={"offload_param_device": "cpu"}),
            "",
            "leave the device",
        ),
        (
            file(
                "MEGATRON_LM",
                megatron_lm_config={"megatron_lm_recompute_granularity": "full"},
            ),
            "cp",
            "1.15",
        ),
        (
            file("MEGATRON_LM", megatron_lm_config={"megatron_lm_context_parallel_size": 1}),
            "recompute",
            "1.15",
        ),
        (
            file("DEEPSPEED", parallelism_config={"parallelism_config_sp_size": 2}),
            "cp",
            "the script's",
        ),
        (
            file("MULTI_GPU", parallelism_config={"parallelism_config_tp_size": 2}),
            "tp",
            "the script's",
        ),
        (
            file("DEEPSPEED", deepspeed_config={"seq_parallel_communication_data_type": "bf16"}),
            "cp",
            "share sequences",
        ),
        (file("MULTI_GPU", mixed_precision="int4"), "precision", "none of"),
        (file("MULTI_GPU", num_processes="all"), "num_devices", "whole number"),
        (file("MULTI_GPU", speed="high"), "", "not known here"),
        (file("MULTI_GPU", dynamo_config={"dynamo_backend": "INDUCTOR"}), "", "torch.compile"),
    ],
)
def test_what_no_layout_says_is_named(config: dict[str, Any], field: str, words: str) -> None:
    found = read(config)
    (missed,) = found.not_understood
    assert missed.field == field
    assert words in missed.why
    if field:
        with pytest.raises(JobFileInvalidError, match=field):
            completed(found, model=MODEL)


def test_the_file_of_deepspeed_beside_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"},'
        ' "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 4}'
    )
    section = {"deepspeed_config_file": "configs/ds.json", "zero3_init_flag": True}
    found = read(file("DEEPSPEED", deepspeed_config=section), tmp_path)
    layout = completed(found.with_stated({"micro_batch_size": 2}), model=MODEL).layout
    assert (layout.zero_stage, layout.num_microbatches, layout.precision) == (3, 4, "bf16")
    (stage,) = [each for each in found.read if each.field == "zero_stage"]
    assert (stage.said, stage.place) == ("ds.json: zero_optimization.stage: 3", None)


def test_jobs_of_sagemaker_are_refused() -> None:
    with pytest.raises(JobFileInvalidError, match="SageMaker"):
        read({**BASE, "compute_environment": "AMAZON_SAGEMAKER"})


def test_ranks_are_those_of_all_machines_and_scale_with_the_nodes() -> None:
    found = read(file("MULTI_GPU")).with_stated(BATCH)
    assert completed(found, model=MODEL).layout.dp == 16
    assert completed(found, model=MODEL, num_nodes=4).layout.dp == 32


def test_copies_of_hybrid_sharding_scale_with_the_nodes() -> None:
    config = file("FSDP", fsdp_config={"fsdp_sharding_strategy": "HYBRID_SHARD"})
    found = read(config).with_stated(BATCH)
    nodes = {n: completed(found, model=MODEL, num_nodes=n).layout.zero_replicas for n in (1, 2, 4)}
    assert nodes == {1: 1, 2: 2, 4: 4}


def test_accumulation_that_a_script_fills_in_is_open() -> None:
    section = {"zero_stage": 3, "gradient_accumulation_steps": "auto"}
    found = read(file("DEEPSPEED", deepspeed_config=section))
    assert found.open_fields["num_microbatches"].why == "the script fills it in"


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_an_optimizer_on_the_host_is_read(device: str) -> None:
    found = read(file("DEEPSPEED", deepspeed_config={"offload_optimizer_device": device}))
    assert (found.value("offload") == "optimizer") == (device == "cpu")
    assert any("offload_opt" in each.said for each in found.not_understood) == (device == "nvme")
