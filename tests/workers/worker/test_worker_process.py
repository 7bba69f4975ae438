"""The worker as a process, with real Ray and real ranks, against a small service."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from search_spaces.protocol.outcome import ProbeRequest
from search_spaces.spec.cluster import detect_local_cpu
from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.models import model_preset
from tests.kit.waiting import wait_until
from tests.workers.fake_service import TOKEN, FakeService
from tests.workers.process_checks import MARK, command_line, kill, marked

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[3]
NUM_RANKS = min(2, detect_local_cpu().devices_per_node)


def make_request(iterations: int) -> dict[str, object]:
    request = ProbeRequest(
        model=model_preset("tiny"), layout=Layout(dp=NUM_RANKS), warmup=2, iterations=iterations
    )
    return request.to_mapping()


@contextmanager
def running_worker(
    service: FakeService, tmp_path: Path, mark: str, *options: str, token: str = TOKEN
) -> Iterator[subprocess.Popen[str]]:
    """A worker process; whatever it leaves behind fails the test."""
    token_file = tmp_path / "token"
    token_file.write_text(token + "\n")
    program = "from workers.commands.commands import worker; worker()"
    with (tmp_path / "worker.log").open("w") as log:
        worker = subprocess.Popen(
            [
                *(sys.executable, "-c", program, "--url", service.url),
                *("--token-file", str(token_file), "--spool-dir", str(tmp_path / "spool")),
                *options,
            ],
            env={**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)},
            stderr=log,
            text=True,
        )
        try:
            yield worker
            wait_until("no process of the worker is left", lambda: not marked(mark), 10)
        finally:
            kill(marked(mark))
            worker.wait()


def is_under_way(service: FakeService, trial_id: int) -> bool:
    """Whether the ranks of a trial are at their iterations."""
    beats = [beat for body in service.heartbeats[-1:] for beat in body["trials"]]
    return any(beat["trial_id"] == trial_id and beat["iterations_done"] > 1 for beat in beats)


def test_a_worker_runs_trials_and_drains_on_sigterm(service: FakeService, tmp_path: Path) -> None:
    service.add_trial(1, make_request(2))
    service.add_trial(2, make_request(100_000))
    with running_worker(service, tmp_path, uuid.uuid4().hex) as worker:
        wait_until("the first outcome is posted", lambda: service.outcomes, 60)
        assert service.outcomes[0]["outcome"]["state"] == "completed"
        wait_until("the second trial is under way", lambda: is_under_way(service, 2), 30)
        worker.terminate()
        assert worker.wait(15) == 0
    assert service.unregistered == ["session-1"]
    assert [outcome["trial_id"] for outcome in service.outcomes] == [1]


@pytest.mark.slow
def test_a_worker_ends_by_itself_in_time_before_its_allocation_does(
    service: FakeService, tmp_path: Path
) -> None:
    options = ("--launcher", "local", "--time-left", "32")
    with running_worker(service, tmp_path, uuid.uuid4().hex, *options) as worker:
        assert worker.wait(60) == 0
    assert service.unregistered == ["session-1"]
    allocation = service.registrations[0]["allocation"]
    assert (allocation["scheduler"], allocation["launcher"]) == ("none", "local")
    assert 0 < allocation["ends_in_s"] <= 32
    assert "the allocation's time is over" in (tmp_path / "worker.log").read_text()


@pytest.mark.slow
def test_a_worker_runs_trials_by_this_machines_zygote_alone(
    service: FakeService, tmp_path: Path
) -> None:
    for trial_id in (1, 2, 3):
        service.add_trial(trial_id, make_request(2))
    options = ("--launcher", "local", "--end-when-idle", "1")
    with running_worker(service, tmp_path, uuid.uuid4().hex, *options) as worker:
        assert worker.wait(100) == 0
    states = {body["trial_id"]: body["outcome"]["state"] for body in service.outcomes}
    assert states == dict.fromkeys((1, 2, 3), "completed")


@pytest.mark.slow
def test_sigkill_of_a_worker_leaves_no_rank_no_zygote_and_no_ray(
    service: FakeService, tmp_path: Path
) -> None:
    mark = uuid.uuid4().hex
    service.add_trial(2, make_request(100_000))
    with running_worker(service, tmp_path, mark) as worker:
        wait_until("the trial is under way", lambda: is_under_way(service, 2), 60)
        command_lines = [" ".join(command_line(process)) for process in marked(mark)]
        zygotes = [
            line
            for line in command_lines
            if "workers.ranks.zygote" in line and "workers.ranks.warden" not in line
        ]
        assert len(zygotes) == 2 + NUM_RANKS  # the group's keeper and the ranks are forks of it
        (raylet,) = [line for line in command_lines if "--raylet_socket_name=" in line]
        directory = Path(re.findall(r"--raylet_socket_name=(\S+?lt-ray-\w+)/", raylet)[0])
        assert directory.is_dir()
        worker.kill()
        wait_until(
            "no rank is left",
            lambda: (
                not any("workers.ranks.zygote" in " ".join(command_line(p)) for p in marked(mark))
            ),
            2,
        )
    assert not directory.exists()


def test_a_worker_with_a_wrong_token_ends_with_one_line(
    service: FakeService, tmp_path: Path
) -> None:
    with running_worker(service, tmp_path, uuid.uuid4().hex, token="wrong") as worker:
        assert worker.wait(30) == 1
    lines = (tmp_path / "worker.log").read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: the service at http://127.0.0.1:")
    assert lines[0].endswith("answered 401: the token is unknown; check the token file")


def test_outcomes_that_wait_are_the_users_alone_whatever_the_umask(
    service: FakeService, tmp_path: Path
) -> None:
    spool = tmp_path / "spool"
    spool.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        with running_worker(service, tmp_path, uuid.uuid4().hex, "--launcher", "local") as worker:
            wait_until("the worker has its spool", (spool / "lock").exists, 30)
            worker.terminate()
            worker.wait(30)
    finally:
        os.umask(before)
    assert stat.S_IMODE((spool / "lock").stat().st_mode) == 0o600
