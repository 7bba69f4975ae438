"""Accelerate's YAML file, and a launch script for a user's own program."""

from __future__ import annotations

from typing import Final

from api.exporters.base import ExportFormat, ExportSource, RenderedJob
from api.exporters.launch_script import ACCELERATE_NODES, HERE, LaunchScript, exported
from api.exporters.yaml_file import yaml_file
from search_spaces.trainers.accelerate import ACCELERATE, accelerate_environment
from search_spaces.trainers.placeholders import environment_values

CONFIG_FILE: Final = "accelerate.yaml"


def _render(source: ExportSource) -> RenderedJob:
    environment = {
        **environment_values(source.job),
        **accelerate_environment(source.job.layout),
    }
    script = LaunchScript(
        name="accelerate.sh",
        target_version=ACCELERATE.target_version,
        required=("TRAIN_SCRIPT=/path/to/train.py",),
        setup=(
            ': "${TRAIN_SCRIPT:?set it to your training script}"',
            HERE,
            *exported(environment),
        ),
        program=(f'PROGRAM=(--config_file "$HERE/{CONFIG_FILE}" "$TRAIN_SCRIPT")',),
        launches=ACCELERATE_NODES,
    )
    config = yaml_file(CONFIG_FILE, ACCELERATE, source)
    return RenderedJob(files=(config, script.file(source)), commands=script.commands(source))


ACCELERATE_FORMAT: Final = ExportFormat(adapter=ACCELERATE, render=_render)
