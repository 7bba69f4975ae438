"""A layout is written into a copy of the user's own file, which reads back as the wanted job."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import CP_COMM_TYPES, Layout
from layout_tuner.search_spaces.layouts.recomputation import RECOMPUTE_MODES
from layout_tuner.search_spaces.legality_rules import violations
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.accelerate import accelerate_backend
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.found_jobs.completed_job import CompletedJob, completed
from layout_tuner.trainers.found_jobs.found_job import JobFileInvalidError
from layout_tuner.trainers.found_jobs.into import rewritten_file
from layout_tuner.trainers.found_jobs.into.key_edits import KeyNotWritableError
from layout_tuner.trainers.found_jobs.into.rewritten_file import rewritten
from layout_tuner.trainers.found_jobs.into.script_edits import EditsOverlapError
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.read_job import read_job
from layout_tuner.trainers.registry import ADAPTERS
from tests.exports.exported_files import write_export
from tests.exports.legal_jobs import CLUSTER, SCOPES, legal_jobs

SCRIPT: Final = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8

export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=4
MBS=2
GBS=$((MBS * 32))   # four micro-batches a step

MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008
    --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096
    --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights
    --tokenizer-type NullTokenizer --vocab-size 32000
    --make-vocab-size-divisible-by 1
    --attention-dropout 0 --hidden-dropout 0
)
PARALLEL="--tensor-model-parallel-size $TP \\
    --sequence-parallel \\
    --use-distributed-optimizer"

torchrun --nnodes 2 --nproc_per_node 8 \\
    pretrain_gpt.py \\
    "${MODEL_ARGS[@]}" \\
    $PARALLEL \\
    --micro-batch-size $MBS --global-batch-size $GBS \\
    --bf16 --lr 3e-4 --train-iters 100 \\
    --save checkpoints/tp$TP --recompute-granularity selective
"""


def file_of(text: str, name: str = "job.sh") -> JobFile:
    return JobFile(name=name, text=text)


def read(file: JobFile, **stated: Any) -> CompletedJob:
    return completed(read_job(file), **stated)


def changed(text: str, **knobs: Any) -> str:
    """A script with other knobs of its layout; it must read back as that layout."""
    file = file_of(text)
    job = read(file)
    wanted = replace(job.layout, **knobs)
    result = rewritten(file, TrainerJob(model=job.model, layout=wanted))
    assert read(result.file).layout == wanted
    assert read(result.file).model == job.model
    return result.file.text


def with_lines(*pairs: tuple[str, str]) -> str:
    """The script with other lines."""
    text = SCRIPT
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_a_variable_gets_the_new_value_and_nothing_else_changes() -> None:
    result = changed(SCRIPT, tp=8, dp=2, num_microbatches=16)

    assert result == with_lines(("TP=4\n", "TP=8\n"))


def test_a_computed_value_that_would_change_is_written_out() -> None:
    # The micro-batch halves, and the global batch, which is computed from it, stays.
    result = changed(SCRIPT, micro_batch_size=1, num_microbatches=16)

    assert result == with_lines(
        ("MBS=2\n", "MBS=1\n"), ("--global-batch-size $GBS", "--global-batch-size 64")
    )


def test_missing_options_come_behind_the_last_of_the_layout_and_others_go() -> None:
    result = changed(SCRIPT, pp=2, dp=2, num_microbatches=16, recompute="full")

    assert result == with_lines(
        ("    --use-distributed-optimizer", "    --use-distributed-optimizer"),
        ("    --sequence-parallel \\\n", "    --sequence-parallel \\\n"
         "    --pipeline-model-parallel-size 2 \\\n"
         "    --recompute-method uniform \\\n"
         "    --recompute-num-layers 1 \\\n"),
        ("--recompute-granularity selective", "--recompute-granularity full"),
    )  # fmt: skip


def test_a_switch_that_is_off_goes_with_its_line() -> None:
    result = changed(SCRIPT, sequence_parallel=False)

    assert result == with_lines(("    --sequence-parallel \\\n", ""))


def test_the_last_option_of_a_string_goes_with_the_continuation_before_it() -> None:
    result = changed(SCRIPT, zero_stage=0, job=JobSettings())

    assert result == with_lines((' \\\n    --use-distributed-optimizer"', '"'))


def test_nodes_change_in_the_head_of_the_script_and_for_the_launcher() -> None:
    result = changed(SCRIPT, num_nodes=4, dp=8, num_microbatches=4)

    assert result == with_lines(
        ("#SBATCH --nodes=2", "#SBATCH --nodes=4"), ("--nnodes 2", "--nnodes 4")
    )


