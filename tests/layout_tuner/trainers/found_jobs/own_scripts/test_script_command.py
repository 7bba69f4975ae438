"""Users' own scripts with DeepSpeed, Accelerate and Hugging Face's Trainer, by their commands."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.found_jobs.completed_job import completed
from layout_tuner.trainers.found_jobs.found_job import FoundJob, JobFileInvalidError, ReadValue
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.own_scripts.script_command import read_command
from layout_tuner.trainers.found_jobs.program_command import ProgramCommand, Word, options_of
from layout_tuner.trainers.found_jobs.read_job import read_job
from layout_tuner.trainers.placeholders import environment_values

MODEL = model_preset("tiny-llama")
TWO_NODES = tuple(
    ReadValue(field=name, value=value, said=f"--{name}")
    for name, value in {"num_nodes": 2, "devices_per_node": 8}.items()
)


def words(text: str) -> tuple[Word, ...]:
    """Words of a command; one with $ in it is not known."""
    found, at = [], 0
    for each in shlex.split(text):
        at = text.index(each.split()[0] if each.split() else '"', at)
        is_known = "$" not in each
        found.append(Word(text=each if is_known else None, said=each, line=1))
    return tuple(found)


def command(
    text: str,
    *,
    launcher: str = "torchrun",
    options: str = "",
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    ranks: tuple[ReadValue, ...] = TWO_NODES,
) -> FoundJob | None:
    given = ProgramCommand(
        words=words(text),
        launcher=launcher,
        launcher_options=tuple(options_of(words(options))),
        environment=environment or {},
        ranks=ranks,
    )
    return read_command(given, JobFile(name="job.sh", text=text, folder=folder))


def found(text: str, **more: Any) -> FoundJob:
    job = command(text, **more)
    assert job is not None
    return job


def layout(text: str, **more: Any) -> Layout:
    return completed(found(text, **more), model=MODEL).layout


TRAINER = "train.py --per_device_train_batch_size 2 --save_strategy no "


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", {"dp": 16, "micro_batch_size": 2, "num_microbatches": 1, "zero_stage": 0}),
        ("--gradient_accumulation_steps 4 --bf16", {"num_microbatches": 4, "precision": "bf16"}),
        ("--gradient-accumulation-steps=4 --bf16 True", {"num_microbatches": 4}),
        ("--bf16 False --fp16 True", {"precision": "fp16"}),
        ("--bf16 --tf32 True", {"precision": "bf16"}),
        ("", {"precision": "fp32", "recompute": "none"}),
        ("--gradient_checkpointing", {"recompute": "full"}),
        ("--gradient_checkpointing False", {"recompute": "none"}),
        ("--fsdp 'full_shard auto_wrap'", {"zero_stage": 3, "zero_replicas": 1}),
        ("--fsdp full_shard auto_wrap", {"zero_stage": 3}),
        ("--fsdp shard_grad_op", {"zero_stage": 2}),
        ("--fsdp no_shard", {"zero_stage": 0}),
        ("--fsdp 'hybrid_shard auto_wrap'", {"zero_stage": 3, "zero_replicas": 2}),
        (
            """--fsdp full_shard --fsdp_config '{"activation_checkpointing": true}'""",
            {"recompute": "full"},
        ),
        ("--bf16 --gradient_checkpointing_kwargs '{\"use_reentrant\": false}'", {}),
    ],
)
def test_options_of_trainer_are_read_with_its_defaults(
    options: str, expected: dict[str, Any]
) -> None:
    job = layout(TRAINER + options)
    assert {name: getattr(job, name) for name in expected} == expected
    assert found(TRAINER + options).not_understood == ()


def test_length_and_name_of_the_model_are_read() -> None:
    job = found(TRAINER + "--model_name_or_path meta-llama/Llama-3.1-8B --max_seq_length 4096")
    assert job.model_name == "meta-llama/Llama-3.1-8B"
    assert job.value("model.seq_length") == 4096
    assert job.trainer == "accelerate"


def test_options_of_data_and_logs_are_not_listed() -> None:
    job = found(
        TRAINER + "--output_dir out --logging_steps 10 --save_strategy epoch --warmup_ratio 0.03 "
        "--learning_rate 2e-5 --lr_scheduler_type cosine --dataset_name d --report_to none "
        "--per_device_eval_batch_size 4 --eval_strategy no --do_train --num_train_epochs 3 "
        "--dataloader_num_workers 4 --ddp_timeout 1800 --optim adamw_torch_fused --seed 1"
    )
    assert job.not_understood == ()


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ("--bf16 --fp16", "precision", "another type"),
        ("--bf16 $PRECISION", "precision", "not known"),
        ("--tf32 True", "precision", "TF32"),
        ("--torch_dtype bfloat16", "precision", "may train in it"),
        ("--gradient_accumulation_steps $STEPS", "num_microbatches", "not known"),
        ("--gradient_accumulation_steps many", "num_microbatches", "whole number"),
        ("--auto_find_batch_size", "micro_batch_size", "until it fits"),
        ("--fsdp half_shard", "zero_stage", "strategy"),
        ("--fsdp full_shard --fsdp_config gone.json", "recompute", "not beside"),
        ("--fsdp 'full_shard offload'", "", "leave the device"),
        ("--sequence_parallel_size 4", "cp", "not known"),
        ("--tensor-parallel-size 2", "tp", "not known"),
        ("--deepspeed gone.json", "zero_stage", "not beside"),
        ("--use_peft --lora_r 8", "", "adapters"),
        ("--load_in_4bit", "", "4 bits"),
        ("--torch_compile", "", "torch.compile"),
        ("--optim adafactor", "", "Adam"),
        ("--attn_implementation eager", "", "unfused"),
        ("--hidden_act relu", "", "not known here"),
        ("--train_batch_size 64", "", "of a rank or of all"),
        ("--use_distributed_optimizer", "zero_stage", "not known"),
        ("--fp8 True", "precision", "not known"),
        ("--data_parallel_size 4", "dp", "not known"),
        ("--pipeline_model_parallel_size 2", "pp", "not known"),
        ("--checkpoint_activations", "recompute", "not known"),
        ("--max_seq_length 2048 --max_length 1024", "model.seq_length", "the same"),
        ("--my_precision int8", "precision", "not known"),
        ("--grad_accum 4", "num_microbatches", "not known"),
        ("--use_deepspeed", "zero_stage", "not known"),
        ("--activation_memory_budget 0.5", "recompute", "not known"),
    ],
)
def test_what_no_layout_says_is_named(options: str, field: str, words: str) -> None:
    job = found(TRAINER + options)
    missed = job.not_understood[0]
    assert missed.field == field
    assert words in missed.why
    if field and not field.startswith("model."):
        with pytest.raises(JobFileInvalidError, match=field):
            completed(job, model=MODEL)


def test_options_that_are_off_leave_nothing_open() -> None:
    job = found(TRAINER + "--tp_size 1 --use_fp8 False --recompute none --eval_batch_size 4")
    assert job.not_understood == ()


DS = """{
  "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"},
  "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"
}"""


def test_trainer_fills_what_is_auto_in_the_file_of_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(DS)
    text = TRAINER + "--gradient_accumulation_steps 4 --bf16 --deepspeed configs/ds.json"
    job = layout(text, launcher="deepspeed", folder=tmp_path)
    assert (job.zero_stage, job.micro_batch_size, job.num_microbatches) == (3, 2, 4)
    assert (job.precision, job.dp) == ("bf16", 16)
    assert found(text, launcher="deepspeed", folder=tmp_path).trainer == "deepspeed"
    without = layout(TRAINER + "--deepspeed ds.json", folder=tmp_path)
    assert (without.precision, without.num_microbatches) == ("fp32", 1)


def test_a_file_that_contradicts_the_command_is_named(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 4, "fp16": {"enabled": true}}'
    )
    job = found(TRAINER + "--bf16 --deepspeed ds.json", folder=tmp_path)
    assert {each.field for each in job.not_understood} == {"micro_batch_size", "precision"}


def test_the_file_of_an_unknown_folder_is_looked_for_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text('{"train_batch_size": 32}')
    text = 'my_train.py --deepspeed --deepspeed_config "$HERE/ds_config.json" --tokens data'
    job = found(text, folder=tmp_path)
    assert completed(job, model=MODEL).layout.micro_batch_size == 2
    assert [each.said for each in job.not_understood] == []


def test_an_own_script_without_a_micro_batch_is_asked_for_it() -> None:
    job = found("my_train.py --zero_stage 2 --precision fp32", launcher="deepspeed")
    assert job.value("zero_stage") == 2
    assert [each.field for each in job.not_understood] == ["precision"]
    job = job.with_stated({"precision": "bf16"})
    with pytest.raises(JobFileInvalidError, match="micro_batch_size"):
        completed(job, model=MODEL)


def test_scripts_that_take_over_an_option_have_no_defaults_of_trainer() -> None:
    job = found("grpo.py --per_device_train_batch_size 1 --num_nodes 4 --gpus 8", ranks=())
    open_fields = {each.field for each in job.not_understood if each.field}
    assert open_fields == {"num_nodes", "num_devices", "zero_stage", "precision"}


def test_a_file_of_deepspeed_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "stage3.conf").write_text('{"zero_optimization": {"stage": 3}}')
    job = found(TRAINER + "--bf16 --deepspeed configs/stage3.conf", folder=tmp_path)
    assert (job.value("zero_stage"), job.not_understood) == (3, ())


def test_a_script_that_builds_its_engine_has_no_defaults_of_trainer() -> None:
    text = "main.py --per_device_train_batch_size 8 --zero_stage 3 --deepspeed --lora_dim 0"
    job = found(text, launcher="deepspeed")
    assert (job.value("zero_stage"), job.value("micro_batch_size")) == (3, 8)
    assert [each.field for each in job.not_understood] == ["precision"]


def test_the_options_of_accelerate_launch_beat_its_file(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(
        yaml.safe_dump(
            {
                "distributed_type": "FSDP",
                "num_machines": 1,
                "num_processes": 8,
                "mixed_precision": "fp16",
                "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"},
            }
        )
    )
    options = "--config_file fsdp.yaml --num_processes 16 --num_machines 2 --mixed_precision bf16"
    job = layout(TRAINER, launcher="accelerate", options=options, folder=tmp_path, ranks=())
    assert (job.zero_stage, job.dp, job.num_nodes, job.precision) == (3, 16, 2, "bf16")


def test_accelerate_launch_without_a_file() -> None:
    options = "--use_deepspeed --zero_stage 3 --num_processes 8 --gradient_accumulation_steps 2"
    job = layout(
        "train.py --per_gpu_train_batch_size 1 --bf16",
        launcher="accelerate",
        options=options,
        ranks=(),
    )
    assert (job.zero_stage, job.dp, job.num_microbatches) == (3, 8, 2)


def test_a_file_of_accelerate_that_is_not_there_is_named() -> None:
    job = found(TRAINER, launcher="accelerate", options="--config_file gone.yaml")
    assert {each.field for each in job.not_understood} == {"zero_stage", "precision"}


def test_a_launcher_whose_file_is_not_named_leaves_the_kind_open() -> None:
    job = found(TRAINER + "--bf16", launcher="accelerate", options="--num_processes 8")
    assert [each.field for each in job.not_understood] == ["zero_stage"]


@pytest.mark.parametrize("words", ["train.py sft.yaml --bf16", "train.py --bf16 --config sft.yaml"])
def test_a_file_of_arguments_leaves_open_what_it_may_set(words: str, tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("gradient_accumulation_steps: 8\n")
    job = found(words, launcher="accelerate", options="--multi_gpu", folder=tmp_path)
    open_fields = {each.field for each in job.not_understood if each.field}
    assert open_fields == {"micro_batch_size", "num_microbatches", "recompute"}


@pytest.mark.parametrize("option", ["--finetuning_type full", "--cutoff_len 2048", "--packing"])
def test_programs_on_top_of_trainer_do_not_have_its_defaults(option: str) -> None:
    job = found(f"{TRAINER} --do_train {option}")
    assert {"zero_stage", "precision", "recompute"} <= {*job.open_fields}


@pytest.mark.parametrize(
    "text",
    [
        "stage: sft\nfinetuning_type: full\nper_device_train_batch_size: 1\nbf16: true\n",
        "base_model: m\nmicro_batch_size: 4\nsequence_len: 8192\nbf16: auto\n",
    ],
)
def test_yaml_of_arguments_is_no_job(text: str) -> None:
    with pytest.raises(JobFileInvalidError, match="no job was found"):
        read_job(JobFile(name="full.yaml", text=text))


@pytest.mark.parametrize("launcher", ["", "torchrun"])
def test_other_programs_are_left_to_other_readers(launcher: str) -> None:
    assert command("serve.py --port 80", launcher=launcher) is None
    megatron = (
        "pretrain_gpt.py --tensor-model-parallel-size 2 --num-attention-heads 8 "
        "--micro-batch-size 1"
    )
    assert command(megatron, launcher=launcher) is None


def test_the_variables_of_an_export_give_model_and_layout() -> None:
    job = TrainerJob(model=MODEL, layout=Layout(tp=2, dp=4, zero_stage=1, precision="bf16"))
    read = found("train.py --tp $LAYOUT_TP", environment=environment_values(job), ranks=())
    whole = completed(read)
    assert (whole.model, whole.layout, read.trainer) == (MODEL, job.layout, "command")


def test_a_command_with_our_job_file_is_that_job(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(
        '{"format": "layout-tuner/trainer", "version": 1, "layout": {"dp": 16}}'
    )
    job = found("train.py $HERE/job.json", folder=tmp_path)
    assert (job.file, job.trainer, job.value("dp")) == ("job.sh", "embedded", 16)
    assert all(each.place is None for each in job.read)
