"""How the files of each trainer are written; torchtitan has a module of its own."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

import yaml

from layout_tuner.trainers.accelerate import ACCELERATE, accelerate_environment
from layout_tuner.trainers.adapter import TrainerAdapter
from layout_tuner.trainers.axonn import AXONN
from layout_tuner.trainers.command import COMMAND
from layout_tuner.trainers.deepspeed import DEEPSPEED
from layout_tuner.trainers.embedded import EMBEDDED
from layout_tuner.trainers.exports.export_source import ExportSource, RenderedJob
from layout_tuner.trainers.exports.exported import ExportCommandRead, ExportFileRead
from layout_tuner.trainers.exports.launch_script import (
    ACCELERATE_NODES,
    HERE,
    PROGRAM_RANKS,
    LaunchScript,
    exported,
    head_of,
)
from layout_tuner.trainers.megatron_bridge import MEGATRON_BRIDGE, recipe_of
from layout_tuner.trainers.megatron_deepspeed import MEGATRON_DEEPSPEED
from layout_tuner.trainers.megatron_lm import MEGATRON_LM, SHARDING_STRATEGIES
from layout_tuner.trainers.nanotron import NANOTRON
from layout_tuner.trainers.placeholders import ENVIRONMENT_PREFIX, environment_values
from layout_tuner.trainers.shapes import core_fields

JOB_FILE: Final = "job.json"

_OWN_PROGRAM: Final = {"TRAIN_SCRIPT": ("/path/to/train.py", "your training script")}
_ONE_CONNECTION: Final = "export CUDA_DEVICE_MAX_CONNECTIONS=1"

_ANY_CONNECTIONS: Final = "unset CUDA_DEVICE_MAX_CONNECTIONS"

_FILL: Final = f"""\
# {{tp}} in an argument stands for the value of {ENVIRONMENT_PREFIX}TP, and so on.
PROGRAM=()
for word in "$@"; do
    filled=
    while [[ $word =~ \\{{([a-z_][a-z0-9_]*)\\}} ]]; do
        found="${{BASH_REMATCH[0]}}" variable="{ENVIRONMENT_PREFIX}${{BASH_REMATCH[1]^^}}"
        [[ -v $variable ]] || {{ echo "$found is no placeholder; see this script" >&2; exit 2; }}
        filled+="${{word%%"$found"*}}${{!variable}}"
        word="${{word#*"$found"}}"
    done
    PROGRAM+=("$filled$word")