def test_settings_of_the_job_are_options_too() -> None:
    own = read(file_of(SCRIPT)).layout.job

    result = changed(SCRIPT, job=JobSettings({**own, "tp_overlap": True}))

    assert result == with_lines(
        ("    --sequence-parallel \\\n", "    --sequence-parallel \\\n    --tp-comm-overlap \\\n")
    )
    assert changed(result, job=own) == SCRIPT


def test_a_setting_that_the_layout_cannot_have_goes_and_one_without_effect_stays() -> None:
    graphs = "--cuda-graph-impl transformer_engine --cuda-graph-modules attn"
    text = SCRIPT.replace("--lr 3e-4", f"--lr 3e-4 {graphs} --moe-router-fusion")
    own = read(file_of(text)).layout.job
    assert own == JobSettings({"cuda_graphs": "attn", "grad_overlap": False})

    without = JobSettings({name: own[name] for name in own if name != "cuda_graphs"})
    result = changed(text, recompute="full", job=without)

    assert "--cuda-graph" not in result
    assert "--moe-router-fusion" in result


def test_a_setting_that_the_trainer_lacks_is_refused() -> None:
    job = read(file_of(SCRIPT))
    wanted = replace(job.layout, job=JobSettings({"warp_speed": True}))

    with pytest.raises(JobFileInvalidError, match="no knob warp_speed"):
        rewritten(file_of(SCRIPT), TrainerJob(model=job.model, layout=wanted))


def test_the_layers_of_a_virtual_stage_stay_in_that_spelling() -> None:
    text = with_lines(
        ("--micro-batch-size $MBS", "--pipeline-model-parallel-size 2 "
         "--num-layers-per-virtual-pipeline-stage 8 --micro-batch-size $MBS"),
    )  # fmt: skip

    result = changed(text, vpp=4)

    assert result == text.replace("virtual-pipeline-stage 8", "virtual-pipeline-stage 4")


def test_a_vocabulary_that_the_trainer_pads_by_tp_is_noted() -> None:
    file = file_of(SCRIPT.replace("    --make-vocab-size-divisible-by 1\n", ""))
    job = read(file)
    wanted = replace(job.layout, tp=1, dp=16, num_microbatches=2, sequence_parallel=False)

    result = rewritten(file, TrainerJob(model=job.model, layout=wanted))

    assert job.model.vocab_size == 32256  # a multiple of 128 * 4
    assert any("model.vocab_size=32000 in this layout, and 32256" in each for each in result.notes)
    assert completed(read_job(result.file)).layout == wanted


def test_an_own_layout_changes_nothing() -> None:
    file = file_of(SCRIPT)
    job = read(file)

    result = rewritten(file, TrainerJob(model=job.model, layout=job.layout))

    assert not result.is_changed
    assert result.diff("copy.sh") == ""


def test_an_own_layout_with_options_without_effect_changes_nothing() -> None:
    text = SCRIPT.replace("--nnodes 2 --nproc_per_node 8", "--nnodes 1 --nproc_per_node 4")
    file = file_of(text)
    job = read(file)
    assert (job.layout.dp, job.layout.zero_stage) == (1, 0)  # nothing is sharded over one replica

    assert rewritten(file, TrainerJob(model=job.model, layout=job.layout)).file.text == text


def test_a_field_that_is_not_understood_is_named_and_stays_or_is_stated() -> None:
    text = SCRIPT.replace("--nnodes 2", "--nnodes 2").replace("TP=4", "TP=$(nvidia-smi -L | wc -l)")
    file = file_of(text)
    job = completed(read_job(file).with_stated({"tp": 4}))
    other = TrainerJob(model=job.model, layout=replace(job.layout, recompute="none"))

    own = rewritten(file, TrainerJob(model=job.model, layout=job.layout))
    assert not own.is_changed
    assert any("tp stays as the file says it" in each for each in own.notes)
    with pytest.raises(JobFileInvalidError, match=r"tp .*--set FIELD=VALUE"):
        rewritten(file, other)
    result = rewritten(file, other, stated={"tp": 4})
    assert result.file.text == text.replace(" --recompute-granularity selective", "")
    other = replace(other, layout=replace(job.layout, tp=2, dp=8, num_microbatches=4))
    result = rewritten(file, other, stated={"tp": 4})
    assert result.file.text == text.replace("parallel-size $TP", "parallel-size 2")


