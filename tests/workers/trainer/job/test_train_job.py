"""The training job: its document, and its run alone, under torchrun, and with srun's variables."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.workers.trainer.errors import RankContextInvalidError, TrainJobInvalidError
from layout_tuner.workers.trainer.job.job import TrainJob, read_job
from layout_tuner.workers.trainer.job.launch import shares_devices
from layout_tuner.workers.trainer.job.launcher_environment import (
    first_host,
    is_rank,
    slurm_meeting_point,
)
from layout_tuner.workers.trainer.train import main
from tests.kit.python_process import printed_by
from tests.workers.trainer.cases import make_layout, make_shape, train
from tests.workers.trainer.ranks import run_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


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
        ({"learning_rate": float("inf")}, r"learning_rate=inf is not a number of at least 0, and "),
        ({"learning_rate": float("nan")}, r"learning_rate=nan"),
        ({"weight_decay": -0.1}, r"weight_decay=-0.1"),
        ({"weight_decay": 10**400}, r"weight_decay=1000"),
        ({"clip_grad_norm": float("inf")}, r"clip_grad_norm=inf is not a number over 0, and fini"),
        ({"seed": -1}, r"seed=-1 is not a whole number of at least 0"),
        ({"seed": True}, r"seed=True is not a whole number"),
        ({"clip_grad_norm": 0}, r"clip_grad_norm=0 is not a number over 0"),
        ({"compile": 1}, r"compile=1 is not true or false"),
        ({"layout": {"tp": 0}}, r"the job's layout is invalid: tp=0"),
        ({"model": None}, r"the job's model is missing"),
    ],
)
def test_a_malformed_job_names_the_field(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TrainJobInvalidError, match=sentence):
        TrainJob.from_mapping({**make_job().to_mapping(), **change})


def run(command: list[str], timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env)


def write_job(folder: Path, job: TrainJob) -> str:
    path = folder / "job.json"
    path.write_text(json.dumps(job.to_mapping()))
    return str(path)


def assert_result(document: str, job: TrainJob) -> None:
    result = json.loads(document)
    run_alone = train(job.model, job.layout, steps=job.steps)
    assert result["first_loss"] == run_alone.losses[0]
    assert result["final_loss"] == run_alone.losses[-1]
    assert result["steps"] == job.steps
    assert result["warmup"] == job.warmup
    assert result["oversubscribed"] is (job.layout.num_devices > len(os.sched_getaffinity(0)))
    assert result["tokens_per_step"] == 8 * job.model.seq_length
    tokens_per_s = result["tokens_per_step"] / result["step_time_s"]
    assert result["tokens_per_s"] == pytest.approx(tokens_per_s)
    assert 0 < result["mfu"] < 1


def assert_progress(lines: list[str], job: TrainJob) -> None:
    """A line a step, then the median."""
    steps = [line.split("  loss")[0] for line in lines[:-1]]
    assert steps == [f"step {index:>4}" for index in range(job.steps)]
    assert lines[-1].startswith("tokens/s: ")
    assert lines[-1].endswith(f"(median of {job.steps - job.warmup} steps)")


TRAIN = ("-m", "layout_tuner.workers.trainer.train", "--config")


def test_a_job_of_one_rank_runs_without_a_launcher(tmp_path: Path) -> None:
    job, shown = make_job(), io.StringIO()

    def work(rank: int, store: Any) -> tuple[int, str]:
        with redirect_stdout(shown):
            return main(["--config", write_job(tmp_path, job)]), shown.getvalue()

    [(code, printed)] = run_ranks(1, work, own_group=True)
    assert code == 0
    *progress, document = printed.splitlines()
    assert_progress(progress, job)
    assert_result(document, job)


def test_json_is_all_of_stdout_and_the_progress_goes_aside(tmp_path: Path) -> None:
    config = write_job(tmp_path, make_job())
    changes = ["--steps", "3", "--warmup", "1", "--json"]
    done = run([sys.executable, *TRAIN, config, *changes])
    assert done.returncode == 0, done.stderr
    assert_result(done.stdout, make_job(steps=3, warmup=1))
    assert_progress(done.stderr.splitlines(), make_job(steps=3, warmup=1))


@pytest.mark.slow
def test_a_job_that_is_to_be_compiled_is_not_run_where_it_can_t_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = run([sys.executable, *TRAIN, write_job(tmp_path, make_job(compile=True))])
    assert done.returncode == 1
    assert "compile=true needs a C++ compiler" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_job_runs_under_torchrun(tmp_path: Path) -> None:
    job = make_job(layout=Layout(tp=2, micro_batch_size=2, num_microbatches=4))
    config = write_job(tmp_path, job)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run([*launcher, *TRAIN, config], timeout_s=110.0)
    assert done.returncode == 0, done.stderr
    *progress, document = done.stdout.splitlines()
    assert_progress(progress, job)
    assert_result(document, job)


@pytest.mark.parametrize(
    ("job", "changes", "sentence"),
    [
        (make_job(), ["--steps", "2"], "warmup=2 leaves none of steps=2"),
        (make_job(layout=make_layout(tp=3)), [], "num_heads=4 is not divisible by tp=3"),
        (make_job(layout=make_layout(tp=2)), [], "1 ranks were started for a layout of tp=2"),
    ],
)
def test_what_cannot_run_is_refused_before_any_rank_works(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    job: TrainJob,
    changes: list[str],
    sentence: str,
) -> None:
    assert main(["--config", write_job(tmp_path, job), *changes]) == 2
    shown = capsys.readouterr()
    assert sentence in shown.err
    assert shown.err.startswith("Error: ")
    assert shown.out == ""


def test_steps_and_warmup_are_judged_together(tmp_path: Path) -> None:
    path = Path(write_job(tmp_path, make_job(steps=5, warmup=4)))
    assert read_job(path) == make_job(steps=5, warmup=4)
    assert read_job(path, steps=2, warmup=1) == make_job(steps=2, warmup=1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "is not a readable JSON file"),
        ("{", "is not a readable JSON file"),
        ("[" * 100_000, "is not a readable JSON file"),
        ("\x00", "is not a readable JSON file"),
        ("[1, 2]", r"holds \[1, 2\] where an object of the job's fields should be"),
        ('{"format": "megatron"}', "job.json: format='megatron'"),
    ],
)
def test_a_missing_or_malformed_job_file_is_one_clear_error(
    tmp_path: Path, text: str | None, sentence: str
) -> None:
    path = tmp_path / "job.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TrainJobInvalidError, match=sentence) as caught:
        read_job(path)
    assert str(path) in str(caught.value)


def test_reading_and_printing_a_job_need_no_torch() -> None:
    printed_by(
        "import sys, layout_tuner.workers.trainer.job.job, layout_tuner.workers.trainer.job.progress\n"
        "assert not {'torch', 'ray'} & set(sys.modules)"
    )


STEP = {"SLURM_STEP_ID": "0"}
PROGRAMS = {
    "module": ["-m", "layout_tuner.workers.trainer.train"],
    "command": ["-c", "from layout_tuner.cli.processes.worker import train; train()"],
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_job_runs_under_srun_s_variables(tmp_path: Path, program: str) -> None:
    config = write_job(tmp_path, make_job(layout=Layout(dp=2), steps=2, warmup=0))
    clean = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    common = {"SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, *PROGRAMS[program], "--config", config, "--json"],
            env={
                **clean, **common, "GLOO_SOCKET_IFNAME": "lo",
                "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    result = json.loads(said[0][0])
    assert (result["steps"], result["layout"]["dp"]) == (2, 2)
    assert result["oversubscribed"] is (len(os.sched_getaffinity(0)) < 2)
    assert said[1][0] == ""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, True),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4", **STEP}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "MASTER_ADDR": "node1"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, False),  # the batch script itself
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}, False),
        ({**STEP, "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}, False),
    ],
)
def test_a_rank_is_told_from_a_batch_script(environment: dict[str, str], expected: bool) -> None:
    assert is_rank(environment) is expected


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("login1", "login1"),
        ("node1,node2", "node1"),
        ("frontier[00003-00007,00012]", "frontier00003"),
        ("rack2-node[7,9]-ib,login1", "rack2-node7-ib"),
        ("node[1-2],gpu[3-4]", "node1"),
        ("", ""),
    ],
)
def test_the_first_host_is_taken_from_slurm_s_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_ranks_meet_on_the_first_host_unless_told_where() -> None:
    step = {"SLURM_STEP_NODELIST": "n[3-4]", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_ID": "77"}
    host, port = slurm_meeting_point(step)
    assert host == "n3"
    assert 20000 <= port < 30000
    assert slurm_meeting_point({**step, "SLURM_STEP_ID": "1"}) == ("n3", port + 1)
    assert slurm_meeting_point({**step, "SLURM_JOB_ID": "78"})[1] != port
    told = {**step, "MASTER_ADDR": "here", "MASTER_PORT": "12"}
    assert slurm_meeting_point(told) == ("here", 12)
    with pytest.raises(RankContextInvalidError, match="neither MASTER_ADDR nor"):
        slurm_meeting_point({"SLURM_JOB_ID": "1"})


def test_ranks_that_outnumber_the_cores_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, shared in ((1, True), (2, False)):
        monkeypatch.setattr(
            "layout_tuner.workers.trainer.job.launch.usable_cores", lambda cores=cores: cores
        )
        store = HashStore()
        assert shares_devices(store, 1, 2, "cpu") is False, "rank 0 is the one who is told"
        assert shares_devices(store, 0, 2, "cpu") is shared


def test_ranks_that_are_bound_to_a_core_each_share_none(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    shares_devices(store, 1, 2, "cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4})
    assert shares_devices(store, 0, 2, "cpu") is False
    shares_devices(store, 1, 2, "cpu")
    assert shares_devices(store, 0, 2, "cpu") is True, "both are bound to one core"


def arbitrary(tmp_path: Path, text: str, **more: str) -> dict[str, str]:
    """A task of two nodes with srun's arbitrary distribution, and its file of hosts."""
    file = tmp_path / "hosts"
    file.write_text(text)
    step = {"SLURM_STEP_NODELIST": "n[3-4]", "SLURM_DISTRIBUTION": "arbitrary", "SLURM_JOB_ID": "7"}
    return {**step, "SLURM_HOSTFILE": str(file), **more}