done
set --
[[ ${{#PROGRAM[@]}} -gt 0 ]] || {{ echo "say which program to start" >&2; exit 2; }}"""


def embedded(source: ExportSource) -> RenderedJob:
    """The job file of `layout-tuner train`: the probe's model, layout and seed, with some steps."""
    job, num_nodes = source.job, str(source.job.layout.num_nodes)
    per_node = str(job.ranks_per_node)
    module = ("-m", "layout_tuner.workers.trainer.train", "--config", JOB_FILE)
    words = {
        "here": ("layout-tuner", "train", "--config", JOB_FILE),
        "under torchrun": ("torchrun", "--nproc-per-node", per_node, *module),
    }
    if job.layout.num_nodes > 1:
        tasks = ("--nodes", num_nodes, "--ntasks-per-node", per_node)
        words = {f"in a Slurm allocation of {num_nodes} nodes": ("srun", *tasks, "python", *module)}
    return RenderedJob(
        files=(_json(JOB_FILE, EMBEDDED.values(job)),),
        commands=tuple(ExportCommandRead(when=when, words=[*line]) for when, line in words.items()),
    )


def accelerate(source: ExportSource) -> RenderedJob:
    """Accelerate's YAML file, for a user's own program."""
    config = "accelerate.yaml"
    of_accelerate = accelerate_environment(source.job.layout)
    script = LaunchScript(
        adapter=ACCELERATE,
        required=_OWN_PROGRAM,
        setup=(HERE, *exported({**environment_values(source.job), **of_accelerate})),
        program=(f'PROGRAM=(--config_file "$HERE/{config}" "$TRAIN_SCRIPT")',),
        launches=ACCELERATE_NODES,
    )
    return script.job(source, _yaml(config, ACCELERATE, source))


def axonn(source: ExportSource) -> RenderedJob:
    """The grid of AxoNN's axes as a JSON file, for a user's own program."""
    return _with_json(source, AXONN, "axonn.json", '"$HERE/axonn.json"')


def command(source: ExportSource) -> RenderedJob:
    """A launch script for any program, which gets the layout in environment and arguments."""
    script = LaunchScript(
        adapter=COMMAND,
        arguments=("python", "train.py", "--tp", "{tp}"),
        usage=("a program that starts its ranks by itself: LAUNCH=once",),
        setup=exported(environment_values(source.job)),
        program=(_FILL,),
        launches=PROGRAM_RANKS,
    )
    return script.job(source)


def deepspeed(source: ExportSource) -> RenderedJob:
    """DeepSpeed's JSON file, for a user's own program.

    JSON has no comments: those of the source stand in the script alone.
    """
    arguments = '--deepspeed --deepspeed_config "$HERE/ds_config.json"'
    return _with_json(source, DEEPSPEED, "ds_config.json", arguments)


def _with_json(
    source: ExportSource, adapter: TrainerAdapter, config: str, arguments: str
) -> RenderedJob:
    """The adapter's values as a JSON file, and a script that gives it to a user's own program."""
    script = LaunchScript(
        adapter=adapter,
        required=_OWN_PROGRAM,
        setup=(HERE, *exported(environment_values(source.job))),
        program=(f'PROGRAM=("$TRAIN_SCRIPT" {arguments})',),
    )
    return script.job(source, _json(config, adapter.values(source.job)))


def megatron_bridge(source: ExportSource) -> RenderedJob:
    """Overrides of Megatron-Bridge's recipes, as arguments in a script and as a YAML file."""
    overrides = "megatron-bridge.yaml"
    script = LaunchScript(
        adapter=MEGATRON_BRIDGE,
        required={"BRIDGE_DIR": ("/path/to/Megatron-Bridge", "a checkout of Megatron-Bridge")},
        setup=(_connections(source),),
        program=(
            'PROGRAM=("$BRIDGE_DIR/scripts/training/run_recipe.py"',
            f"    --recipe {recipe_of(source.job.model)} --mode pretrain",
            *(f"    {shlex.quote(word)}" for word in MEGATRON_BRIDGE.arguments(source.job)),
            ")",
        ),
    )
    note = (
        f"{overrides} has the same overrides for a program of your own that reads them with "
        "process_config_with_overrides"
    )
    return script.job(source, after=(_yaml(overrides, MEGATRON_BRIDGE, source),), notes=(note,))


def megatron_deepspeed(source: ExportSource) -> RenderedJob:
    """DeepSpeed's configuration, and a script for Megatron-DeepSpeed's pretrain_gpt.py."""
    config = "ds_config.json"
    script = LaunchScript(
        adapter=MEGATRON_DEEPSPEED,
        required={
            "MEGATRON_DEEPSPEED_DIR": (
                "/path/to/Megatron-DeepSpeed",
                "a checkout of Megatron-DeepSpeed",
            ),
            "DATA_ARGS": (
                "--data-path /path/to/prefix --data-impl mmap --split 99,1,0",
                "the flags of the data: there is no mock data",
            ),
        },
        setup=(_ONE_CONNECTION, HERE),
        program=_pretrain(
            "MEGATRON_DEEPSPEED_DIR/pretrain_gpt.py",
            "$DATA_ARGS",
            MEGATRON_DEEPSPEED.argument_groups(source.job),
            "--log-interval 1",
            f'    --deepspeed_config "$HERE/{config}"',
        ),
    )
    note = "a constant learning rate stands in the script; give your own as further arguments"
    return script.job(
        source, after=(_json(config, MEGATRON_DEEPSPEED.values(source.job)),), notes=(note,)
    )


def megatron_lm(source: ExportSource) -> RenderedJob:
    """A script for Megatron-LM's pretrain_gpt.py: the layout, the model's shape, and mock data."""
    script = LaunchScript(
        adapter=MEGATRON_LM,
        required={"MEGATRON_DIR": ("/path/to/Megatron-LM", "a checkout of Megatron-LM")},
        usage=('real data instead of mock data: DATA_ARGS="--data-path ... --split 99,1,0"',),
        setup=(_connections(source),),
        program=_pretrain(
            f"MEGATRON_DIR/pretrain_{'hybrid' if core_fields.is_hybrid(source.job.model) else 'gpt'}.py",
            "${DATA_ARGS:---mock-data}",
            MEGATRON_LM.argument_groups(source.job),
            "--log-interval 1 --log-throughput",
        ),
    )
    note = (
        "mock data and a constant learning rate stand in the script; give your own as DATA_ARGS and "
        "further arguments"
    )
    return script.job(source, notes=(note,))


def _connections(source: ExportSource) -> str:
    """Megatron-LM asks for one connection; Megatron-FSDP refuses one."""
    is_fsdp = source.job.layout.zero_stage in SHARDING_STRATEGIES
    return _ANY_CONNECTIONS if is_fsdp else _ONE_CONNECTION


def nanotron(source: ExportSource) -> RenderedJob:
    """The YAML file of nanotron, and a script."""
    config = "nanotron.yaml"
    script = LaunchScript(
        adapter=NANOTRON,
        required={"NANOTRON_DIR": ("/path/to/nanotron", "a checkout of nanotron v0.4")},
        setup=(HERE, _ONE_CONNECTION),
        program=(f'PROGRAM=("$NANOTRON_DIR/run_train.py" --config-file "$HERE/{config}")',),
    )
    return script.job(source, _yaml(config, NANOTRON, source))


def _pretrain(
    program: str, data: str, groups: Sequence[Sequence[str]], log: str, *more: str
) -> tuple[str, ...]:
    """Lines that set PROGRAM to a program, whose path begins with a variable's name."""
    return (
        f'read -r -a DATA <<<"{data}"',
        f'PROGRAM=("${program}"',
        *(f"    {shlex.join(words)}" for words in groups),
        "    --train-iters 100 --lr 1e-4 --lr-decay-style constant",
        f"    --eval-iters 0 {log}",
        *more,
        '    "${DATA[@]}"',
        ")",
    )


def _json(name: str, values: Mapping[str, Any]) -> ExportFileRead:
    content = json.dumps(dict(values), indent=2) + "\n"
    return ExportFileRead(name=name, content=content, executable=False)


def _yaml(name: str, adapter: TrainerAdapter, source: ExportSource) -> ExportFileRead:
    """The adapter's values, in their order, below the comments of the source."""
    values = yaml.safe_dump(dict(adapter.values(source.job)), sort_keys=False)
    content = f"{head_of(adapter, source)}\n{values}"
    return ExportFileRead(name=name, content=content, executable=False)