def test_a_layout_that_cannot_be_written_is_refused_with_what_to_change() -> None:
    text = SCRIPT.replace("--micro-batch-size $MBS", "")
    text = text.replace("torchrun", 'MORE="--micro-batch-size"\ntorchrun')
    text = text.replace("--bf16", "$MORE $MBS --bf16")
    file = file_of(text.replace("MBS=2", "MBS=$((1 + 1))"))
    job = read(file)
    wanted = replace(job.layout, micro_batch_size=1, num_microbatches=16)

    with pytest.raises(JobFileInvalidError, match="change by hand micro_batch_size=1"):
        rewritten(file, TrainerJob(model=job.model, layout=wanted))


@pytest.mark.parametrize("error", [EditsOverlapError, KeyNotWritableError])
def test_edits_that_cannot_be_made_are_named(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(*_: Any) -> str:
        raise error("it")

    monkeypatch.setattr(rewritten_file, "edited", refuse)
    file = file_of(SCRIPT)
    job = read(file)
    wanted = replace(job.layout, micro_batch_size=1, num_microbatches=16)
    with pytest.raises(JobFileInvalidError, match=r"change by hand .*micro_batch_size=1"):
        rewritten(file, TrainerJob(model=job.model, layout=wanted))


@pytest.mark.parametrize(
    ("launch", "stage", "says"),
    [
        ("deepspeed --num_gpus 2 {} --deepspeed a.json", 3, "zero_optimization.stage: 3 in a.json"),
        (
            "accelerate launch --config_file a.yaml {}",
            2,
            "fsdp_config.fsdp_reshard_after_forward: false in a.yaml",
        ),
    ],
)
def test_a_value_of_another_file_is_named_by_file_and_key(
    tmp_path: Path, launch: str, stage: int, says: str
) -> None:
    (tmp_path / "a.json").write_text('{"zero_optimization": {"stage": 2, "overlap_comm": true}}')
    (tmp_path / "a.yaml").write_text(
        "{distributed_type: FSDP, num_processes: 2, num_machines: 1, mixed_precision: bf16,\n"
        " fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}}\n"
    )
    batch = "--per_device_train_batch_size 2 --gradient_accumulation_steps 2"
    words = f"train.py {batch} --bf16 True --gradient_checkpointing False"
    (tmp_path / "job.sh").write_text(launch.format(words))
    layout = Layout(
        dp=2, micro_batch_size=2, num_microbatches=2, precision="bf16", zero_stage=stage
    )
    job = TrainerJob(model=model_preset("tiny-llama"), layout=layout)
    hint = re.escape(f"change by hand {says} (zero_stage={stage}), and do this again")
    with pytest.raises(JobFileInvalidError, match=hint):
        rewritten(JobFile.open(tmp_path / "job.sh"), job)


def test_a_change_of_something_else_with_the_same_variable_is_refused() -> None:
    text = SCRIPT.replace("--num-attention-heads 32", "--num-attention-heads $((TP * 8))")
    file = file_of(text)
    job = read(file)
    wanted = replace(job.layout, tp=8, dp=2, num_microbatches=16)

    with pytest.raises(JobFileInvalidError, match=r"model\.num_heads, which share a variable"):
        rewritten(file, TrainerJob(model=job.model, layout=wanted))


def test_what_the_trainer_lacks_is_refused_whatever_field_it_is_filed_under() -> None:
    # torchtitan's reason against cp is that of its ZeRO stage, which stays.
    file = file_of(TITAN_8B, "job.toml")
    job = read(file, num_nodes=2, devices_per_node=8)
    wanted = replace(job.layout, tp=1, cp=2, sequence_parallel=False)

    with pytest.raises(JobFileInvalidError, match="context parallelism beside FSDP only"):
        rewritten(file, TrainerJob(model=job.model, layout=wanted))


def test_one_connection_is_kept_where_the_program_asks_for_it_and_goes_where_it_refuses_it() -> (
    None
):
    own = read(file_of(SCRIPT)).layout
    fsdp: dict[str, Any] = {"tp": 1, "dp": 16, "sequence_parallel": False, "num_microbatches": 2}
    fsdp |= {"zero_stage": 2, "job": JobSettings()}

    sharded = changed(SCRIPT, **fsdp)

    assert "--use-megatron-fsdp" in sharded
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in sharded
    line = "export CUDA_DEVICE_MAX_CONNECTIONS=1"
    # Other variables of the same line stay.
    assert "export NCCL_DEBUG=INFO\n" in changed(
        SCRIPT.replace(line, f"{line} NCCL_DEBUG=INFO"), **fsdp
    )
    back = changed(sharded, **{name: getattr(own, name) for name in fsdp})
    assert f"{line}\ntorchrun" in back
    assert back.count(line) == 1
    # One that no line of its own sets stays where it is, and is refused.
    hidden = file_of(SCRIPT.replace(line, f"if true; then {line}; fi"))
    job = read(hidden)
    with pytest.raises(JobFileInvalidError, match="cannot run with CUDA_DEVICE_MAX_CONNECTIONS"):
        rewritten(hidden, TrainerJob(model=job.model, layout=replace(job.layout, **fsdp)))


def test_a_path_of_checkpoints_that_would_change_is_refused_and_other_words_are_noted() -> None:
    text = SCRIPT.replace("MBS=2\n", "MBS=2\nOUT=runs/tp${TP}\n").replace(
        "--lr 3e-4", "--lr 3e-4 --tensorboard-dir $OUT/log"
    )
    job = read(file_of(text))
    wanted = replace(job.layout, tp=8, dp=2, num_microbatches=16)
    noted = rewritten(file_of(text), TrainerJob(model=job.model, layout=wanted)).notes
    assert any("--tensorboard-dir runs/tp8/log" in each and "tp4/log" in each for each in noted)

    loads = file_of(text.replace("--save checkpoints/tp$TP", "--save $OUT --load $OUT"))
    with pytest.raises(JobFileInvalidError, match=r"--load runs/tp8 .*--load runs/tp4"):
        rewritten(loads, TrainerJob(model=job.model, layout=wanted))


def test_what_is_stated_of_a_field_that_the_file_states_is_refused() -> None:
    job = read(file_of(SCRIPT))
    own = TrainerJob(model=job.model, layout=job.layout)

    with pytest.raises(JobFileInvalidError, match=r"--set tp: .*states it itself"):
        rewritten(file_of(SCRIPT), own, stated={"tp": 4})


TITAN_8B: Final = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
tensor_parallel_degree = 2
data_parallel_shard_degree = -1
[activation_checkpoint]
mode = "full"
"""
PRIMUS: Final = """\
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: llama3.1_8B.yaml
    overrides:
      micro_batch_size: 4
      global_batch_size: 128
      seq_length: 8192
      tensor_model_parallel_size: 1   # fits
      pipeline_model_parallel_size: 1
      overlap_grad_reduce: true
"""
TITAN: Final = """\
torchtitan=torchtitan.train
torchrun --nproc_per_node 8 --nnodes 2 -m $torchtitan --model.name llama3 --model.flavor 8B \\
    --training.local_batch_size 2 --training.seq_len 8192 \\
    --parallelism.tensor_parallel_degree=2 --activation_checkpoint.mode full
"""


@pytest.mark.parametrize(
    ("name", "text", "knobs", "lines"),
    [
        (
            "exp.yaml",
            PRIMUS,
            {"tp": 2, "dp": 8, "num_microbatches": 4, "sequence_parallel": True},
            (
                ("size: 1   # fits", "size: 2   # fits"),
                ("reduce: true\n", "reduce: true\n      sequence_parallel: true\n"),
            ),
        ),
        (  # whose default is true
            "exp.yaml",
            PRIMUS,
            {"tp": 2, "dp": 8, "num_microbatches": 4},
            (
                ("size: 1   # fits", "size: 2   # fits"),
                ("reduce: true\n", "reduce: true\n      sequence_parallel: false\n"),
            ),
        ),
        (
            "exp.yaml",
            PRIMUS,
            {"recompute": "full"},
            (
                (
                    "reduce: true\n",
                    "reduce: true\n      recompute_granularity: full\n"
                    "      recompute_method: uniform\n      recompute_num_layers: 1\n",
                ),
            ),
        ),
        ("titan.sh", TITAN, {"tp": 4, "dp": 4}, (("degree=2", "degree=4"),)),
        ("titan.sh", TITAN, {"recompute": "none"}, (("mode full", "mode none"),)),
    ],
)
def test_keys_and_overrides_change_in_the_manner_of_the_file(
    name: str, text: str, knobs: dict[str, Any], lines: tuple[tuple[str, str], ...]
) -> None:
    file = file_of(text, name)
    job = read(file, num_nodes=2, devices_per_node=8)
    wanted = replace(job.layout, **knobs)

    assert rewritten(file, TrainerJob(model=job.model, layout=job.layout)).file.text == text
    result = rewritten(file, TrainerJob(model=job.model, layout=wanted))

    for old, new in lines:
        text = text.replace(old, new)
    assert result.file.text == text
    assert read(result.file, num_nodes=2, devices_per_node=8).layout == wanted


MAIN_FILES: Final = {
    "megatron-lm": ".sh",
    "megatron-deepspeed": ".sh",
    "megatron-bridge": ".yaml",
    "deepspeed": ".json",
    "torchtitan-0.2": ".toml",
    "nanotron": ".yaml",
    "accelerate": ".yaml",
    "embedded": ".json",
}
"""The ending of the file that states the layout, by format."""


def exported(name: str, job: TrainerJob, folder: Path) -> JobFile:
    """The file of an export that states the layout, with the others beside it."""
    below = Path(mkdtemp(dir=folder))
    write_export(below, name, job)
    (main,) = (each for each in below.iterdir() if each.name.endswith(MAIN_FILES[name]))
    return JobFile.open(main)


def layout_in(file: JobFile, job: TrainerJob) -> Layout:
    """The layout of a file, with what no format states as in a job."""
    found = read_job(file)
    if found.value("micro_batch_size") is None and found.value("global_batch_size") is None:
        number = {"num_microbatches": job.layout.num_microbatches}  # accelerate's file has no batch
        found = found.with_stated({"micro_batch_size": job.layout.micro_batch_size} | number)
    known = {"model": job.model, "devices_per_node": job.ranks_per_node}
    return completed(found, num_nodes=job.layout.num_nodes, **known).layout


def is_said(name: str, job: TrainerJob, folder: Path) -> bool:
    """Whether a trainer has a job, and the export that states its layout states all of it.

    DeepSpeed's file does not say what a program recomputes.
    """
    adapter = ADAPTERS[name]
    if adapter.all_lacking(job) or adapter.refusals(job):
        return False
    return layout_in(exported(name, job, folder), job) == job.layout


@st.composite
def changed_layouts(
    draw: Callable[[st.SearchStrategy[Any]], Any], name: str, folder: Path
) -> tuple[TrainerJob, Layout]:
    """A job, and another legal layout of its model that its trainer has."""
    job = replace(draw(legal_jobs(name)), compile=False)
    assume(is_said(name, job, folder))
    random = Random(draw(st.integers(0, 1 << 32)))
    for _ in range(40):
        tp, pp, dp = random.choice((1, 2, 4)), random.choice((1, 2, 4)), random.choice((1, 2, 4, 8))
        vpp = random.choice((1, 2)) if pp > 1 else 1
        layout = replace(
            job.layout,
            num_nodes=1,
            tp=tp,
            pp=pp,
            dp=dp,
            vpp=vpp,
            schedule="1f1b",
            pipeline_split="layers",
            rank_order="tp_cp_dp_pp",
            micro_batch_size=random.choice((1, 2, 4)),
            num_microbatches=random.choice((1, 2, 4, 8)) * (pp if vpp > 1 else 1),
            zero_stage=random.choice((0, 1, 2, 3)) if dp > 1 else 0,
            zero_replicas=1,
            recompute=random.choice(RECOMPUTE_MODES),
            cp_comm_type=random.choice(CP_COMM_TYPES) if job.layout.cp > 1 else "all_gather",
            sequence_parallel=tp > 1 and random.random() < 0.7,
        )
        if name == "megatron-deepspeed":  # ds_config.json is a file of its own
            batch = job.layout.global_batch_size
            own = {
                "micro_batch_size": job.layout.micro_batch_size,
                "precision": job.layout.precision,
            }
            number = max(1, batch // (dp * own["micro_batch_size"]))
            own |= {"zero_stage": job.layout.zero_stage, "num_microbatches": number}
            layout = replace(layout, **own)
            if ADAPTERS[name].values(replace(job, layout=layout)) != ADAPTERS[name].values(job):
                continue
        other = replace(job, layout=layout)
        if violations(layout, job.model, CLUSTER, scopes=SCOPES) or layout == job.layout:
            continue
        if name == "accelerate" and accelerate_backend(layout) != accelerate_backend(job.layout):
            continue  # another backend takes another program
        if is_said(name, other, folder):
            return job, layout
    assume(False)
    raise AssertionError


@pytest.mark.parametrize("name", MAIN_FILES)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_layout_is_written_into_the_file_of_any_other(
    name: str, tmp_path: Path, data: st.DataObject
) -> None:
    job, layout = data.draw(changed_layouts(name, tmp_path))
    file = exported(name, job, tmp_path)

    assert rewritten(file, job).file.text == file.text
    other = replace(job, layout=layout)
    assert layout_in(rewritten(file, other).file, other) == layout
