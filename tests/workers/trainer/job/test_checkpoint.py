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
from torch import distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import layout_tuner.workers.trainer.job.checkpoint  # noqa: F401 (before ranks are forked: it takes long)
from layout_tuner.search_spaces.layouts.layout import Layout, Precision
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.errors import CheckpointInvalidError, TrainJobInvalidError
from layout_tuner.workers.trainer.job.checkpoint_directory import (
    CheckpointDirectory,
    CheckpointRecord,
    CheckpointSettings,
)
from layout_tuner.workers.trainer.job.job import TrainJob
from layout_tuner.workers.trainer.job.training_tokens import TokenFileSettings
from layout_tuner.workers.trainer.parallel.optimizer import OptimizerSettings
from layout_tuner.workers.trainer.train import main, run_train
from tests.workers.trainer.cases import ADAMW, VPP, make_layout, make_shape
from tests.workers.trainer.knob_pairs import layout_of, values_of
from tests.workers.trainer.ranks import RanksFailedError, make_context, run_ranks
from tests.workers.trainer.tolerances import training_tolerance

pytestmark = pytest.mark.ranks

STEPS, SAVED_AT = 8, 4


def make_job(
    folder: Path, layout: Layout, *, shape: ModelShape | None = None, **changes: Any
) -> TrainJob:
    settings = CheckpointSettings(directory=str(folder / "saved"), every=SAVED_AT)
    fields = {"model": shape or make_shape(), "layout": layout, "steps": STEPS, "warmup": 0}
    return TrainJob(**{**fields, "checkpoint": settings, "clip_grad_norm": 1.0, **changes})


def run_job(job: TrainJob, prepare: Callable[[int], None] = lambda _: None) -> list[dict[str, Any]]:
    """Runs a job on forked ranks; returns what rank 0 told, and last its result."""

    def work(rank: int, store: dist.Store) -> list[Any]:
        prepare(rank)
        told: list[Any] = []
        context = make_context(rank, job.layout.num_devices, store)
        told.append(run_train(job, context, told.append))
        return told

    return run_ranks(job.layout.num_devices, work, own_group=True)[0]


def losses_of(told: list[dict[str, Any]]) -> dict[int, float]:
    return {event["index"]: event["loss"] for event in told if event.get("event") == "step"}


def kinds_of(told: list[dict[str, Any]]) -> list[str]:
    return [event["event"] for event in told if event.get("event", "step") != "step"]


def save_half(folder: Path, layout: Layout, **changes: Any) -> list[dict[str, Any]]:
    """The first half of a job, with a checkpoint at its end."""
    return run_job(make_job(folder, layout, **{**changes, "steps": SAVED_AT}))


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
    return json.loads(path_of_record(folder, step).read_text())


