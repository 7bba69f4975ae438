"""Entries of trainers files that probe found jobs: their own commands, with placeholders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.errors import SearchSpaceError
from layout_tuner.predictions.job_plan import JobAsked, job_campaign, probe_entry_of
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.found_jobs.completed_job import CompletedJob
from layout_tuner.trainers.found_jobs.found_job import Findings, JobFileInvalidError, LaunchCommand
from layout_tuner.trainers.found_jobs.probing.probe_entry import ProbeEntry, probe_entry
from layout_tuner.trainers.placeholders import filled, placeholder_values
from layout_tuner.trainers.program import ProgramTrainer

MODEL = replace(model_preset("small-llama"), seq_length=64)
LAYOUT = Layout(
    tp=2,
    pp=2,
    dp=2,
    micro_batch_size=2,
    num_microbatches=4,
    zero_stage=1,
    sequence_parallel=True,
    precision="bf16",
)
MEGATRON = (
    *("pretrain_gpt.py", "--tensor-model-parallel-size", "2"),
    *("--pipeline-model-parallel-size=2", "--sequence-parallel", "--micro-batch-size", "2"),
    *("--global-batch-size", "16", "--bf16", "--use-distributed-optimizer", "--num-layers", "8"),
    *("--data-path", "1.0", "/data/a", "--tokenizer-model", "/data/t", "--lr", "1e-4"),
    *("--train-iters", "5000", "--lr-warmup-iters", "100", "--split", "99,1,0"),
    *("--save", "/ckpt", "--load", "/ckpt", "--eval-iters", "7", "--wandb-project", "mine"),
)
SAID = {
    "tp": "--tensor-model-parallel-size 2",
    "pp": "--pipeline-model-parallel-size=2",
    "sequence_parallel": "--sequence-parallel",
    "micro_batch_size": "--micro-batch-size 2",
    "global_batch_size": "--global-batch-size 16",
    "precision": "--bf16",
    "zero_stage": "--use-distributed-optimizer",
    "model.num_layers": "--num-layers 8",
}


def job(
    trainer: str, said: Mapping[str, str], words: tuple[str, ...], **about: Any
) -> CompletedJob:
    findings = Findings()
    for name, text in said.items():
        findings.note(name, None, text)
    command = LaunchCommand(words=words, **about) if words else None
    found = findings.job(file="job.sh", format="megatron-lm", trainer=trainer, command=command)
    return CompletedJob(found=found, model=MODEL, layout=LAYOUT)


def unreadable(path: Path) -> Mapping[str, Any]:
    raise JobFileInvalidError(f"{path.name} cannot be read")


def entry_of(found: CompletedJob, read: Any = unreadable) -> ProbeEntry:
    entry = probe_entry(found, Path("/jobs/job.sh"), read)
    assert isinstance(entry, ProbeEntry), entry
    # A worker reads it.
    ProgramTrainer.from_mapping(entry.entry)
    return entry


def command_of(found: CompletedJob) -> list[str]:
    return list(entry_of(found).entry["command"])


def test_flags_of_the_layout_give_way_to_one_item_and_the_rest_stays() -> None:
    assert command_of(job("megatron-lm", SAID, MEGATRON)) == [
        *("python", "pretrain_gpt.py", "--num-layers={num_layers}"),
        *("--data-path", "1.0", "/data/a", "--tokenizer-model", "/data/t", "--lr", "1e-4"),
        *("--lr-warmup-iters", "100", "--split", "99,1,0", "{layout_arguments}"),
        *("--lr-decay-iters=5000", "--train-iters={steps}", "--eval-iters=0", "--log-interval=1"),
    ]


def test_a_job_counted_in_samples_runs_steps_of_its_whole_batch() -> None:
    words = (
        *("pretrain_gpt.py", "--train-samples", "300000", "--lr-decay-samples", "200000"),
        *("--lr-warmup-samples", "4000", "--rampup-batch-size", "8", "8", "1000", "--lr", "1e-4"),
    )
    assert command_of(job("megatron-lm", {}, words)) == [
        *("python", "pretrain_gpt.py", "--lr", "1e-4", "{layout_arguments}"),
        *("--train-iters={steps}", "--eval-iters=0", "--log-interval=1"),
    ]


def test_the_item_has_all_that_was_taken_out() -> None:
    found = job("megatron-lm", SAID, MEGATRON)
    trainer = ProgramTrainer.from_mapping(entry_of(found).entry)
    words = trainer.of.placement_arguments(TrainerJob(model=MODEL, layout=LAYOUT))
    joined = " ".join(words)
    for text in SAID.values():
        if text != SAID["model.num_layers"]:
            assert text.replace("=", " ") in joined


def test_braces_of_a_script_are_no_placeholders() -> None:
    texts = {"LOG_FORMAT": "{rank} {time} ${HOME} {brace}", "KEYS": '{"a": {tp}}'}
    words = ("train.py", "--name", "{job_name}", "--tag={tp}")
    found = job("deepspeed", {}, words, environment=texts, container=("run", "--as={user}"))
    entry = entry_of(found).entry
    values = placeholder_values(TrainerJob(model=MODEL, layout=LAYOUT))
    written = [*entry["command"], *entry["container"], *entry["environment"].values()]
    assert [filled(each, values) for each in written] == [
        *("python", *words, "run", "--as={user}", *texts.values())
    ]


def test_what_was_replaced_left_out_and_is_to_be_checked_is_said() -> None:
    said = " ".join(entry_of(job("megatron-lm", SAID, MEGATRON)).remarks)
    for words in ("--tensor-model-parallel-size", "--save", "--load", "--wandb-project", "version"):
        assert words in said
    assert "--data-path" not in said


def test_container_and_environment_stay_but_for_the_variables_of_a_worker() -> None:
    container = ("apptainer", "exec", "--nv", "/images/train.sif")
    environment = {"MASTER_ADDR": "n1", "CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "WARN"}
    about = {"container": container, "environment": environment, "working_directory": "/src"}
    entry = entry_of(job("megatron-lm", SAID, MEGATRON, **about)).entry
    assert entry["container"] == list(container)
    assert entry["environment"] == {"NCCL_DEBUG": "WARN"}
    assert entry["working_directory"] == "/src"
    assert entry_of(job("megatron-lm", SAID, MEGATRON)).entry["working_directory"] == "/jobs"


def test_a_variable_that_some_layouts_refuse_is_named() -> None:
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    entry = entry_of(job("megatron-lm", SAID, MEGATRON, environment=environment))
    assert entry.entry["environment"] == environment
    assert any("Megatron-FSDP, which is zero_stage 2 and 3" in each for each in entry.remarks)


def test_words_that_are_not_known_stay_and_are_named() -> None:
    words = (*MEGATRON, "--tokenizer-type", "$KIND")
    entry = entry_of(job("megatron-lm", SAID, words, unknown=("$KIND",)))
    assert "$KIND" in entry.entry["command"]
    assert any("$KIND in the command are not known" in each for each in entry.remarks)


def test_the_environment_of_the_script_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(
        "module load rocm/6.3  # the newest\nsource /venv/bin/activate\necho module load x\n"
    )
    entry = probe_entry(job("megatron-lm", SAID, MEGATRON), path, unreadable)
    assert isinstance(entry, ProbeEntry)
    [said] = [each for each in entry.remarks if each.startswith("start the worker in")]
    assert "module load rocm/6.3" in said
    assert "source /venv/bin/activate" in said
    assert "module load x" not in said
    assert "newest" not in said


def test_the_embedded_trainer_needs_no_entry() -> None:
    answer = probe_entry(job("embedded", {}, ()), Path("/jobs/job.json"), unreadable)
    assert answer == "every worker has the embedded trainer, which needs none"


def test_a_job_of_bridge_has_overrides_of_its_keys() -> None:
    said = {
        "tp": "model.tensor_model_parallel_size=2",
        "micro_batch_size": "train.micro_batch_size=2",
    }
    words = (
        *("run_recipe.py", "--recipe", "llama32_1b_pretrain_config"),
        *("model.tensor_model_parallel_size=2", "train.micro_batch_size=2", "train.train_iters=9"),
        *("checkpoint.save=/ckpt", "optimizer.lr=1e-4"),
    )
    assert command_of(job("megatron-bridge", said, words)) == [
        *("python", "run_recipe.py", "--recipe", "llama32_1b_pretrain_config", "optimizer.lr=1e-4"),
        *("{layout_arguments}", "scheduler.lr_decay_iters=9", "train.train_iters={steps}"),
        *(
            "checkpoint.save=null",
            "checkpoint.load=null",
            "train.eval_iters=0",
            "logger.log_interval=1",
        ),
    ]


def test_options_of_a_trainer_without_the_item_have_placeholders_of_their_own() -> None:
    said = {
        "micro_batch_size": "--per_device_train_batch_size 2",
        "precision": "--bf16 True",
        "zero_stage": "--deepspeed ds.json",
    }
    words = (
        *("finetune.py", "--model_name_or_path", "m", "--per_device_train_batch_size", "2"),
        *("--bf16", "True", "--deepspeed", "ds.json", "--num_train_epochs", "3"),
        *("--output_dir", "/out"),
    )
    her_own = {"train_batch_size": "auto", "zero_optimization": {"stage": 1, "overlap_comm": True}}
    entry = entry_of(job("deepspeed", said, words), lambda _: her_own)
    assert entry.entry["command"] == [
        *("python", "finetune.py", "--model_name_or_path", "m"),
        "--per_device_train_batch_size={micro_batch_size}",
        *("--bf16", "True", "--deepspeed={values_file}", "--max_steps={steps}"),
        *("--logging_steps=1", "--save_strategy=no", "--report_to=none"),
        "--output_dir={probe_directory}",
        "--gradient_accumulation_steps={num_microbatches}",
    ]
    assert any(each.startswith("--bf16 stay as they are") for each in entry.remarks)
    configured = ProgramTrainer.from_mapping(entry.entry).configured(
        TrainerJob(model=MODEL, layout=replace(LAYOUT, tp=1, pp=1, dp=4)), 20
    )
    assert configured["train_batch_size"] == 32
    assert configured["zero_optimization"] == {"stage": 1, "overlap_comm": True}


def test_a_configuration_of_nanotron_is_the_file_with_the_layouts_values() -> None:
    own = {
        "parallelism": {"dp": 2, "tp": 2, "pp": 2},
        "tokens": {"train_steps": 900, "sequence_length": 64},
        "data_stages": [{"name": "all", "data": {"dataset": "/data/a"}}],
        "checkpoints": {"checkpoints_path": "/ckpt", "save_final_state": True},
        "s3_upload": {"upload_s3_path": "s3://mine"},
    }
    found = job("nanotron", {"tp": "parallelism.tp: 2"}, ())
    entry = entry_of(found, lambda _: own)
    assert entry.entry["command"] == ["python", "run_train.py", "--config-file", "{values_file}"]
    trainer = ProgramTrainer.from_mapping(entry.entry)
    values = trainer.configured(TrainerJob(model=MODEL, layout=replace(LAYOUT, tp=1, dp=4)), 20)
    assert values["parallelism"]["tp"] == 1
    assert values["tokens"]["train_steps"] == 20
    assert values["tokens"]["sequence_length"] == 64
    assert values["data_stages"] == own["data_stages"]
    assert not values["checkpoints"]["save_final_state"]
    assert "save_initial_state" not in values["checkpoints"]  # older versions lack it
    assert values["s3_upload"] is None


def test_a_configuration_of_torchtitan_is_overridden_on_the_command_line() -> None:
    found = job("torchtitan-0.2", {"tp": "parallelism.tensor_parallel_degree: 2"}, ())
    command = command_of(found)
    assert command == [
        *("python", "-m", "torchtitan.train", "--job.config_file=/jobs/job.sh"),
        *("{layout_arguments}", "--training.steps={steps}", "--metrics.log_freq=1"),
        "--job.dump_folder={probe_directory}",
    ]
    trainer = ProgramTrainer.from_mapping(entry_of(found).entry)
    words = trainer.of.placement_arguments(TrainerJob(model=MODEL, layout=LAYOUT))
    at = words.index("--parallelism.tensor_parallel_degree")
    assert words[at + 1] == "2"
    assert not any(each.startswith("--model.") for each in words)


def test_switches_of_torchtitan_are_turned_off_where_they_are_on(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[checkpoint]\nenable_checkpoint = true\n[validation]\n")
    words = (
        "train.py",
        "--job.config_file",
        "a.toml",
        "--validation.enable",
        "--metrics.log_freq=5",
    )
    found = job("torchtitan-0.2", {}, words)
    entry = probe_entry(found, tmp_path / "job.sh", unreadable)
    assert isinstance(entry, ProbeEntry), entry
    _, *command = entry.entry["command"]
    assert command[:3] == ["train.py", "--job.config_file", "a.toml"]
    assert [each for each in command if "no-" in each or "validation" in each] == [
        "--checkpoint.no-enable_checkpoint"
    ]
    assert any("no-enable_checkpoint are added" in each for each in entry.remarks)


@pytest.mark.parametrize("trainer", ["accelerate", "deepspeed", "megatron-bridge"])
def test_a_file_that_starts_nothing_has_no_entry_and_the_answer_says_so(trainer: str) -> None:
    answer = probe_entry(job(trainer, {}, ()), Path("/jobs/job.yaml"), unreadable)
    assert isinstance(answer, str)
    assert "starts no program that a worker could start" in answer


def test_a_configuration_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(SearchSpaceError, match="cannot be read"):
        probe_entry(job("nanotron", {}, ()), Path("/jobs/job.yaml"), unreadable)


FSDP = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: 'no'
num_machines: 1
num_processes: 8
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}
"""
ALONE = {"zero_stage": 0, "precision": "fp32"}
TRAINER = "train.py --per_device_train_batch_size 2 --gradient_accumulation_steps 4"


