"""A job under the variables that srun and torchrun set, with real processes on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import HashStore

from search_spaces.spec.layout import Layout
from tests.workers.trainer.cases import make_shape
from workers.trainer.errors import RankContextInvalidError
from workers.trainer.job.job import TrainJob
from workers.trainer.job.launch import shares_devices
from workers.trainer.job.launcher_environment import first_host, is_rank, slurm_meeting_point

pytestmark = pytest.mark.ranks

STEP = {"SLURM_STEP_ID": "0"}
PROGRAMS = {
    "module": ["-m", "workers.trainer.train"],
    "command": ["-c", "from workers.commands.commands import train; train()"],
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_job_runs_under_srun_s_variables(tmp_path: Path, program: str) -> None:
    job = TrainJob(model=make_shape(), layout=Layout(dp=2), steps=2, warmup=0)
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job.to_mapping()))
    clean = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        clean.pop(name, None)
    common = {"SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, *PROGRAMS[program], "--config", str(path), "--json"],
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
        monkeypatch.setattr("workers.trainer.job.launch.usable_cores", lambda cores=cores: cores)
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
