"""An exported launch script in an allocation that was made with a distribution of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.exports.export import export
from layout_tuner.trainers.exports.export_source import ExportSource
from tests.slurm.allocations import allocation
from tests.slurm.site import SlurmSite

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def test_ranks_stand_in_the_order_of_the_nodes_and_meet_on_the_first(
    slurm: SlurmSite, tmp_path: Path
) -> None:
    job = TrainerJob(model=model_preset("tiny-llama"), layout=Layout(num_nodes=2, dp=4), seed=3)
    for file in export("command", ExportSource(campaign="wide", trial=7, job=job)).files:
        (tmp_path / file.name).write_text(file.content)
    (script,) = tmp_path.glob("*.sh")
    hosts = tmp_path / "hosts"
    hosts.write_text("n2\nn1\nn2\nn1\n")
    program = ("sh", "-c", "echo $RANK $SLURMD_NODENAME $MASTER_ADDR")
    with allocation(slurm, 2) as job_id:
        theirs = {"SLURM_HOSTFILE": str(hosts), "SLURM_DISTRIBUTION": "cyclic"}
        inside = {"SLURM_JOB_ID": job_id, "SLURM_JOB_NODELIST": "n[1-2]", "LAUNCH": "srun"}
        done = slurm.run("bash", str(script), *program, **theirs, **inside)
    assert sorted(done.stdout.splitlines()) == ["0 n1 n1", "1 n1 n1", "2 n2 n1", "3 n2 n1"]
