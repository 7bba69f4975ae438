"""nanotron's YAML file, and a launch script."""

from __future__ import annotations

from typing import Final

from api.exporters.base import ExportFormat, ExportSource, RenderedJob
from api.exporters.launch_script import HERE, LaunchScript
from api.exporters.yaml_file import yaml_file
from search_spaces.trainers.nanotron import NANOTRON

CONFIG_FILE: Final = "nanotron.yaml"


def _render(source: ExportSource) -> RenderedJob:
    script = LaunchScript(
        name="nanotron.sh",
        target_version=NANOTRON.target_version,
        required=("NANOTRON_DIR=/path/to/nanotron",),
        setup=(
            ': "${NANOTRON_DIR:?set it to a checkout of nanotron v0.4}"',
            HERE,
            "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        ),
        program=(f'PROGRAM=("$NANOTRON_DIR/run_train.py" --config-file "$HERE/{CONFIG_FILE}")',),
    )
    config = yaml_file(CONFIG_FILE, NANOTRON, source)
    return RenderedJob(files=(config, script.file(source)), commands=script.commands(source))


NANOTRON_FORMAT: Final = ExportFormat(adapter=NANOTRON, render=_render)
