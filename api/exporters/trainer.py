"""The job file of the embedded trainer, for `layout-tuner train`."""

from __future__ import annotations

import json
from typing import Final

from api.exporters.base import ExportBundle, ExportCommand, ExportFile, ExportSource

JOB_FORMAT: Final = "layout-tuner/trainer"
JOB_VERSION: Final = 1
JOB_FILE: Final = "job.json"
DEFAULT_STEPS: Final = 100


def export_trainer(source: ExportSource) -> ExportBundle:
    """Writes job.json: the probe's model, layout and seed, with a number of steps."""
    job = {
        "format": JOB_FORMAT,
        "version": JOB_VERSION,
        "model": source.model.to_mapping(),
        "layout": source.layout.to_mapping(),
        "seed": source.seed,
        "steps": DEFAULT_STEPS,
        "warmup": source.warmup,
        "compile": source.compile,
    }
    return ExportBundle(
        format="trainer",
        target_version=f"job version {JOB_VERSION}",
        files=(ExportFile(name=JOB_FILE, content=json.dumps(job, indent=2) + "\n"),),
        commands=_commands(source),
    )


def _commands(source: ExportSource) -> tuple[ExportCommand, ...]:
    num_nodes, per_node = str(source.layout.num_nodes), str(source.ranks_per_node)
    module = ("-m", "workers.trainer.train", "--config", JOB_FILE)
    if source.layout.num_nodes > 1:
        tasks = ("--nodes", num_nodes, "--ntasks-per-node", per_node)
        when = f"in a Slurm allocation of {num_nodes} nodes"
        return (ExportCommand(when=when, words=("srun", *tasks, "python", *module)),)
    return (
        ExportCommand(when="here", words=("layout-tuner", "train", "--config", JOB_FILE)),
        ExportCommand(
            when="under torchrun", words=("torchrun", "--nproc-per-node", per_node, *module)
        ),
    )