def entry_of_script(folder: Path, text: str, **stated: Any) -> ProbeEntry | str:
    path = folder / "job.sh"
    path.write_text(text)
    asked = JobAsked(cluster="h100-sxm", model="llama-8b", seq_length=4096, stated=stated)
    return probe_entry_of(job_campaign(path, asked), path)


def test_what_the_launcher_alone_decides_gives_no_entry(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    launch = f"accelerate launch --config_file fsdp.yaml {TRAINER} --gradient_checkpointing True"
    answer = entry_of_script(tmp_path, launch)
    assert isinstance(answer, str)
    assert "fsdp.yaml: fsdp_config.fsdp_reshard_after_forward: true decides zero_stage=3" in answer
    assert "does not pass on to train.py" in answer
    assert "precision" not in answer


def test_knobs_that_the_command_does_not_pass_on_are_fixed(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    launch = f"deepspeed --num_nodes 1 --num_gpus 8 {TRAINER} --deepspeed ds.json --gradient_checkpointing True"
    entry = entry_of_script(tmp_path, launch)
    assert isinstance(entry, ProbeEntry), entry
    assert {"recompute", "tp", "cp", "pp", "ep"} <= set(entry.fixed)
    assert not {"zero_stage", "micro_batch_size"} & set(entry.fixed)
    assert entry_of(job("megatron-lm", SAID, MEGATRON)).fixed == ()


def test_a_configuration_that_the_script_writes_is_that_of_the_entry(tmp_path: Path) -> None:
    text = (
        'cat > ds.json <<EOF\n{"zero_optimization": {"stage": 2, "overlap_comm": true}}\nEOF\n'
        f"deepspeed --num_nodes 1 --num_gpus 8 {TRAINER} --deepspeed ds.json --gradient_checkpointing True"
    )
    entry = entry_of_script(tmp_path, text)
    assert isinstance(entry, ProbeEntry), entry
    assert entry.entry["configuration"]["zero_optimization"]["overlap_comm"] is True


@pytest.mark.parametrize(
    ("code", "folder"),
    [
        ("cd ../megatron", "{parent}/megatron"),
        ("pushd megatron/core", "{own}/megatron/core"),
        ("cd /src\ncd x", "/src/x"),
        ('cd "$(dirname "$0")/.."', "{parent}"),
        ('cd "$(dirname "${BASH_SOURCE[0]}")"', "{own}"),
        ("cd $WORK/megatron/..", "{own}/$WORK/megatron/.."),
        ("if [ -d $X ]; then cd /src; fi", "{own}/$PWD"),
    ],
)
def test_the_program_starts_where_the_script_starts_it(
    tmp_path: Path, code: str, folder: str
) -> None:
    (tmp_path / "jobs").mkdir()
    launch = f"deepspeed --num_nodes 1 --num_gpus 8 {TRAINER} --gradient_checkpointing True"
    entry = entry_of_script(tmp_path / "jobs", f"{code}\n{launch}", **ALONE)
    assert isinstance(entry, ProbeEntry), entry
    where = entry.entry["working_directory"]
    assert where == folder.format(own=tmp_path / "jobs", parent=tmp_path)
    is_said = any("in the command are not known" in each for each in entry.remarks)
    assert is_said == ("$" in where)


def test_variables_and_containers_that_the_entry_lacks_are_named(tmp_path: Path) -> None:
    text = (
        "export CACHE=$(mktemp -d) MASTER_ADDR=$(hostname) NCCL_DEBUG=WARN\n"
        f"OMP_NUM_THREADS=$N srun --nodes 1 --ntasks-per-node 8 --container-image=lab/train:3 "
        f"--container-mounts /data:/data python {TRAINER} --gradient_checkpointing True"
    )
    entry = entry_of_script(tmp_path, text, **ALONE)
    assert isinstance(entry, ProbeEntry), entry
    [said] = [each for each in entry.remarks if "not in the entry" in each]
    for words in ("CACHE=$(mktemp -d)", "OMP_NUM_THREADS=", "--container-image=lab/train:3"):
        assert words in said
    assert "--container-mounts /data:/data" in said
    assert "MASTER_ADDR" not in said
    assert entry.entry["environment"] == {"NCCL_DEBUG": "WARN"}
