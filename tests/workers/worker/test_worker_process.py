"""The worker as a process, with real Ray and real ranks, against a small service."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from layout_tuner.search_spaces.clusters.cluster import detect_local_cpu
from layout_tuner.trainers.parameters import Parameter, read_declarations
from tests.kit.waiting import wait_until
from tests.kit.worker_loop import WorkedService, log_of, running_worker

pytestmark = pytest.mark.ranks

NUM_RANKS = min(2, detect_local_cpu().devices_per_node)


@pytest.mark.timeout(400)  # Ray's start takes half a minute where others compute too
@pytest.mark.parametrize("launcher", ["ray", pytest.param("local", marks=pytest.mark.slow)])
def test_a_worker_runs_trials_and_drains_on_sigterm(
    service: WorkedService, mark: str, launcher: str
) -> None:
    def is_under_way() -> bool:
        return service.beats().get(2, {"iterations_done": 0})["iterations_done"] > 1

    for trial_id, iterations in ((1, 2), (2, 100_000)):
        service.add(trial_id, num_devices=NUM_RANKS, warmup=2, iterations=iterations)
    with running_worker(service, "--launcher", launcher) as worker:
        wait_until("the first outcome is posted", lambda: service.outcomes, 180)
        assert service.outcomes[0]["outcome"]["state"] == "completed"
        wait_until("the second trial is under way", is_under_way, 60)
        worker.terminate()
        assert worker.wait(60) == 0
    assert service.unregistered == ["session-1"]
    assert list(service.posted()) == [1]


def test_a_worker_reports_what_campaigns_may_set(
    service: WorkedService, mark: str, tmp_path: Path
) -> None:
    declared = {
        "rate": {"type": "float", "minimum": 0.001, "default": 0.01},
        "tag": {"type": "text", "pattern": "(a+)+"},
    }
    plain = {"name": "plain", "version": "2", "command": ["true"]}
    theirs = {"name": "theirs", "version": "1", "command": ["true"], "parameters": declared}
    (file := tmp_path / "trainers.json").write_text(json.dumps({"trainers": [theirs, plain]}))
    options = ("--launcher", "local", "--trainers", str(file), "--end-when-idle", "0")
    service.spool_dir.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        with running_worker(service, *options) as worker:
            assert worker.wait(60) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((service.spool_dir / "lock").stat().st_mode) == 0o600
    (said,) = service.registrations
    assert said["trainers"] == {"theirs": "1", "plain": "2"}
    assert said["trainer_parameters"].keys() == {"theirs", "plain"}
    assert said["trainer_parameters"]["plain"] == {}
    assert said["trainer_knobs"] == {"theirs": {}, "plain": {}}
    assert read_declarations(said["trainer_parameters"]["theirs"]) == {
        "rate": Parameter(type="float", minimum=0.001, default=0.01),
        "tag": Parameter(type="text", pattern=".*"),
    }


@pytest.mark.slow
def test_a_worker_ends_by_itself_before_its_allocation(service: WorkedService, mark: str) -> None:
    with running_worker(service, "--launcher", "local", "--time-left", "32") as worker:
        assert worker.wait(60) == 0
    assert service.unregistered == ["session-1"]
    allocation = service.registrations[0]["allocation"]
    assert (allocation["scheduler"], allocation["launcher"]) == ("none", "local")
    assert 0 < allocation["ends_in_s"] <= 32
    assert "the allocation's time is over" in log_of(service).read_text()
