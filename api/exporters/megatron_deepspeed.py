"""DeepSpeed's configuration and a launch script for Megatron-DeepSpeed's pretrain_gpt.py."""

from __future__ import annotations

import json
import shlex
from typing import Final

from api.exporters.base import ExportFile, ExportFormat, ExportSource, RenderedJob
from api.exporters.launch_script import HERE, LaunchScript
from search_spaces.trainers.megatron_deepspeed import MEGATRON_DEEPSPEED, argument_groups

_CONFIG: Final = "ds_config.json"
_RUN: Final = (
    ["--train-iters", "100", "--lr", "1e-4", "--lr-decay-style", "constant"],
    ["--eval-iters", "0", "--log-interval", "1"],
)


def _render(source: ExportSource) -> RenderedJob:
    """Writes DeepSpeed's configuration, and a script with the layout and the model's shape."""
    groups = [*argument_groups(source.job), *_RUN]
    script = LaunchScript(
        name="megatron-deepspeed.sh",
        target_version=MEGATRON_DEEPSPEED.target_version,
        required=(
            "MEGATRON_DEEPSPEED_DIR=/path/to/Megatron-DeepSpeed",
            "DATA_ARGS=--data-path /path/to/prefix --data-impl mmap --split 99,1,0",
        ),
        setup=(
            ': "${MEGATRON_DEEPSPEED_DIR:?set it to a checkout of Megatron-DeepSpeed}"',
            ': "${DATA_ARGS:?set it to the flags of the data: there is no mock data}"',
            "export CUDA_DEVICE_MAX_CONNECTIONS=1",
            HERE,
        ),
        program=(
            'read -r -a DATA <<<"$DATA_ARGS"',
            'PROGRAM=("$MEGATRON_DEEPSPEED_DIR/pretrain_gpt.py"',
            *("    " + shlex.join(words) for words in groups),
            f'    --deepspeed_config "$HERE/{_CONFIG}"',
            '    "${DATA[@]}"',
            ")",
        ),
    )
    content = json.dumps(MEGATRON_DEEPSPEED.values(source.job), indent=2) + "\n"
    return RenderedJob(
        files=(script.file(source), ExportFile(name=_CONFIG, content=content)),
        commands=script.commands(source),
        notes=(
            "a constant learning rate stands in the script; give your own as further arguments",
        ),
    )


MEGATRON_DEEPSPEED_FORMAT: Final = ExportFormat(adapter=MEGATRON_DEEPSPEED, render=_render)
