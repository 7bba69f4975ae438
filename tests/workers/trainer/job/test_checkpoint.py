"""Checkpoints are complete or absent, and training goes on the same under any other layout."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import workers.trainer.job.checkpoint  # noqa: F401 (before ranks are forked: it takes long)
from search_spaces.spec.layout import Precision
from tests.kit.python_process import printed_by
from tests.workers.trainer.cases import ADAMW, CUT, PP, TP, make_layout, make_shape
from tests.workers.trainer.checkpointed_jobs import (
    SAVED_AT,
    STEPS,
    kinds_of,
    losses_of,
    make_job,
    run_job,
    save_half,
)
from tests.workers.trainer.ranks import RanksFailedError
from tests.workers.trainer.tolerances import training_tolerance
from workers.trainer.errors import CheckpointInvalidError, TrainJobInvalidError
from workers.trainer.job.checkpoint_directory import (
    CheckpointDirectory,
    CheckpointRecord,
    CheckpointSettings,
)
from workers.trainer.job.job import TrainJob
from workers.trainer.job.training_tokens import TokenFileSettings
from workers.trainer.parallel.optimizer import OptimizerSettings
from workers.trainer.train import main

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_same_layout_goes_on_to_the_bit(tmp_path: Path, precision: Precision) -> None:
    layout = make_layout(dp=2, zero_stage=3 if precision == "fp16" else 1, precision=precision)
    whole = losses_of(run_job(make_job(tmp_path, layout, checkpoint=None)))
    first = save_half(tmp_path, layout)
    assert kinds_of(first) == ["checkpoint"]
    second = run_job(make_job(tmp_path, layout))
    assert kinds_of(second) == ["resume", "checkpoint"]
    assert (second[0]["step"], second[0]["layout"]) == (SAVED_AT, layout.key)
    assert losses_of(first) | losses_of(second) == whole
    assert list(losses_of(second)) == [4, 5, 6, 7]
    assert (second[-1]["first_step"], second[-1]["steps"]) == (SAVED_AT, STEPS - SAVED_AT)
    scaler = record_of(tmp_path, 8)["loss_scaler"]
    assert scaler == (None if precision == "bf16" else {"scale": 2.0**16, "good_steps": 8})


def record_of(folder: Path, step: int) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path_of_record(folder, step).read_text())
    return record


def path_of_record(folder: Path, step: int) -> Path:
    return folder / "saved" / f"step-{step:08}" / "checkpoint.json"


LAYOUTS = {
    "alone": make_layout(),
    "tp": make_layout(**TP),
    "sequence": make_layout(**CUT),
    "pp": make_layout(**PP),
    "replicas": make_layout(dp=2),
    "zero-tp": make_layout(dp=2, tp=2, zero_stage=1),
    "zero-pp": make_layout(dp=2, pp=2, zero_stage=1, recompute="full"),
    "groups": make_layout(
        dp=4, zero_stage=1, zero_replicas=2, micro_batch_size=1, num_microbatches=2
    ),
    "interleaved": make_layout(pp=2, vpp=2),
    "context": make_layout(cp=2, zero_stage=1),
    "context-groups": make_layout(
        cp=2, dp=2, cp_comm_type="p2p", zero_stage=1, zero_replicas=2, num_microbatches=2
    ),
    "uneven": make_layout(pp=2, pipeline_split="embedding_and_head"),
    "zero-2-pp": make_layout(dp=2, pp=2, zero_stage=2),
    "zero-3": make_layout(dp=2, zero_stage=3),
    "hybrid": make_layout(
        dp=4, zero_stage=3, zero_replicas=2, micro_batch_size=1, num_microbatches=2
    ),
    "columns": make_layout(tp_columns=2, tp=2),
    "columns-zero": make_layout(tp_columns=2, dp=2, zero_stage=3),
    "experts": make_layout(dp=2, ep=2),
    "experts-zero": make_layout(dp=4, ep=2, zero_stage=1, micro_batch_size=1, num_microbatches=2),
    "experts-tp": make_layout(dp=2, ep=2, etp=2, zero_stage=3, **CUT),
    "four": make_layout(dp=4, zero_stage=1, micro_batch_size=1, num_microbatches=2),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("llama", "zero-tp", "alone"),
        ("llama", "alone", "zero-tp"),
        ("gpt", "zero-pp", "sequence"),
        ("gpt", "tp", "zero-pp"),
        ("llama", "replicas", "four"),
        ("gpt", "four", "pp"),
        ("llama", "groups", "interleaved"),
        ("gpt", "interleaved", "groups"),
        ("gpt", "uneven", "pp"),
        ("llama", "interleaved", "uneven"),
        ("llama", "uneven", "zero-tp"),
        ("gpt", "zero-3", "zero-pp"),
        ("gpt", "zero-2-pp", "zero-3"),
        ("gpt", "alone", "zero-2-pp"),
        ("llama", "zero-pp", "hybrid"),
        ("llama", "hybrid", "zero-3"),
        ("gpt", "context", "alone"),
        ("llama", "tp", "context"),
        ("gpt", "context-groups", "pp"),
        ("llama", "replicas", "context-groups"),
        ("gpt", "alone", "columns"),
        ("gpt", "columns", "zero-pp"),
        ("llama", "columns", "columns-zero"),
        ("llama", "columns-zero", "tp"),
        ("moe", "alone", "experts"),
        ("moe", "experts-zero", "alone"),
        ("moe", "experts", "experts-tp"),
        ("moe", "experts-tp", "experts-zero"),
        ("moe", "zero-3", "experts"),
    ],
)
def test_any_layout_goes_on_the_same(tmp_path: Path, family: str, before: str, after: str) -> None:
    shape = make_shape(family, num_layers=4, tied_embeddings=family == "gpt")
    whole = losses_of(run_job(make_job(tmp_path, LAYOUTS[after], shape=shape, checkpoint=None)))
    first = losses_of(save_half(tmp_path, LAYOUTS[before], shape=shape))
    second = losses_of(run_job(make_job(tmp_path, LAYOUTS[after], shape=shape)))
    assert list(first | second) == list(range(STEPS))
    found, expected = (list(losses.values()) for losses in (first | second, whole))
    allowed = training_tolerance(shape, OptimizerSettings(clip_grad_norm=1.0), steps=STEPS).losses
    for own, other, limit in zip(found, expected, allowed, strict=True):
        assert abs(own - other) <= limit
    assert len(set(expected)) == STEPS, "the loss tells the steps apart"


def test_another_precision_goes_on_from_the_masters(tmp_path: Path) -> None:
    """The first loss after the change is that of the fp32 weights, not of rounded ones."""
    save_half(tmp_path, make_layout(precision="bf16", dp=2, zero_stage=1))
    mixed = losses_of(run_job(make_job(tmp_path, make_layout(precision="bf16"))))
    (tmp_path / "saved" / "step-00000008").rename(tmp_path / "away")
    full = losses_of(run_job(make_job(tmp_path, make_layout())))
    assert full[SAVED_AT] != mixed[SAVED_AT]
    # Both start from the same weights, as in step 0: only the forward pass's roundings differ.
    first = training_tolerance(make_shape(), ADAMW, steps=1, precision="bf16").losses[0]
    assert full[SAVED_AT] == pytest.approx(mixed[SAVED_AT], abs=first)
    state = converted(tmp_path / "saved" / "step-00000004")
    weight = state["model"]["layers.0.feed_forward.down.weight"]
    assert weight.dtype is torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())


def test_skipped_steps_are_told_and_are_no_updates(tmp_path: Path) -> None:
    """From a scale at which every gradient overflows."""
    layout = make_layout(precision="fp16")
    save_half(tmp_path, layout)
    record = record_of(tmp_path, 4)
    record["loss_scaler"]["scale"] = 2.0**60
    path_of_record(tmp_path, 4).write_text(json.dumps(record))
    *told, result = run_job(make_job(tmp_path, layout))
    steps = [event for event in told if event["event"] == "step"]
    assert [step["loss_scale"] for step in steps] == [2.0**60, 2.0**59, 2.0**58, 2.0**57]
    assert all(step["grad_norm"] is None for step in steps)
    assert result["skipped_steps"] == 4
    record = record_of(tmp_path, 8)
    assert (record["step"], record["optimizer_steps"]) == (8, 4)
    assert record["loss_scaler"] == {"scale": 2.0**56, "good_steps": 0}


def converted(folder: Path) -> dict[str, Any]:
    """The checkpoint as torch's own tool converts it, which knows nothing of this project."""
    out = folder.parent / "converted.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that no process group is up
        dcp_to_torch_save(folder, out)
    state: dict[str, Any] = torch.load(out, weights_only=True)
    return state


