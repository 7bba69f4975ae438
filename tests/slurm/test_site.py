"""The pretended site: jobs run, learn of themselves, nodes come and go, and nothing is left."""

from __future__ import annotations

import json
import sys
from contextlib import closing

import psutil
import pytest

from layout_tuner.workers.errors import SlurmUnavailableError
from layout_tuner.workers.slurm.jobs import current_allocation, ends_in_s
from tests.kit.waiting import wait_until
from tests.slurm.site import SlurmSite, why_not
from tests.workers.process_checks import command_line

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def test_a_step_runs_on_every_node_and_sees_its_devices_as_on_frontier(slurm: SlurmSite) -> None:
    script = "echo $SLURMD_NODENAME $ROCR_VISIBLE_DEVICES"
    step = slurm.run("srun", "-N4", "--ntasks-per-node=1", "--gpus-per-node=8", "sh", "-c", script)
    assert sorted(step.stdout.split("\n")[:-1]) == [
        f"{name} 0,1,2,3,4,5,6,7" for name in slurm.node_names
    ]


def test_nothing_is_left_of_a_site_not_even_what_its_jobs_daemonised() -> None:
    if reason := why_not():
        pytest.skip(reason)
    with closing(SlurmSite(num_nodes=1)) as site:
        job = site.submit("--wrap", "setsid sleep 1000 & sleep 1000")
        wait_until("both sleep", lambda: _sleeping(site, job) == 2, 60)
        everything = site.processes()
    assert not any(process.is_running() for process in everything)
    assert not site.directory.exists()
    with pytest.raises(psutil.NoSuchProcess):
        psutil.Process(everything[0].pid).cmdline()


def _sleeping(site: SlurmSite, job: int) -> int:
    return sum(command_line(process)[:1] == ["sleep"] for process in site.processes(job))


PROGRAM = """
import dataclasses, json, os
from layout_tuner.workers.slurm.jobs import current_allocation, ends_in_s
held = dataclasses.asdict(current_allocation(os.environ))
print(json.dumps({**held, "ends_in_s": ends_in_s(held["job_id"], os.environ)}))
"""


def test_a_batch_script_learns_its_nodes_and_when_it_ends(slurm: SlurmSite) -> None:
    output = slurm.directory / "output"
    script = f"{sys.executable} -c '{PROGRAM}'; exec sleep 1000"
    job = slurm.submit("-N3", "-t", "10", "-o", str(output), "--wrap", script)
    wait_until("it has printed", lambda: output.exists() and output.read_text(), 60)
    found = json.loads(output.read_text())
    assert found["job_id"] == str(job)
    assert found["node_names"] == ["n1", "n2", "n3"]
    assert 500 < found["ends_in_s"] <= 600
    slurm.run("scontrol", "update", f"jobid={job}", "timelimit=30")
    left_s = ends_in_s(str(job), slurm.environment)
    assert 1500 < left_s <= 1800


def test_without_a_controller_the_end_is_what_the_environment_says() -> None:
    if reason := why_not():
        pytest.skip(reason)
    with closing(SlurmSite(num_nodes=1)) as site:
        site.lose_controller()
        told = {"SLURM_JOB_END_TIME": "99999999999"}
        assert ends_in_s("1", site.environment | told) is not None


def test_outside_of_a_job_there_is_no_allocation(slurm: SlurmSite) -> None:
    assert current_allocation(slurm.environment) is None
    with pytest.raises(SlurmUnavailableError, match="there is no Slurm here"):
        current_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "PATH": "/none"})
