"""Jobs that hold nodes and run nothing, and what srun launchers in them leave behind."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from layout_tuner.workers.launchers.slurm_step.srun import StepSettings
from tests.slurm.site import SlurmSite
from tests.workers.process_checks import MARK


@contextmanager
def allocation(site: SlurmSite, num_nodes: int) -> Iterator[str]:
    """The id of a job that holds some nodes until the end of the block."""
    whole = ("--exclusive", "--gpus-per-node=8")
    held = site.run(
        "salloc", "--no-shell", *whole, f"--nodes={num_nodes}", "--no-kill", "--time=10"
    )
    job_id = held.stderr.split("Granted job allocation ")[1].split()[0]
    yield job_id
    site.run("scancel", job_id, check=False)
    site.wait_for_end(int(job_id))


def step_settings(
    site: SlurmSite, job_id: str, names: list[str], mark: str, **changes: Any
) -> StepSettings:
    """Steps of an allocation whose nodes are all this host, each at its own loopback address."""
    settings: Mapping[str, Any] = {
        "job_id": job_id,
        "node_names": tuple(names),
        "addresses": tuple(f"127.0.3.{name.removeprefix('n')}" for name in names),
        "listen_address": "127.0.3.100",
        "num_devices": 2,
        "environment": {**site.environment, MARK: mark},
        "connect_within_s": 60.0,
    }
    return StepSettings(**{**settings, **changes})


def steps(site: SlurmSite, job_id: str) -> list[str]:
    """What Slurm counts among the job's running steps, by name."""
    asked = subprocess.run(
        ["squeue", "--steps", "--noheader", "--jobs", job_id, "-o", "%j"],
        env=site.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return [name for name in asked.stdout.split() if name != "extern"]