def test_torch_s_own_tool_reads_whole_tensors_of_canonical_names(tmp_path: Path) -> None:
    shape = make_shape("gpt", tied_embeddings=True)
    save_half(tmp_path, LAYOUTS["zero-pp"], shape=shape)
    state = converted(tmp_path / "saved" / "step-00000004")
    assert set(state) == {"model", "optimizer"}
    assert set(state["optimizer"]) == {"exp_avg", "exp_avg_sq"}
    weights = state["model"]
    assert weights["layers.1.attention.query.weight"].shape == (32, 32)
    assert weights["embedding.weight"].shape == (64, 32)
    assert not any(name.startswith("head") for name in weights), "a tied weight is stored once"
    assert sum(weight.numel() for weight in weights.values()) == shape.num_parameters
    for moments in state["optimizer"].values():
        assert moments.keys() == weights.keys()
        assert all(moments[name].shape == weights[name].shape for name in weights)
        assert all(moment.abs().sum() > 0 for moment in moments.values())


def test_tokens_of_a_file_go_on_where_they_stood(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(np.random.default_rng(0).integers(0, 64, 700, np.uint16).tobytes())
    data = TokenFileSettings(tokens=str(tokens), dtype="uint16")
    layout = make_layout(dp=2)
    whole = losses_of(run_job(make_job(tmp_path, layout, data=data, checkpoint=None)))
    synthetic = losses_of(run_job(make_job(tmp_path, layout, checkpoint=None)))
    assert whole.keys() == synthetic.keys()
    assert whole[0] != synthetic[0]
    first = save_half(tmp_path, layout, data=data)
    second = run_job(make_job(tmp_path, layout, data=data))
    assert losses_of(first) | losses_of(second) == whole
    larger = make_layout(num_microbatches=8)
    (tmp_path / "saved" / "step-00000008").rename(tmp_path / "away")
    run_job(make_job(tmp_path, larger, data=data, steps=6))
    newest = CheckpointDirectory(tmp_path / "saved").newest()
    assert newest is not None
    assert newest[1].samples == 4 * 8 + 2 * 16


def test_a_job_that_is_done_says_so_and_ends_well(tmp_path: Path) -> None:
    save_half(tmp_path, make_layout())
    told = run_job(make_job(tmp_path, make_layout(), steps=SAVED_AT))
    assert kinds_of(told) == ["resume"]
    assert (told[-1]["steps"], told[-1]["tokens_per_s"]) == (0, None)


def folders(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "saved").iterdir())