@pytest.mark.parametrize("text", ["n4\nn3\n", "n4,n3", "# ours\nn4*2\nn3*2", "n[4],n3"])
def test_with_an_arbitrary_distribution_ranks_meet_on_the_first_host_of_the_file(
    tmp_path: Path, text: str
) -> None:
    for rank, name in (("0", "n4"), ("3", "n3")):
        task = arbitrary(tmp_path, text, SLURM_PROCID=rank, SLURMD_NODENAME=name)
        assert slurm_meeting_point(task)[0] == "n4"
        assert slurm_meeting_point({**task, "MASTER_ADDR": "n9"})[0] == "n9"
        assert slurm_meeting_point({**task, "SLURM_DISTRIBUTION": "cyclic"})[0] == "n3"


def test_an_arbitrary_distribution_without_a_file_that_says_it_is_refused(tmp_path: Path) -> None:
    said = "does not say on which host rank 0 runs: set MASTER_ADDR to it"
    for changes in (
        {"SLURM_HOSTFILE": str(tmp_path / "none")},
        {"SLURM_HOSTFILE": ""},
        {"SLURM_PROCID": "0", "SLURMD_NODENAME": "n3"},
    ):
        with pytest.raises(RankContextInvalidError, match=said):
            slurm_meeting_point(arbitrary(tmp_path, "n4\nn3", **changes))
    alone = arbitrary(tmp_path, "", SLURM_STEP_NODELIST="n3")
    assert slurm_meeting_point(alone)[0] == "n3"
