"""The connection of commands to the service, and the output of its answers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from layout_tuner.api.formatting import figure, unit
from layout_tuner.api.security.local_tokens import read_token
from layout_tuner.cli.command_table import imports_kept
from layout_tuner.cli.options.command_options import Function, connection_options, json_option
from layout_tuner.cli.options.refusals import refusals
from layout_tuner.errors import ServiceNotFoundError
from layout_tuner.protocol.connection.service_address import ServicePlace
from layout_tuner.protocol.connection.tls import trusting
from layout_tuner.terminal.console import terminal_width

if TYPE_CHECKING:
    from layout_tuner.api.schemas.campaigns_and_trials import CampaignRead
    from layout_tuner.client.clients import Client
    from layout_tuner.predictions.belief.job import JobEstimate  # it imports numpy
    from layout_tuner.predictions.statistics.job_duration import TrainingJob

Document = TypeVar("Document")

_LABEL_WIDTH: Final = 14


def service_options(function: Function) -> Function:
    """Adds the options of the connection, and passes the command an open `Client`."""

    @functools.wraps(function)
    def command(*arguments: Any, service: Callable[[], Client], **options: Any) -> Any:
        return function(*arguments, client=service(), **options)

    return service_when_called(command)  # type: ignore[return-value]


def service_when_called(function: Function) -> Function:
    """Adds the options of the connection, and passes the command `service`.

    `service()` is an open `Client`, and raises ServiceNotFoundError where there is no service. Its
    options are those of `connect`.
    """

    @functools.wraps(function)
    def command(*arguments: Any, locate: Callable[[], ServicePlace], **options: Any) -> Any:
        with refusals(), ExitStack() as stack:

            def service(**options: Any) -> Client:
                return stack.enter_context(connect(locate, **options))

            return function(*arguments, service=service, **options)

    return connection_options(command)  # type: ignore[return-value]


def connect(
    locate: Callable[..., ServicePlace],
    *,
    once_within_s: float | None = None,
    is_open: bool = False,
) -> Client:
    """A client of the service that the options name; `is_open`: without a token.

    With `once_within_s`, each request is sent once, and fails after so many seconds of silence.
    """
    place = locate(needs_token=not is_open)
    tls = None if place.certificate is None else trusting(place.certificate)
    with (
        imports_kept(),
        _without("httpx._main", "tornado"),
    ):  # httpx's own command line; tornado's event loop
        from layout_tuner.client.clients import (
            Client,  # here, so that help imports neither HTTP nor documents
        )
        from layout_tuner.protocol.connection.http_connection import NO_RETRIES
    patience: dict[str, Any] = {}
    if once_within_s is not None:
        patience = {"timeout_s": once_within_s, "retries": NO_RETRIES}
    token = "" if is_open else place.kept or read_token(place.token_file)
    return Client(place.url, token, tls=tls, **patience)


@contextmanager
def _without(*modules: str) -> Iterator[None]:
    """Lets packages that are imported go without optional modules: those take 0.1 s to import."""
    absent: dict[str, Any] = dict.fromkeys(name for name in modules if name not in sys.modules)
    sys.modules.update(absent)  # importing a module that is None fails as if it were not installed
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def without_service(read: Callable[[], Document], of_presets: Callable[[], Document]) -> Document:
    """What the service answers; where there is no service, what the presets say, with a note."""
    try:
        return read()
    except ServiceNotFoundError:
        click.echo("note: no service was found; these are the presets of this version", err=True)
        return of_presets()


def answers(show: Callable[[Any], None]) -> Callable[[Function], Function]:
    """Adds --json to a command that returns a document, which is printed so or by `show`."""

    def with_json(function: Function) -> Function:
        @json_option
        @functools.wraps(function)
        def command(*arguments: Any, as_json: bool, **options: Any) -> None:
            document = function(*arguments, **options)
            (print_json if as_json else show)(document)

        return command  # type: ignore[return-value]

    return with_json


def print_json(document: object) -> None:
    """Prints a document of the service as JSON."""
    from pydantic import TypeAdapter

    click.echo(TypeAdapter(type(document)).dump_json(document, indent=2).decode())


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Prints labels and values; the further lines of a value are indented like the first."""
    for label, value in facts:
        click.echo(f"{label:<{_LABEL_WIDTH}}{value}".replace("\n", f"\n{'':<{_LABEL_WIDTH}}"))


def best_words(campaign: CampaignRead) -> str:
    """The best value so far with its unit, and whether it is disturbed."""
    words = f"{figure(campaign.progress.best)} {unit(campaign.objective)}"
    return f"{words}, disturbed" if campaign.progress.best_disturbed else words


def print_jobs(job: TrainingJob, jobs: Sequence[tuple[str, JobEstimate]]) -> None:
    """Prints the days of a training job with some layouts."""
    from layout_tuner.predictions.belief.plan_text import job_lines

    for line in job_lines(job, jobs, terminal_width(sys.stdout)):
        click.echo(line)