def test_the_newest_are_kept_and_the_last_step_is_saved(tmp_path: Path) -> None:
    settings = CheckpointSettings(directory=str(tmp_path / "saved"), every=2, keep=2)
    job = make_job(tmp_path, make_layout(), checkpoint=settings, steps=7)
    told = run_job(job)
    assert [event["step"] for event in told if event.get("event") == "checkpoint"] == [2, 4, 6, 7]
    assert folders(tmp_path) == ["step-00000006", "step-00000007"]
    size = sum(file.stat().st_size for file in (tmp_path / "saved/step-00000007").iterdir())
    assert told[-2]["bytes"] == size
    assert size > 12 * make_shape().num_parameters


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": 1}, "step-00000004 belongs to another job: seed=0, and the job has 1; name"),
        ({"shape": make_shape(vocab_size=128)}, "vocab_size=64, and the job has 128"),
        ({"shape": make_shape("gpt")}, "family='llama', and the job has 'gpt'"),
        ({"tokens": 500}, "tokens of synthetic ones, and the job 500 of uint16"),
    ],
)
def test_a_checkpoint_of_another_job_is_refused_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], sentence: str
) -> None:
    save_half(tmp_path, make_layout())
    if "tokens" in change:
        tokens = tmp_path / "tokens.bin"
        tokens.write_bytes(bytes(2 * change["tokens"]))
        change = {"data": TokenFileSettings(tokens=str(tokens), dtype="uint16")}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(make_job(tmp_path, make_layout(), **change).to_mapping()))
    assert main(["--config", str(path)]) == 2
    assert sentence in capsys.readouterr().err


def test_a_model_s_name_is_no_part_of_its_shape(tmp_path: Path) -> None:
    save_half(tmp_path, make_layout())
    renamed = replace(make_shape(), name="other")
    assert kinds_of(run_job(make_job(tmp_path, make_layout(), shape=renamed)))[0] == "resume"


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: (folder / "checkpoint.json").unlink(), "No such file"),
        (lambda folder: (folder / "checkpoint.json").write_text("{"), "can't be used"),
        (lambda folder: (folder / "checkpoint.json").write_text("{}"), "format=None"),
        (lambda folder: (folder / ".metadata").unlink(), "its .metadata is missing"),
    ],
)
def test_a_damaged_checkpoint_is_one_clear_error(
    tmp_path: Path, damage: Callable[[Path], None], sentence: str
) -> None:
    save_half(tmp_path, make_layout())
    damage(tmp_path / "saved" / "step-00000004")
    with pytest.raises(CheckpointInvalidError, match=sentence) as caught:
        make_job(tmp_path, make_layout()).refuse_unusable()
    assert "remove it to go on from an earlier one" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"step": "4"}, "step='4' is not a whole number"),
        ({"samples": None}, "samples=None is not a whole number"),
        ({"optimizer_steps": -1}, "optimizer_steps=-1 is not a whole number"),
        ({"tokens": 3}, "tokens=3 is not an object"),
        ({"tokens": {"dtype": "uint16"}}, "tokens.number=None is not a whole number"),
        ({"loss_scaler": [8.0]}, r"loss_scaler=\[8.0\] is not an object"),
        ({"loss_scaler": {"scale": 0, "good_steps": 1}}, "loss_scaler.scale=0 is not a number"),
        ({"loss_scaler": {"scale": 8.0}}, "loss_scaler.good_steps=None is not a whole number"),
    ],
    ids=str,
)
def test_a_record_of_a_wrong_type_names_the_field(change: dict[str, Any], sentence: str) -> None:
    trained = {"model": make_shape(), "seed": 0, "layout": make_layout()}
    record = CheckpointRecord(step=4, samples=32, **trained).to_mapping()
    assert CheckpointRecord.from_mapping(record).step == 4
    with pytest.raises(CheckpointInvalidError, match=sentence):
        CheckpointRecord.from_mapping({**record, **change})


