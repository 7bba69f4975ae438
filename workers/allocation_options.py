"""Options of `layout-tuner worker` about the nodes that it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_Command = Callable[..., Any]

_OPTIONS = (
    click.option(
        "--launcher",
        type=click.Choice(["local", "ray", "srun"]),
        default="ray",
        show_default=True,
        help="What starts ranks: this machine's zygote, Ray's node agents, or a Slurm step a probe.",
    ),
    click.option(
        "--ray-address",
        metavar="HOST:PORT",
        help="Ray cluster to join (RAY_AUTH_TOKEN holds its token); by default one is started here.",
    ),
    click.option(
        "--nodes",
        "num_nodes",
        type=click.IntRange(min=1),
        help="Nodes of that cluster; by default those of the Slurm job, or one.",
    ),
    click.option(
        "--time-left",
        "time_left_s",
        type=click.FloatRange(min=0),
        metavar="SECONDS",
        help="Until the nodes are taken away; by default Slurm is asked, where this is a job.",
    ),
    click.option(
        "--end-when-idle",
        "end_when_idle_s",
        type=click.FloatRange(min=0),
        metavar="SECONDS",
        help="End after so long without a trial; by default never.",
    ),
    click.option(
        "--share-nodes/--no-share-nodes",
        default=None,
        help="Whether probes smaller than a node run side by side on one; by default unless its "
        "devices are CPU cores, or as the site says.",
    ),
)


def allocation_options(command: _Command) -> _Command:
    """Adds the options, as arguments of `workers.local_worker.work`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
