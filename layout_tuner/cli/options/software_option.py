"""The option --software, whose help lists the trainers: commands of a client do not import them."""

from __future__ import annotations

from collections.abc import Callable

import click

from layout_tuner.cli.options.command_options import Function
from layout_tuner.trainers.registry import ADAPTERS


def software_option(default: str) -> Callable[[Function], Function]:
    """Adds --software; `default` is what the command takes where it is not given."""
    return click.option(
        "--software",
        help=f"What would run it: layout-tuner (this project's trainer), {', '.join(ADAPTERS)}, or "
        "what a table's source says. The memory of others than Megatron's and nanotron is a mixture "
        f"of what trainers keep.  [default: {default}]",
    )
