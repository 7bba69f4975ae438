"""The training job: its document, and its run alone and under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from search_spaces.layout import Layout
from tests.workers.trainer.cases import make_layout, make_shape, train
from workers.trainer.errors import TrainJobInvalidError
from workers.trainer.job import TrainJob
from workers.trainer.train import main


def make_job(**changes: Any) -> TrainJob:
    return TrainJob(**{"model": make_shape(), "layout": make_layout(), "steps": 5, **changes})


def test_a_job_survives_the_way_through_json() -> None:
    job = make_job(layout=make_layout(tp=2, recompute="full"), clip_grad_norm=1.0, seed=3)
    mapping = json.loads(json.dumps(job.to_mapping()))
    assert mapping["format"] == "layout-tuner/trainer"
    assert mapping["version"] == 1
    assert TrainJob.from_mapping(mapping) == job


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": 2}, r"version=2 is not 'layout-tuner/trainer' version 1"),
        ({"format": "megatron"}, r"format='megatron'"),
        ({"stepz": 3}, r"unknown job field 'stepz'; the fields are model, layout"),
        ({"steps": 0}, r"steps=0 is not a whole number of at least 1"),
        ({"steps": 2.5}, r"steps=2.5"),
        ({"warmup": 5}, r"warmup=5 leaves none of steps=5"),
        ({"learning_rate": "fast"}, r"learning_rate='fast'"),
        ({"clip_grad_norm": 0}, r"clip_grad_norm=0 is not a number over 0"),
        ({"layout": {"tp": 0}}, r"the job's layout is invalid: tp=0"),
        ({"model": None}, r"the job's model is missing"),
    ],
)
def test_a_malformed_job_names_the_field(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TrainJobInvalidError, match=sentence):
        TrainJob.from_mapping({**make_job().to_mapping(), **change})


def run(command: list[str], timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        env.pop(name, None)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, env=env
    )


def write_job(folder: Path, job: TrainJob) -> str:
    path = folder / "job.json"
    path.write_text(json.dumps(job.to_mapping()))
    return str(path)


def assert_result(stdout: str, job: TrainJob) -> None:
    lines = [line for line in stdout.splitlines() if line]
    result = json.loads(lines[-1])
    run_alone = train(job.model, job.layout, steps=job.steps)
    assert result["final_loss"] == run_alone.losses[-1]
    assert result["steps"] == job.steps
    assert result["tokens_per_step"] == 8 * job.model.seq_length
    assert result["tokens_per_s"] == pytest.approx(
        result["tokens_per_step"] / result["step_time_s"]
    )
    assert 0 < result["mfu"] < 1
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == job.steps
    assert f"loss {run_alone.losses[0]:.4f}" in steps[0]


def test_a_job_of_one_rank_runs_without_a_launcher(tmp_path: Path) -> None:
    job = make_job()
    config = write_job(tmp_path, job)
    done = run([sys.executable, "-m", "workers.trainer.train", "--config", config])
    assert done.returncode == 0, done.stderr
    assert_result(done.stdout, job)


@pytest.mark.slow
def test_a_job_runs_under_torchrun(tmp_path: Path) -> None:
    job = make_job(layout=Layout(tp=2, micro_batch_size=2, num_microbatches=4))
    config = write_job(tmp_path, job)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run([*launcher, "-m", "workers.trainer.train", "--config", config], timeout_s=110.0)
    assert done.returncode == 0, done.stderr
    assert_result(done.stdout, job)


def test_the_number_of_steps_can_be_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one that leaves nothing to time, so that it is refused before any rank work."""
    config = write_job(tmp_path, make_job())
    assert main(["--config", config, "--steps", "2"]) == 2
    assert "warmup=2 leaves none of steps=2" in capsys.readouterr().err


def test_a_job_file_that_is_not_json_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.json"
    path.write_text("{")
    assert main(["--config", str(path)]) == 2
    assert "is not a readable JSON file" in capsys.readouterr().err
