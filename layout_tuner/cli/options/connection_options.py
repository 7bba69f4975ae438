"""The options by which commands find a service."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from layout_tuner.cli.options.command_options import Function, passed_as
from layout_tuner.cli.options.refusals import fail
from layout_tuner.errors import ServiceNotFoundError
from layout_tuner.protocol.connection.service_address import (
    SERVICE_OPTIONS,
    ServicePlace,
    locate_service,
)

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
