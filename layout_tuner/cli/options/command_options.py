"""How commands get options: several by one decorator, as one argument; those of many commands.

It imports nothing heavy, so that `--help` is fast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from layout_tuner.cli.options.refusals import fail
from layout_tuner.errors import ServiceNotFoundError
from layout_tuner.protocol.connection.data_home import DATA_DIR_VARIABLE
from layout_tuner.protocol.connection.service_address import (
    SERVICE_OPTIONS,
    ServicePlace,
    locate_service,
)

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


def stated(*names: str) -> list[str]:
    """Those of some options of the command that its command line has, as it writes them."""
    context = click.get_current_context()
    written = {option.name: option.opts[0] for option in context.command.params}
    source = context.get_parameter_source
    return [written[name] for name in names if source(name) is ParameterSource.COMMANDLINE]


def together(*options: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """A decorator that adds several options; `--help` has them in this order."""

    def add(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def valued_options(
    table: Mapping[str, tuple[Any, float, str]],
) -> list[Callable[[Function], Function]]:
    """Options with a value: by name, the type, the default and the help of each."""
    return [
        click.option(
            f"--{name.replace('_', '-')}",
            name,
            type=kind,
            default=default,
            show_default=True,
            help=text,
        )
        for name, (kind, default, text) in table.items()
    ]


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


connection_options: Final = passed_as(
    "locate",
    lambda **named: functools.partial(locate_service, **named),
    [option.removeprefix("--").replace("-", "_") for option in SERVICE_OPTIONS],
    *(
        click.option(
            option, type=None if option == "--url" else click.Path(path_type=Path), help=text
        )
        for option, text in SERVICE_OPTIONS.items()
    ),
)
"""Adds --url, --token-file, --certificate and --data-dir; passes on `locate`, which finds the
service that they name, as `locate_service` does."""


def place_options(*, is_worker: bool, is_optional: bool = False) -> Callable[[Function], Function]:
    """Adds the options of the connection; passes on a `ServicePlace`.

    Args:
        is_worker: whether the default is the data directory's token for workers, not its admin's.
        is_optional: whether the command runs without a service, with None in its place.
    """

    def with_options(function: Function) -> Function:
        @functools.wraps(function)
        def command(*arguments: Any, locate: Callable[..., ServicePlace], **options: Any) -> Any:
            # The worker's own token takes precedence over the submitter's.
            token_file = options.get("worker_token_file")
            own = {} if token_file is None else {"token_file": token_file}
            try:
                place = locate(is_worker=is_worker, **own)
            except ServiceNotFoundError as error:
                if not is_optional:
                    fail(str(error))
                place = None
            return function(*arguments, place=place, **options)

        return connection_options(command)  # type: ignore[return-value]

    return with_options
