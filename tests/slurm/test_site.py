"""The pretended site itself: jobs run on it, nodes come and go, and nothing of it is left."""

from __future__ import annotations

import psutil
import pytest

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
    with SlurmSite(num_nodes=1) as site:
        job = site.submit("--wrap", "setsid sleep 1000 & sleep 1000")
        wait_until("both sleep", lambda: _sleeping(site, job) == 2, 60)
        everything = site.processes()
    assert not any(process.is_running() for process in everything)
    assert not site.directory.exists()
    with pytest.raises(psutil.NoSuchProcess):
        psutil.Process(everything[0].pid).cmdline()


def _sleeping(site: SlurmSite, job: int) -> int:
    return sum(command_line(process)[:1] == ["sleep"] for process in site.processes(job))
