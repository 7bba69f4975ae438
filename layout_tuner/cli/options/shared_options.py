"""Options that several commands share: of layouts, trainers and allocations."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from layout_tuner.cli.options.command_options import together
from layout_tuner.search_spaces.layouts.knobs import Knob
from layout_tuner.search_spaces.layouts.layout import KNOBS

allocation_options: Final = together(
    click.option(
        "--launcher",
        type=click.Choice(["local", "ray", "srun"]),
        default="ray",
        show_default=True,
        help="How ranks are started: by this machine's zygote, by agents in Ray, or by Slurm steps.",
    ),
    click.option(
        "--ray-address",
        metavar="HOST:PORT",
        help="Ray cluster to join, with its token in RAY_AUTH_TOKEN; by default one is started here.",
    ),
    click.option(
        "--nodes",
        "num_nodes",
        type=click.IntRange(min=1),
        help="Nodes of that cluster, or of each simulated worker; by default those of the Slurm "
        "job, or one.",
    ),
    click.option(
        "--time-left",
        "time_left_s",
        type=click.FloatRange(min=0),
        metavar="SECONDS",
        help="Time until the allocation ends; by default Slurm is asked, inside of a job.",
    ),
    click.option(
        "--end-when-idle",
        "end_when_idle_s",
        type=click.FloatRange(min=0),
        metavar="SECONDS",
        help="End after this time without a trial; by default never.",
    ),
    click.option(
        "--share-nodes/--no-share-nodes",
        default=None,
        help="Whether probes smaller than a node run side by side on one; by default unless its "
        "devices are CPU cores, or as the site says.",
    ),
)
"""The options of an allocation, as arguments of `workers.worker.run_worker.run_worker`."""

trainers_option: Final = click.option(
    "--trainers",
    "trainers_file",
    type=click.Path(path_type=Path),
    help="JSON or YAML file of the programs that probes may run besides the embedded trainer.",
)

MODEL_HELP: Final = (
    "Name of a model preset, or a JSON or YAML file, also a config.json of Hugging Face."
)
seq_length_option: Final = click.option(
    "--seq-length",
    type=click.IntRange(min=1),
    help="Tokens per sequence, of a model whose config.json is given: it does not say them.",
)
cluster_option: Final = click.option(
    "--cluster",
    default="local-cpu",
    show_default=True,
    help="Cluster that this machine is part of.",
)

_WITHOUT_DEFAULT: Final = ("num_microbatches", "precision")
"""Knobs whose value follows from other options where it is not given."""

_GLOBAL_BATCH_SIZE: Final = click.option(
    "--global-batch-size",
    type=int,
    help="Sequences a step: dp * micro_batch_size * num_microbatches. Give this or "
    "--num-microbatches.",
)


def layout_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command an option for each knob except the number of nodes."""
    for knob in reversed(tuple(KNOBS.values())):
        if knob.name == "num_microbatches":
            command = _GLOBAL_BATCH_SIZE(command)
        if knob.name != "num_nodes":
            command = _option(knob)(command)
    return command


def _option(knob: Knob) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    kind: Any = int if knob.is_number else str if knob.parse else click.Choice(knob.choices)
    if knob.name in _WITHOUT_DEFAULT:
        return click.option(knob.option, type=kind, help=knob.help)
    words = knob.help or None
    if knob.is_switch:
        both = f"{knob.option}/{knob.option.replace('--', '--no-')}"
        return click.option(both, default=knob.default, show_default=True, help=words)
    return click.option(knob.option, type=kind, default=knob.default, show_default=True, help=words)


class PositiveNumber(click.FloatRange):
    """A number over 0 and up to a limit; click's own range accepts NaN."""

    def __init__(self, most: float) -> None:
        super().__init__(min=0, min_open=True, max=most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is no number.", param, ctx)
        return number
