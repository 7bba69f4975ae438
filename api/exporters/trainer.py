"""The embedded trainer's own job file, which `layout-tuner train` runs."""

from __future__ import annotations

import json
from typing import Final

from api.exporters.base import ExportBundle, ExportFile, ExportSource

JOB_FORMAT: Final = "layout-tuner/trainer"
JOB_VERSION: Final = 1
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
    ranks = source.layout.num_devices
    return ExportBundle(
        format="trainer",
        target_version=f"job version {JOB_VERSION}",
        files=(ExportFile(name="job.json", content=json.dumps(job, indent=2) + "\n"),),
        notes=(
            "run it: layout-tuner train --config job.json",
            f"or under torchrun: torchrun --nproc-per-node {source.ranks_per_node} "
            f"--nnodes {source.layout.num_nodes} -m workers.trainer.train --config job.json "
            f"({ranks} ranks in all)",
        ),
    )
