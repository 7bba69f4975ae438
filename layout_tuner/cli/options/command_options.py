"""How commands get options: several by one decorator, as one argument; --json and --data-dir.

It imports nothing heavy, so that `--help` is fast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from layout_tuner.protocol.connection.data_home import DATA_DIR_VARIABLE

Function = TypeVar("Function", bound=Callable[..., Any])

json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def data_dir_option(text: str) -> Callable[[Function], Function]:
    """Adds --data-dir, which the environment or the user's home says by default."""
    return click.option(
        "--data-dir",
        type=click.Path(file_okay=False, path_type=Path),
        envvar=DATA_DIR_VARIABLE,
        help=f"{text}  [default: ~/.local/share/layout-tuner]",
    )


def together(*options: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """A decorator that adds several options; `--help` has them in this order."""

    def add(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def passed_as(
    argument: str, build: Callable[..., Any], names: Collection[str], *options: Callable[[Any], Any]
) -> Callable[[Function], Function]:
    """The same, and the command gets what `build` makes of the options `names` as one argument."""

    def add(function: Function) -> Function:
        @functools.wraps(function)
        def command(*arguments: Any, **given: Any) -> Any:
            built = build(**{name: given.pop(name) for name in names})
            return function(*arguments, **{argument: built}, **given)

        return together(*options)(command)  # type: ignore[return-value]

    return add
