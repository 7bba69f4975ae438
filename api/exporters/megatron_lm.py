"""A launch script for Megatron-LM's pretrain_gpt.py."""

from __future__ import annotations

import shlex
from typing import Final

from api.exporters.base import ExportFormat, ExportSource, RenderedJob
from api.exporters.launch_script import LaunchScript
from search_spaces.trainers.megatron_lm import MEGATRON_LM, argument_groups

_RUN: Final = (
    ["--train-iters", "100", "--lr", "1e-4", "--lr-decay-style", "constant"],
    ["--eval-iters", "0", "--log-interval", "1", "--log-throughput"],
)
_MOCK_DATA: Final = (
    "mock data and a constant learning rate stand in the script; give your own as DATA_ARGS and "
    "further arguments"
)


def _render(source: ExportSource) -> RenderedJob:
    """Writes a script with the layout, the model's shape and mock data."""
    groups = [*argument_groups(source.job), *_RUN]
    script = LaunchScript(
        name="megatron-lm.sh",
        target_version=MEGATRON_LM.target_version,
        required=("MEGATRON_DIR=/path/to/Megatron-LM",),
        usage=('real data instead of mock data: DATA_ARGS="--data-path ... --split 99,1,0"',),
        setup=(
            ': "${MEGATRON_DIR:?set it to a checkout of Megatron-LM}"',
            "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        ),
        program=(
            'read -r -a DATA <<<"${DATA_ARGS:---mock-data}"',
            'PROGRAM=("$MEGATRON_DIR/pretrain_gpt.py"',
            *("    " + shlex.join(words) for words in groups),
            '    "${DATA[@]}"',
            ")",
        ),
    )
    return RenderedJob(
        files=(script.file(source),), commands=script.commands(source), notes=(_MOCK_DATA,)
    )


MEGATRON_LM_FORMAT: Final = ExportFormat(adapter=MEGATRON_LM, render=_render)
