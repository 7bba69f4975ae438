"""Values of wrong types in files of known formats are named or refused, whatever they are."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.found_jobs.completed_job import completed
from layout_tuner.trainers.found_jobs.found_job import JobFileInvalidError, job_lines
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.read_job import read_job

FORMATS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "deepspeed": (
        "ds.json",
        {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {
                "stage": 2,
                "overlap_comm": True,
                "reduce_bucket_size": 5e8,
                "mics_shard_size": -1,
                "zero_hpz_partition_size": 1,
                "offload_param": {"device": "none"},
            },
            "bf16": {"enabled": True},
            "tensor_parallel": {"autotp_size": 1},
            "expert_parallel": {"enabled": False, "autoep_size": 1},
            "pipeline": {"stages": 1, "activation_checkpoint_interval": 0},
            "activation_checkpointing": {"partition_activations": False},
            "optimizer": {"type": "Adam"},
        },
    ),
    "accelerate": (
        "accelerate.json",
        {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "FSDP",
            "num_machines": 1,
            "num_processes": 8,
            "mixed_precision": "bf16",
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_sharding_strategy": "FULL_SHARD",
                "fsdp_reshard_after_forward": True,
                "fsdp_activation_checkpointing": True,
            },
            "parallelism_config": {"parallelism_config_cp_size": 2},
            "dynamo_config": {"dynamo_backend": "NO"},
        },
    ),
    "megatron": (
        "accelerate.yaml",
        {
            "distributed_type": "MEGATRON_LM",
            "num_processes": 8,
            "megatron_lm_config": {
                "megatron_lm_tp_degree": 2,
                "megatron_lm_recompute_granularity": "full",
                "megatron_lm_recompute_method": "uniform",
                "megatron_lm_sequence_parallelism": True,
                "megatron_lm_context_parallel_size": 1,
                "megatron_lm_use_distributed_optimizer": True,
            },
        },
    ),
    "embedded": (
        "job.json",
        {
            "format": "layout-tuner/trainer",
            "version": 1,
            "model": model_preset("tiny-llama").to_mapping(),
            "layout": {"dp": 2, "tp": 1, "job": {"threads": 1}},
            "compile": False,
        },
    ),
}
ODD: Final = (None, True, 0, -1, 2.5, 1e308, 10**40, "", "auto", "x y", [], [1, "a"], {}, {"a": 1})


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_value_of_a_wrong_type_ends_in_a_sentence(name: str, data: st.DataObject) -> None:
    file, document = FORMATS[name]
    document = json.loads(json.dumps(document))
    for _ in range(data.draw(st.integers(1, 3))):
        section = document
        key = data.draw(st.sampled_from(sorted(section)))
        if isinstance(section[key], dict) and section[key] and data.draw(st.booleans()):
            section = section[key]
            key = data.draw(st.sampled_from(sorted(section)))
        section[key] = json.loads(json.dumps(data.draw(st.sampled_from(ODD))))
    with suppress(JobFileInvalidError):
        found = read_job(JobFile(name=file, text=json.dumps(document)))
        assert [*job_lines(found)]
        stated = {"micro_batch_size": 1, "num_microbatches": 2}
        missing = {key: each for key, each in stated.items() if found.value(key) is None}
        model = model_preset("tiny-llama")
        completed(found.with_stated(missing), model=model, num_nodes=1, devices_per_node=8)
