"""A YAML file of overrides and a launch script for Megatron-Bridge's recipes."""

from __future__ import annotations

import shlex
from typing import Final

import yaml

from api.exporters.base import ExportFile, ExportFormat, ExportSource, RenderedJob
from api.exporters.launch_script import LaunchScript, commented
from search_spaces.trainers.megatron_bridge import MEGATRON_BRIDGE, RECIPE

_OVERRIDES: Final = "megatron-bridge.yaml"


def _render(source: ExportSource) -> RenderedJob:
    """Writes the overrides as a file, and a script that has them as arguments."""
    script = LaunchScript(
        name="megatron-bridge.sh",
        target_version=MEGATRON_BRIDGE.target_version,
        required=("BRIDGE_DIR=/path/to/Megatron-Bridge",),
        setup=(
            ': "${BRIDGE_DIR:?set it to a checkout of Megatron-Bridge}"',
            "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        ),
        program=(
            'PROGRAM=("$BRIDGE_DIR/scripts/training/run_recipe.py"',
            f"    --recipe {RECIPE} --mode pretrain",
            *("    " + shlex.quote(word) for word in MEGATRON_BRIDGE.arguments(source.job)),
            ")",
        ),
    )
    text: str = yaml.safe_dump(dict(MEGATRON_BRIDGE.values(source.job)), sort_keys=False)
    head = commented((*source.head, f"Written for {MEGATRON_BRIDGE.target_version}."))
    return RenderedJob(
        files=(script.file(source), ExportFile(name=_OVERRIDES, content=f"{head}\n{text}")),
        commands=script.commands(source),
        notes=(
            f"{_OVERRIDES} has the same overrides for a program of your own that reads them with "
            "process_config_with_overrides",
        ),
    )


MEGATRON_BRIDGE_FORMAT: Final = ExportFormat(adapter=MEGATRON_BRIDGE, render=_render)
