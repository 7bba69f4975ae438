"""The flags that say a layout, for every command that takes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from search_spaces.layout import PRECISIONS, RECOMPUTE_MODES

_OPTIONS: Final = (
    click.option("--tp", default=1, show_default=True, help="Tensor-parallel ranks."),
    click.option("--pp", default=1, show_default=True, help="Pipeline stages."),
    click.option("--dp", default=1, show_default=True, help="Data-parallel replicas."),
    click.option("--vpp", default=1, show_default=True, help="Virtual stages a pipeline rank."),
    click.option("--micro-batch-size", default=1, show_default=True, help="Sequences at once."),
    click.option("--num-microbatches", default=1, show_default=True, help="Micro-batches a step."),
    click.option(
        "--zero-stage", default=0, show_default=True, help="1: shard the optimizer's states."
    ),
    click.option(
        "--zero-replicas", default=1, show_default=True, help="Copies of the sharded states."
    ),
    click.option(
        "--recompute", type=click.Choice(RECOMPUTE_MODES), default="none", show_default=True
    ),
    click.option("--sequence-parallel/--no-sequence-parallel", default=False, show_default=True),
    click.option("--precision", type=click.Choice(PRECISIONS), default="fp32", show_default=True),
)


def layout_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command a flag for each knob, all but the number of nodes."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
