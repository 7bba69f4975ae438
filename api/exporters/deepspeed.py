"""DeepSpeed's JSON file, and a launch script for a user's own program."""

from __future__ import annotations

import json
from typing import Final

from api.exporters.base import ExportFile, ExportFormat, ExportSource, RenderedJob
from api.exporters.launch_script import HERE, LaunchScript, exported
from search_spaces.trainers.deepspeed import DEEPSPEED
from search_spaces.trainers.placeholders import environment_values

CONFIG_FILE: Final = "ds_config.json"


def _render(source: ExportSource) -> RenderedJob:
    """JSON has no comments: those of the source stand in the script alone."""
    script = LaunchScript(
        name="deepspeed.sh",
        target_version=DEEPSPEED.target_version,
        required=("TRAIN_SCRIPT=/path/to/train.py",),
        setup=(
            ': "${TRAIN_SCRIPT:?set it to your training script}"',
            HERE,
            *exported(environment_values(source.job)),
        ),
        program=(
            f'PROGRAM=("$TRAIN_SCRIPT" --deepspeed --deepspeed_config "$HERE/{CONFIG_FILE}")',
        ),
    )
    content = json.dumps(dict(DEEPSPEED.values(source.job)), indent=2) + "\n"
    config = ExportFile(name=CONFIG_FILE, content=content)
    return RenderedJob(files=(config, script.file(source)), commands=script.commands(source))


DEEPSPEED_FORMAT: Final = ExportFormat(adapter=DEEPSPEED, render=_render)
