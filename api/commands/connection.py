"""How commands find the service: options, environment, or the data directory of this machine."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from api.errors import ApiError, ServiceError
from api.lazy_group import imports_kept
from api.security.local_tokens import read_token
from search_spaces.connection.service_address import SERVICE_OPTIONS, locate_service
from search_spaces.connection.tls import trusting
from search_spaces.errors import MAX_PARTS, CertificateUnreadableError, ServiceNotFoundError

if TYPE_CHECKING:
    from api.client import Client

Document = TypeVar("Document")
Function = TypeVar("Function", bound=Callable[..., Any])


def service_options(function: Function) -> Function:
    """Adds the options of the connection, and passes the command an open `Client`."""

    @functools.wraps(function)
    def command(*arguments: Any, service: Callable[[], Client], **options: Any) -> Any:
        return function(*arguments, client=service(), **options)

    return service_when_called(command)  # type: ignore[return-value]


def service_when_called(function: Function) -> Function:
    """Adds the options of the connection, and passes the command `service`.

    `service()` is an open `Client`, and raises ServiceNotFoundError where there is no service.
    """

    @functools.wraps(function)
    def command(
        *arguments: Any,
        url: str | None,
        token_file: Path | None,
        certificate: Path | None,
        data_dir: Path | None,
        **options: Any,
    ) -> Any:
        with refusals_as_messages(), ExitStack() as stack:

            def service() -> Client:
                return stack.enter_context(connect(url, token_file, data_dir, certificate))

            return function(*arguments, service=service, **options)

    for option, text in reversed(list(SERVICE_OPTIONS.items())):
        kind = None if option == "--url" else click.Path(path_type=Path)
        command = click.option(option, type=kind, help=text)(command)
    return command  # type: ignore[return-value]


def connect(
    url: str | None, token_file: Path | None, data_dir: Path | None, certificate: Path | None = None
) -> Client:
    """A client of the service that the options name."""
    place = locate_service(
        url=url, token_file=token_file, certificate=certificate, data_dir=data_dir
    )
    tls = None if place.certificate is None else trusting(place.certificate)
    with (
        imports_kept(),
        _without("httpx._main", "tornado"),
    ):  # httpx's own command line; tornado's event loop
        from api.client import Client  # here, so that help imports neither HTTP nor documents
    return Client(place.url, read_token(place.token_file), tls=tls)


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


@contextmanager
def refusals_as_messages() -> Iterator[None]:
    """Errors of requests end the command with a message and exit code 1.

    Several wrong fields of a document have a line each.
    """
    try:
        yield
    except ServiceError as error:
        raise click.ClickException(_refusal(error)) from error
    except (ApiError, CertificateUnreadableError, ServiceNotFoundError) as error:
        raise click.ClickException(str(error)) from error


def _refusal(error: ServiceError) -> str:
    fields = (error.problem and error.problem.errors) or []
    if len(fields) < 2:
        return str(error)
    most = "the first " if len(fields) == MAX_PARTS else ""
    lines = [f"  {each.field.removeprefix('body.')}: {each.message}" for each in fields]
    return "\n".join([f"the service refuses {most}{len(fields)} things:", *lines])
