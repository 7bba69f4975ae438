"""`layout-tuner serve`: the HTTP service in this process."""

from __future__ import annotations

import errno
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Final

import click
import uvicorn

from api.app import create_app
from api.errors import ApiError, ServiceStartError
from api.local_service import LOOPBACK, announced, serving
from api.settings import Settings
from api.token_file import load_or_make_token
from results_db.data_dir import DataDir
from results_db.errors import ResultsDbError
from results_db.store import Store

SHUTDOWN_PATIENCE_S: Final = 5
BACKLOG: Final = 1024


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where everything is kept.")
def serve(host: str, port: int, data_dir: Path | None) -> None:
    """Run the HTTP service alone (`up` runs all of it)."""
    data = DataDir(data_dir) if data_dir else DataDir.default()
    try:
        data.create()
        # The store before the token: a directory of a newer version is refused before anything is
        # written to it.
        with (
            serving(data),
            listening(host, port) as listener,
            closing(Store.open(data)) as store,
        ):
            _serve(data, store, host, listener)
    except (ApiError, ResultsDbError) as error:
        raise click.ClickException(str(error)) from error


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens already: who reads our address can connect at once.

    Raises:
        ServiceStartError: the port is taken, or the address is not ours.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ServiceStartError(f"{host!r} is not an address to listen on: {error}") from error
    # Named: asyncio turns Nagle's algorithm off only for sockets that say that they speak TCP. With it,
    # an answer waits 40 ms for the client to acknowledge its headers.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            raise ServiceStartError(_why_not_bound(host, port, error)) from error
        yield listener


def _why_not_bound(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is in use by another program: end it, or choose another with "
            "--port (0 takes a free one)"
        )
    return f"cannot listen on {host} port {port}: {error.strerror}"


def _serve(data: DataDir, store: Store, host: str, listener: socket.socket) -> None:
    stopping = Event()
    token = load_or_make_token(data.token_file)
    app = create_app(Settings(token=token, data_dir=data.path, stopping=stopping), store)
    config = uvicorn.Config(
        app,
        log_level="info",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_PATIENCE_S,
    )
    url = _url(host, listener)
    click.echo(f"layout-tuner serves {url}; its token is in {data.token_file}")
    if host not in LOOPBACK:
        click.echo(
            "warning: other machines can reach it, and the token travels unencrypted", err=True
        )
    with announced(data, url), _ended_in_order():
        _Server(config, stopping).run(sockets=[listener])


def _url(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104 - compared only
    return (
        f"http://[{shown}]:{port}"
        if ":" in shown and "[" not in shown
        else f"http://{shown}:{port}"
    )


class _Server(uvicorn.Server):
    """Tells waiting requests that the end has come."""

    def __init__(self, config: uvicorn.Config, stopping: Event) -> None:
        super().__init__(config)
        self._stopping = stopping

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._stopping.set()
        super().handle_exit(sig, frame)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM and SIGINT end the service with exit code 0.

    uvicorn shuts down in order and then raises the signal again for whoever handled it before.
    """

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGTERM, previous)