def path_of_record(folder: Path, step: int) -> Path:
    return folder / "saved" / f"step-{step:08}" / "checkpoint.json"


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("moe", ["dp2 zero3", "dp2 ep2", "tp2 cut dp2 zero3 ep2 etp2", "dp4 zero1 ep2 mbs1", ""]),
        (
            "llama",
            [
                *("tp2 dp2 zero1", "", "dp4 zero3 replicas2", "tp2 columns2"),
                *("cp2 p2p dp2 zero1 replicas2", "pp2 embedding_and_head"),
            ],
        ),
        pytest.param(
            "llama",
            [
                *("dp2", "dp4 zero1 mbs1", "dp4 zero1 replicas2", "pp2 vpp2", "dp2 zero3"),
                *("columns2 dp2 zero3", "tp2", "cp2 all_gather zero1", "pp2 dp2 zero1 full"),
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gpt",
            [
                *("pp2 vpp2", "dp4 zero1 replicas2 mbs1", "pp2 embedding_and_head", "pp2", "tp2"),
                *("pp2 dp2 zero1 full", "tp2 cut", "tp2 columns2", "pp2 dp2 zero2", "dp2 zero3"),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_job_that_changes_its_layout_every_two_steps_goes_on_the_same(
    tmp_path: Path, family: str, layouts: list[str]
) -> None:
    """After a wrong weight the next loss is wrong, after a wrong moment the one after it."""
    shape = make_shape(family, num_layers=4, tied_embeddings=family == "gpt")
    settings = CheckpointSettings(directory=str(tmp_path / "saved"), every=2)
    found, steps = dict[int, float](), 2 * len(layouts)
    for end, words in zip(range(2, steps + 1, 2), layouts, strict=True):
        layout = layout_of(values_of(words))
        job = make_job(tmp_path, layout, shape=shape, steps=end, checkpoint=settings)
        found |= losses_of(run_job(job))
    alone = make_job(tmp_path, make_layout(), shape=shape, steps=steps, checkpoint=None)
    expected = losses_of(run_job(alone))
    assert list(found) == list(expected) == list(range(steps))
    limits = training_tolerance(shape, OptimizerSettings(clip_grad_norm=1.0), steps=steps).losses
    off = [step for step, loss in expected.items() if abs(found[step] - loss) > limits[step]]
    assert not off, [layouts[step // 2] for step in off]
    assert len(set(expected.values())) == steps, "the loss tells the steps apart"


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


STATES = {"optimizer_states": "bf16"}


def test_unequal_stages_and_16_bit_states_go_on_to_the_bit_in_other_stages(tmp_path: Path) -> None:
    """Stages change no sum, and moments are stored as they are."""
    shape, settings = (
        make_shape(num_layers=4),
        CheckpointSettings(directory=str(tmp_path / "saved"), every=2),
    )
    common = {"shape": shape, "clip_grad_norm": None}
    found, stages = dict[int, float](), ("Et*3|tL", "split", "E|t*3|t|L", "E|t|tt|tL")
    for end, (text, axes) in zip(
        (2, 4, 6, 8), zip(stages, ({"pp": 2}, {}, {"pp": 4}, VPP), strict=True), strict=True
    ):
        layout = make_layout(**axes | STATES, pipeline_layout=text)
        job = make_job(tmp_path, layout, steps=end, checkpoint=settings, **common)
        found |= losses_of(run_job(job))
    alone = make_job(tmp_path, make_layout(**STATES), steps=8, checkpoint=None, **common)
    assert found == losses_of(run_job(alone))
    assert len(set(found.values())) == 8, "the loss tells the steps apart"


def test_16_bit_states_load_into_fp32_ones(tmp_path: Path) -> None:
    """The next update is the same, and only after it one layout rounds its moments."""
    save_half(tmp_path, make_layout(**STATES))
    stored = converted(tmp_path / "saved" / "step-00000004")["optimizer"]
    for name in ("exp_avg", "exp_avg_sq"):
        assert {moment.dtype for moment in stored[name].values()} == {torch.bfloat16}
    found = losses_of(run_job(make_job(tmp_path, make_layout(**STATES))))
    (tmp_path / "saved" / "step-00000008").rename(tmp_path / "away")
    in_fp32 = losses_of(run_job(make_job(tmp_path, make_layout())))
    assert [step for step in found if found[step] == in_fp32[step]] == [SAVED_AT, SAVED_AT + 1]


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
    return torch.load(out, weights_only=True)


TIED = make_shape("gpt", tied_embeddings=True)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What torch's own tool reads of a checkpoint of ranks that shard and cut the layers."""
    folder = tmp_path_factory.mktemp("converted")
    save_half(folder, make_layout(dp=2, pp=2, zero_stage=1, recompute="full"), shape=TIED)
    return converted(folder / "saved" / "step-00000004")


def test_torch_s_own_tool_reads_weights_and_moments(state: dict[str, Any]) -> None:
    assert set(state) == {"model", "optimizer"}
    assert set(state["optimizer"]) == {"exp_avg", "exp_avg_sq"}


def test_torch_s_own_tool_reads_canonical_names(state: dict[str, Any]) -> None:
    weights = state["model"]
    assert weights["layers.1.attention.query.weight"].shape == (32, 32)
    assert weights["embedding.weight"].shape == (64, 32)
    assert sum(weight.numel() for weight in weights.values()) == TIED.num_parameters


def test_a_tied_weight_is_stored_once(state: dict[str, Any]) -> None:
    assert not any(name.startswith("head") for name in state["model"])


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_each_weight_has_a_moment_of_its_shape(state: dict[str, Any], moment: str) -> None:
    weights, moments = state["model"], state["optimizer"][moment]
    assert {name: each.shape for name, each in moments.items()} == {
        name: each.shape for name, each in weights.items()
    }
    assert all(each.abs().sum() > 0 for each in moments.values())


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
    assert newest[1].samples == 4 * 8 + 2 * 16


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


def test_a_checkpoint_of_another_job_is_refused_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_half(tmp_path, make_layout())
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(bytes(1000))
    data = TokenFileSettings(tokens=str(tokens), dtype="uint16")
    path = tmp_path / "job.json"
    for change, sentence in (
        ({"seed": 1}, "step-00000004 belongs to another job: seed=0, and the job has 1; name"),
        ({"shape": make_shape(vocab_size=128)}, "vocab_size=64, and the job has 128"),
        ({"shape": make_shape("gpt")}, "family='llama', and the job has 'gpt'"),
        ({"data": data}, "tokens of synthetic ones, and the job 500 of uint16"),
    ):
        path.write_text(json.dumps(make_job(tmp_path, make_layout(), **change).to_mapping()))
        assert main(["--config", str(path)]) == 2
        assert sentence in capsys.readouterr().err
    renamed = replace(make_shape(), name="other")  # is no part of the shape
    done = run_job(make_job(tmp_path, make_layout(), shape=renamed, steps=SAVED_AT))
    assert kinds_of(done) == ["resume"]
    assert (done[-1]["steps"], done[-1]["tokens_per_s"]) == (0, None), "it is done, and ends well"


def test_a_damaged_checkpoint_is_one_clear_error(tmp_path: Path) -> None:
    save_half(tmp_path, make_layout())
    record = path_of_record(tmp_path, 4)
    metadata, aside = record.with_name(".metadata"), tmp_path / "aside"
    for damage, sentence in (
        (lambda: metadata.rename(aside), "its .metadata is missing"),
        (lambda: aside.rename(metadata) and record.write_text("{}"), "format=None"),
        (lambda: record.write_text("{"), "can't be used"),
        (record.unlink, "No such file"),
    ):
        damage()
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


def test_a_rank_that_does_not_see_the_directory_ends_the_job(tmp_path: Path) -> None:
    def enter_a_folder_of_its_own(rank: int) -> None:
        (tmp_path / str(rank)).mkdir()
        os.chdir(tmp_path / str(rank))

    job = make_job(Path(), make_layout(dp=2))
    with pytest.raises(RanksFailedError, match=r"rank 1 on .* does not see the checkpoint direct"):
        run_job(job, enter_a_folder_of_its_own)


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
