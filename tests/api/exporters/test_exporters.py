"""Exporters: what the files say, and that a shell and the frameworks' rules accept them."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from api.exporters import (
    FORMATS,
    ExportBundle,
    ExportFormatUnknownError,
    ExportSource,
    export,
)
from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape
from search_spaces.trainers.base import TrainerJob
from workers.trainer.job.job import TrainJob

GPT = ModelShape(
    name="gpt",
    family="gpt",
    num_layers=8,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_heads=16,
    num_kv_heads=16,
    seq_length=512,
    vocab_size=51200,
    tied_embeddings=True,
)
LLAMA = ModelShape(
    name="llama",
    family="llama",
    num_layers=8,
    hidden_size=1024,
    ffn_hidden_size=2816,
    num_heads=16,
    num_kv_heads=8,
    seq_length=512,
    vocab_size=32000,
    tied_embeddings=False,
)


def make_source(model: ModelShape = GPT, **layout: object) -> ExportSource:
    return ExportSource(
        campaign="wide",
        trial=7,
        job=TrainerJob(model=model, layout=Layout.from_mapping(layout)),
    )


def arguments_that_a_launch_would_get(bundle: ExportBundle, tmp_path: Path) -> list[str]:
    """Runs the script with a torchrun that prints its arguments, one a line."""
    (script,) = bundle.files
    (tmp_path / script.name).write_text(script.content)
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    torchrun.chmod(0o755)
    done = subprocess.run(
        ["bash", str(tmp_path / script.name)],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "MEGATRON_DIR": "/megatron"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def value_after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_the_megatron_script_launches_exactly_the_ranks_of_the_layout(tmp_path: Path) -> None:
    source = make_source(num_nodes=2, tp=4, pp=2, dp=2, num_microbatches=8, precision="bf16")
    words = arguments_that_a_launch_would_get(export("megatron-lm", source), tmp_path)
    assert value_after(words, "--nnodes") == "2"
    assert value_after(words, "--nproc-per-node") == "8"
    assert value_after(words, "--tensor-model-parallel-size") == "4"
    assert value_after(words, "--pipeline-model-parallel-size") == "2"
    assert value_after(words, "--global-batch-size") == "16"
    assert value_after(words, "--micro-batch-size") == "1"
    assert "--bf16" in words
    assert words[-1] == "--mock-data"


def test_every_knob_of_the_layout_reaches_megatron(tmp_path: Path) -> None:
    source = make_source(
        LLAMA,
        tp=2,
        pp=2,
        dp=2,
        vpp=2,
        num_microbatches=4,
        zero_stage=1,
        recompute="full",
        sequence_parallel=True,
        precision="bf16",
    )
    words = arguments_that_a_launch_would_get(export("megatron-lm", source), tmp_path)
    assert value_after(words, "--num-virtual-stages-per-pipeline-rank") == "2"
    assert value_after(words, "--recompute-granularity") == "full"
    assert value_after(words, "--recompute-method") == "uniform"
    assert value_after(words, "--num-query-groups") == "8"
    assert value_after(words, "--vocab-size") == "32000"
    for flag in (
        "--use-distributed-optimizer",
        "--sequence-parallel",
        "--swiglu",
        "--untie-embeddings-and-output-weights",
    ):
        assert flag in words


def test_smaller_zero_groups_are_instances_of_megatrons_distributed_optimizer(
    tmp_path: Path,
) -> None:
    layout = {"dp": 4, "zero_stage": 1, "precision": "bf16"}
    one = export("megatron-lm", make_source(**layout))
    assert "--num-distributed-optimizer-instances" not in one.files[0].content
    two = export("megatron-lm", make_source(**layout, zero_replicas=2))
    words = arguments_that_a_launch_would_get(two, tmp_path)
    assert value_after(words, "--num-distributed-optimizer-instances") == "2"
    assert "--use-distributed-optimizer" in words


def test_selective_recomputation_names_no_method(tmp_path: Path) -> None:
    """Megatron-LM refuses a method together with selective granularity."""
    source = make_source(recompute="selective", precision="bf16")
    words = arguments_that_a_launch_would_get(export("megatron-lm", source), tmp_path)
    assert value_after(words, "--recompute-granularity") == "selective"
    assert "--recompute-method" not in words


def test_zero_in_fp32_uses_the_distributed_optimizer() -> None:
    """Megatron-LM's optimizer shards fp32 parameters too (core/optimizer/__init__.py)."""
    (script,) = export("megatron-lm", make_source(dp=2, zero_stage=1, precision="fp32")).files
    assert "--use-distributed-optimizer" in script.content
    assert "--bf16" not in script.content


def test_the_trainer_reads_the_exported_job_and_writes_it_back() -> None:
    source = make_source(dp=2, zero_stage=1, precision="bf16")
    (file,) = export("trainer", source).files
    exported = json.loads(file.content)
    job = TrainJob.from_mapping(exported)
    assert (job.model, job.layout) == (source.job.model, source.job.layout)
    assert exported.items() <= job.to_mapping().items()
    more = {"data": {"tokens": "t.npy"}, "checkpoint": {"directory": "saved"}}
    extended = TrainJob.from_mapping({**exported, **more})
    assert TrainJob.from_mapping(extended.to_mapping()) == extended


def test_the_trainer_job_holds_the_probe_s_model_layout_and_seed() -> None:
    source = make_source(LLAMA, tp=2, dp=2, zero_stage=1, micro_batch_size=4)
    (file,) = export("trainer", source).files
    job = json.loads(file.content)
    assert file.name == "job.json"
    assert Layout.from_mapping(job["layout"]) == source.job.layout
    assert ModelShape.from_mapping(job["model"]) == LLAMA
    assert (job["seed"], job["warmup"]) == (0, 2)


def test_a_compiled_probe_is_exported_as_a_compiled_job() -> None:
    plain = make_source(LLAMA)
    source = replace(plain, job=replace(plain.job, compile=True))
    (file,) = export("trainer", source).files
    assert TrainJob.from_mapping(json.loads(file.content)).compile
    assert not any("compile" in note for note in export("megatron-lm", make_source()).notes)
    assert any("compile=true has no flag" in note for note in export("megatron-lm", source).notes)


def test_an_unknown_format_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ExportFormatUnknownError, match=rf"'nemo'.*{', '.join(FORMATS)}"):
        export("nemo", make_source())