def test_tensors_that_are_damaged_are_an_error_on_every_rank(tmp_path: Path) -> None:
    save_half(tmp_path, make_layout(dp=2, zero_stage=1))
    file = tmp_path / "saved" / "step-00000004" / "__1_0.distcp"
    os.truncate(file, 1000)
    with pytest.raises(RanksFailedError, match=r"CheckpointFailedError: .* could not be loaded"):
        run_job(make_job(tmp_path, make_layout(dp=2, zero_stage=1)))


def test_a_directory_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "saved").write_text("a file")
    with pytest.raises(CheckpointInvalidError, match=r"no checkpoint can be written to .*saved"):
        make_job(tmp_path, make_layout()).refuse_unusable()


def test_a_full_disk_ends_the_job_and_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    """The kernel refuses to write files past a size: as a full disk would, to each write."""
    layout = make_layout(dp=2, zero_stage=1)
    save_half(tmp_path, layout)

    def limit(rank: int) -> None:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))

    with pytest.raises(RanksFailedError, match=r"could not be saved: rank 1: .*GiB are free"):
        run_job(make_job(tmp_path, layout), limit)
    assert folders(tmp_path) == ["step-00000004", "step-00000008.partial"]
    told = run_job(make_job(tmp_path, layout))
    assert kinds_of(told) == ["note", "resume", "checkpoint"]
    assert "step-00000008.partial, which was never finished" in told[0]["message"]
    assert folders(tmp_path) == ["step-00000004", "step-00000008"]


def kill_once_there(path: Path) -> None:
    """Leaves a process behind that kills this one as soon as a file appears."""
    victim = os.getpid()
    if os.fork() == 0:
        deadline = time.monotonic() + 30
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.0005)
        if path.exists():
            os.kill(victim, signal.SIGKILL)
        os._exit(0)


def test_a_job_that_is_killed_while_saving_goes_on_from_the_one_before(tmp_path: Path) -> None:
    """Killed for real: as soon as the second checkpoint's tensors begin to be written."""
    shape = make_shape(hidden_size=256, ffn_hidden_size=1024, vocab_size=4096)
    settings = CheckpointSettings(directory=str(tmp_path / "saved"), every=1)
    job = make_job(tmp_path, make_layout(), shape=shape, steps=50, checkpoint=settings)
    partial = tmp_path / "saved" / "step-00000002.partial" / "__0_0.distcp"
    with pytest.raises(RanksFailedError, match="rank 0 died without a word"):
        run_job(job, lambda _: kill_once_there(partial))
    assert folders(tmp_path) == ["step-00000001", "step-00000002.partial"]
    told = run_job(replace(job, steps=3))
    assert kinds_of(told) == ["note", "resume", "checkpoint", "checkpoint"]
    assert folders(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    again = losses_of(run_job(replace(job, steps=3, checkpoint=None)))
    assert losses_of(told) == {step: again[step] for step in (1, 2)}


@pytest.mark.parametrize(
    ("checkpoint", "sentence"),
    [
        ("here", "='here' is not an object"),
        ({}, "directory, the folder of the checkpoints, is missing"),
        ({"directory": ""}, "directory='' is not a folder's path"),
        ({"directory": "d", "every": 0}, "every=0 is not a whole number of at least 1"),
        ({"directory": "d", "keep": 0}, "keep=0 is not a whole number of at least 1"),
        ({"directory": "d", "often": 3}, "unknown field 'often'; the fields are directory"),
    ],
)
def test_a_malformed_checkpoint_field_is_named(checkpoint: Any, sentence: str) -> None:
    mapping = TrainJob(model=make_shape(), layout=make_layout()).to_mapping()
    with pytest.raises(TrainJobInvalidError, match=f"the job's checkpoint.*{sentence}"):
        TrainJob.from_mapping({**mapping, "checkpoint": checkpoint})


def test_a_job_that_does_not_save_imports_nothing_for_it() -> None:
    looks = "assert 'torch.distributed.checkpoint' not in sys.modules"
    printed_by(f"import sys, workers.rank_jobs.rank; {looks}")
