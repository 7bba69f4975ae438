"""Jobs of Megatron-DeepSpeed: its options, and the configuration of DeepSpeed beside them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.found_jobs.completed_job import completed
from layout_tuner.trainers.found_jobs.found_job import FoundJob
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.knob_settings import settings_in_effect
from layout_tuner.trainers.found_jobs.megatron.megatron_jobs import read_command
from layout_tuner.trainers.found_jobs.program_command import ProgramCommand
from layout_tuner.trainers.megatron_deepspeed import MEGATRON_DEEPSPEED
from tests.exports.legal_jobs import legal_jobs
from tests.layout_tuner.trainers.found_jobs.megatron.command_lines import GPT, open_of, words_of

OPTIONS: Final = (
    f"{GPT} --micro-batch-size 2 --global-batch-size 64 --deepspeed --zero-stage 1 "
    "--tensor-model-parallel-size 2"
)
BESIDE: Final = f"{OPTIONS} --deepspeed_config=./conf/ds_config.json"


def found(options: str, config: Any = None, **more: Any) -> FoundJob:
    written = {} if config is None else {"ds_config.json": config}
    file = JobFile(name="job.sh", text=options, written=written)
    job = read_command(ProgramCommand(words=words_of(f"pretrain_gpt.py {options}"), **more), file)
    assert job is not None
    return job


def configured(options: str = BESIDE, **values: Any) -> FoundJob:
    return found(options, json.dumps(values))


@st.composite
def jobs_with_settings(draw: Callable[[st.SearchStrategy[Any]], Any]) -> TrainerJob:
    job = draw(legal_jobs("megatron-deepspeed"))
    knobs = MEGATRON_DEEPSPEED.knobs
    chosen = {each.knob.name: draw(st.sampled_from(each.knob.every_value)) for each in knobs}
    chosen = {name: value for name, value in chosen.items() if value is not True and value != 500}
    kept = settings_in_effect(chosen, knobs, job.layout, job.model)
    return replace(job, layout=replace(job.layout, job=kept))


@settings(max_examples=100, deadline=None)
@given(job=jobs_with_settings())
def test_what_is_exported_for_megatron_deepspeed_is_read_back(job: TrainerJob) -> None:
    options = shlex.join(MEGATRON_DEEPSPEED.arguments(job))
    config = json.dumps(MEGATRON_DEEPSPEED.values(job))
    read = found(f"{options} --deepspeed_config $HERE/ds_config.json", config)
    done = completed(read, num_nodes=job.layout.num_nodes, devices_per_node=job.ranks_per_node)
    assert read.trainer == "megatron-deepspeed"
    assert done.layout == job.layout
    fused = "--use-flash-attn-v2" in options
    expected = replace(job.model, name="custom", attention="fused" if fused else "unfused")
    dropout = job.model.attention_dropout or None
    assert done.model == replace(expected, attention_dropout=dropout)


def test_the_stage_of_the_file_counts_over_that_of_the_option() -> None:
    job = configured(zero_optimization={"stage": 2}, bf16={"enabled": True})
    assert (job.value("zero_stage"), job.value("precision")) == (2, "bf16")
    (read,) = [each for each in job.read if each.field == "zero_stage"]
    assert read.said == "ds_config.json: zero_optimization.stage: 2"
    assert read.place is None  # places are those of the script
    assert "zero_stage" in open_of(configured(zero_optimization={"stage": 5}))
    assert "zero_stage" in open_of(configured(train_batch_size=64))
    assert found(OPTIONS).value("zero_stage") == 1


def test_a_file_that_is_not_there_is_listed_and_opens_what_it_alone_says() -> None:
    assert open_of(found(BESIDE)) == {""}
    assert "zero_stage" in open_of(found(BESIDE.replace("--zero-stage 1", "")))


def test_a_batch_that_contradicts_the_options_is_open() -> None:
    assert "global_batch_size" in open_of(configured(train_batch_size=128))
    assert not configured(train_batch_size=64, zero_optimization={"stage": 1}).not_understood
    options = BESIDE.replace("--global-batch-size 64", "")
    assert configured(options, train_batch_size=32).value("global_batch_size") == 32


def test_a_stage_that_depends_on_the_run_is_open() -> None:
    job = configured(zero_optimization={"stage": "$STAGE"})
    (missed,) = job.not_understood
    assert (missed.field, missed.why) == ("zero_stage", "its variable is not known")


def test_settings_of_the_engine_are_read_from_its_file() -> None:
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 1e8}
    job = configured(zero_optimization=zero)
    assert job.value("job.reduce_bucket_millions") == 100
    assert job.value("job.overlap_comm") is None
    absent = configured(zero_optimization={"stage": 2})
    assert absent.value("job.overlap_comm") is False
    offload = configured(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})
    assert offload.value("offload") == "optimizer"
    nvme = configured(zero_optimization={"stage": 2, "offload_optimizer": {"device": "nvme"}})
    assert any("offload_optimizer.device" in each.said for each in nvme.not_understood)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ("--ds-sequence-parallel-size 4", {"cp": 4, "cp_comm_type": "a2a"}),
        ("--checkpoint-activations --deepspeed-activation-checkpointing", {"recompute": "full"}),
        ("--use-flash-attn-v2", {"model.attention": "fused"}),
        ("", {"model.attention": "unfused", "model.num_kv_heads": 16, "vpp": None}),
        ("--num-key-value-heads 4", {"model.num_kv_heads": 4}),
        (
            "--use-rotary-position-embeddings --swiglu --normalization rmsnorm "
            "--rotary-position-embeddings-theta 500000",
            {"model.family": "llama", "model.rotary_base": 500_000},
        ),
    ],
)
def test_its_own_options_are_read(options: str, fields: dict[str, Any]) -> None:
    job = found(f"{OPTIONS} {options}")
    assert {name: job.value(name) for name in fields} == fields


def test_its_experts_are_read_and_their_places_are_named() -> None:
    job = found(
        f"{OPTIONS} --swiglu --num-experts 8 --topk 2 --expert-interval 1 "
        "--moe-expert-parallel-size 4 --enable-expert-tensor-parallelism"
    )
    assert (job.value("ep"), job.value("etp"), job.value("model.experts_per_token")) == (4, 2, 2)
    assert job.value("model.experts_every") is None, "experts in every layer"
    default = found(f"{OPTIONS} --swiglu --num-experts 8")
    assert default.value("model.experts_every") == 2
    assert (default.value("etp"), default.value("model.experts_per_token")) == (1, 1)
    assert "model.num_experts" in open_of(found(f"{OPTIONS} --swiglu --num-experts 64 128"))
    dense = found(f"{OPTIONS} --num-experts 1")
    assert dense.value("model.num_experts") is None


@pytest.mark.parametrize(
    "options",
    ["--curriculum-learning", "--cpu-optimizer", "--random-ltd", "--remote-device cpu"],
)
def test_what_has_no_counterpart_is_listed(options: str) -> None:
    assert [each.said for each in found(f"{OPTIONS} {options}").not_understood] == [options]


def test_the_launcher_of_deepspeed_tells_the_trainer() -> None:
    job = found(f"{GPT} --micro-batch-size 1", launcher="deepspeed")
    assert job.trainer == "megatron-deepspeed"
    assert job.value("zero_stage") == 1  # its own default
