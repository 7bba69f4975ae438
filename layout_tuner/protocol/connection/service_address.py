"""The service of a command: from its options, the environment, or the data directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from layout_tuner.documents.hosts import is_loopback_host
from layout_tuner.errors import ServiceNotFoundError
from layout_tuner.protocol.connection.data_home import (
    DATA_DIR_VARIABLE,
    TOKEN_FILE,
    WORKER_TOKEN_FILE,
    default_data_dir,
)
from layout_tuner.protocol.connection.kept_sign_in import KeptSignIn, kept_sign_in
from layout_tuner.protocol.connection.running_service import LocalService, find_service
from layout_tuner.protocol.connection.tls import CERTIFICATE_VARIABLE

URL_VARIABLE: Final = "LAYOUT_TUNER_URL"
TOKEN_FILE_VARIABLE: Final = "LAYOUT_TUNER_TOKEN_FILE"  # noqa: S105 - the name of a variable
WORKER_TOKEN_FILE_VARIABLE: Final = "LAYOUT_TUNER_WORKER_TOKEN_FILE"  # noqa: S105 - likewise
DATABASE_VARIABLE: Final = "LAYOUT_TUNER_DATABASE_URL"
"""The URL of the database. In a variable its password is not visible in the list of processes."""

_NAMED: Final = f"--url and --token-file, or ${URL_VARIABLE} and ${TOKEN_FILE_VARIABLE}"

PRIVATE_VARIABLES: Final = frozenset(
    {TOKEN_FILE_VARIABLE, WORKER_TOKEN_FILE_VARIABLE, DATABASE_VARIABLE, "PGPASSWORD"}
)
"""Variables of clients and services that jobs and ranks do not get: some hold passwords."""

SERVICE_OPTIONS: Final[Mapping[str, str]] = {
    "--url": "The service's address; by default that of the service of the data directory."
    f"  [env var: {URL_VARIABLE}]",
    "--token-file": "File that holds the service's token; by default the sign-in of `login --device`, or "
    "the data directory's."
    f"  [env var: {TOKEN_FILE_VARIABLE}]",
    "--certificate": "Certificate of a service that no authority vouches for: it is trusted by itself."
    f"  [env var: {CERTIFICATE_VARIABLE}]",
    "--data-dir": "Data directory of a service on this machine; goes before the variables of --url, "
    f"--token-file and --certificate.  [env var: {DATA_DIR_VARIABLE}]",
}
"""The options of every command that calls a service, with their help texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServicePlace:
    """A service, its token and its certificate."""

    url: str
    token_file: Path
    certificate: Path | None
    """The service's own certificate; None: it is signed by a trusted authority."""
    is_own_token: bool
    """Whether the token file is that of the data directory, because no other was named."""
    kept: KeptSignIn | None = None
    """The sign-in by `login --device` at the service, which goes before the data directory's."""


def locate_service(
    *,
    url: str | None = None,
    token_file: Path | None = None,
    certificate: Path | None = None,
    data_dir: Path | None = None,
    is_worker: bool = False,
    needs_token: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> ServicePlace:
    """The service that a command line names, with the token of a worker or of an admin.

    An option takes precedence over the environment. If --data-dir is given, the address, token and
    certificate of the environment are ignored: they belong to another service.

    Raises:
        ServiceNotFoundError: no service runs on the data directory, or a service on another machine
            is named without its token.
    """
    if data_dir is None:
        url = url or environ.get(URL_VARIABLE) or None
        token_file = token_file or _path(environ.get(TOKEN_FILE_VARIABLE))
        certificate = certificate or _path(environ.get(CERTIFICATE_VARIABLE))
    directory = data_dir or default_data_dir(environ)
    if url is None:
        service = service_of(directory)
        url, certificate = service.url, certificate or service.certificate
    kept = kept_sign_in(url, environ)
    is_kept = not (token_file or data_dir or is_worker) and kept.file.exists()
    if needs_token and not (token_file or data_dir or is_kept) and _is_elsewhere(url):
        raise ServiceNotFoundError(
            f"{url} is on another machine, and needs a token of that service: name the file of the token "
            f"with --token-file or ${TOKEN_FILE_VARIABLE}, or sign in with `layout-tuner login --device`"
        )
    own_token = directory / (WORKER_TOKEN_FILE if is_worker else TOKEN_FILE)
    return ServicePlace(
        url=url,
        token_file=token_file or own_token,
        certificate=certificate,
        is_own_token=token_file is None,
        kept=kept if is_kept or not needs_token else None,
    )


def service_of(data_dir: Path) -> LocalService:
    """The service that runs on a data directory. Raises ServiceNotFoundError if there is none."""
    try:
        service = find_service(data_dir)
    except OSError as error:
        raise ServiceNotFoundError(
            f"the data directory {data_dir} cannot be used ({error.strerror}): name another with "
            f"--data-dir, or say where the service is with {_NAMED}"
        ) from error
    if service is None:
        raise ServiceNotFoundError(
            f"no service runs on the data directory {data_dir}: start one with "
            f"`layout-tuner up`, or say where it is with {_NAMED}"
        )
    return service


def _is_elsewhere(url: str) -> bool:
    """Whether a URL is of another machine. An invalid URL gives False: the client refuses it."""
    try:
        scheme, host = urlsplit(url).scheme, urlsplit(url).hostname
    except ValueError:
        return False
    return scheme in ("http", "https") and bool(host) and not is_loopback_host(str(host))


def _path(named: str | None) -> Path | None:
    return Path(named) if named else None
