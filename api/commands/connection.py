"""How commands find the service: options, environment, or the data directory of this machine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import httpx
from pydantic import BaseModel

from api.browser_guard import is_local
from api.client import Client
from api.errors import ApiError, TokenFileInvalidError
from api.token_file import read_token
from results_db.data_dir import DataDir
from search_spaces.errors import CertificateUnreadableError
from search_spaces.pinned_certificate import CERTIFICATE_VARIABLE, trusting

URL_VARIABLE: Final = "LAYOUT_TUNER_URL"
TOKEN_FILE_VARIABLE: Final = "LAYOUT_TUNER_TOKEN_FILE"  # noqa: S105 - the name of a variable

Function = TypeVar("Function", bound=Callable[..., Any])


def service_options(function: Function) -> Function:
    """Adds --url, --token-file, --certificate and --data-dir, and hands the command an open `Client`."""

    @click.option("--url", envvar=URL_VARIABLE, help="The service's address.", show_envvar=True)
    @click.option(
        "--token-file",
        envvar=TOKEN_FILE_VARIABLE,
        type=click.Path(path_type=Path),
        help="File that holds the service's token.",
        show_envvar=True,
    )
    @click.option(
        "--certificate",
        envvar=CERTIFICATE_VARIABLE,
        type=click.Path(path_type=Path),
        help="Certificate of a service that no authority vouches for: it is trusted by itself.",
        show_envvar=True,
    )
    @click.option(
        "--data-dir",
        type=click.Path(path_type=Path),
        help="Data directory of a service on this machine; used where --url is not given.",
    )
    @functools.wraps(function)
    def command(
        *arguments: Any,
        url: str | None,
        token_file: Path | None,
        certificate: Path | None,
        data_dir: Path | None,
        **options: Any,
    ) -> Any:
        with refusals_as_messages(), connect(url, token_file, data_dir, certificate) as client:
            return function(*arguments, client=client, **options)

    return command  # type: ignore[return-value]


def connect(
    url: str | None,
    token_file: Path | None,
    data_dir: Path | None,
    certificate: Path | None = None,
) -> Client:
    """A client of the service that the options name."""
    local = DataDir(data_dir) if data_dir else DataDir.default()
    if url is None:
        return Client.of_data_dir(local)
    if token_file is None and data_dir is None and _is_elsewhere(url):
        raise TokenFileInvalidError(
            f"{url} is on another machine, whose tokens are others: name the "
            "file of a token of that service with --token-file"
        )
    tls = None if certificate is None else trusting(certificate)
    return Client(url, read_token(token_file or local.token_file), tls=tls)


def _is_elsewhere(url: str) -> bool:
    """Whether a URL is that of another machine; what is none the client refuses in its own words."""
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return bool(address.host) and not is_local(address.netloc.decode())


@contextmanager
def refusals_as_messages() -> Iterator[None]:
    """What cannot be asked, or is refused, ends the command with one sentence and exit code 1."""
    try:
        yield
    except (ApiError, CertificateUnreadableError) as error:
        raise click.ClickException(str(error)) from error


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def print_json(document: BaseModel) -> None:
    """Prints a document of the service as JSON."""
    click.echo(document.model_dump_json(indent=2))
