"""The job file of the embedded trainer, for `layout-tuner train`."""

from __future__ import annotations

import json
from typing import Final

from api.exporters.base import ExportCommand, ExportFile, ExportFormat, ExportSource, RenderedJob
from search_spaces.trainers.base import TrainerJob
from search_spaces.trainers.embedded import EMBEDDED

JOB_FILE: Final = "job.json"


def _render(source: ExportSource) -> RenderedJob:
    """Writes job.json: the probe's model, layout and seed, with a number of steps."""
    content = json.dumps(EMBEDDED.values(source.job), indent=2) + "\n"
    return RenderedJob(
        files=(ExportFile(name=JOB_FILE, content=content),), commands=_commands(source.job)
    )


def _commands(job: TrainerJob) -> tuple[ExportCommand, ...]:
    num_nodes, per_node = str(job.layout.num_nodes), str(job.ranks_per_node)
    module = ("-m", "workers.trainer.train", "--config", JOB_FILE)
    if job.layout.num_nodes > 1:
        tasks = ("--nodes", num_nodes, "--ntasks-per-node", per_node)
        when = f"in a Slurm allocation of {num_nodes} nodes"
        return (ExportCommand(when=when, words=("srun", *tasks, "python", *module)),)
    return (
        ExportCommand(when="here", words=("layout-tuner", "train", "--config", JOB_FILE)),
        ExportCommand(
            when="under torchrun", words=("torchrun", "--nproc-per-node", per_node, *module)
        ),
    )


EMBEDDED_FORMAT: Final = ExportFormat(adapter=EMBEDDED, render=_render)
