"""`layout-tuner serve`: the HTTP service in this process."""

from __future__ import annotations

import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Final

import click
import uvicorn
from fastapi import FastAPI

from api.app import create_app
from api.collection import keep_for_good, nothing_collected
from api.errors import ApiError
from api.listening import Endpoint, endpoint_options, is_loopback, listening
from api.local_service import announced, serving
from api.settings import Settings
from api.token_file import load_or_make_token
from results_db.data_dir import DataDir
from results_db.database_option import database_option
from results_db.errors import ResultsDbError
from results_db.retention import Retention
from results_db.store import Store

SHUTDOWN_PATIENCE_S: Final = 5


@click.command()
@endpoint_options
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where everything is kept.")
@click.option(
    "--requests-per-s",
    type=click.FloatRange(min=0.1, max=1e6),
    default=100.0,
    show_default=True,
    help="How often a viewer's or a submitter's token may ask; admins and workers ten times as often.",
)
@click.option(
    "--keep",
    multiple=True,
    envvar="LAYOUT_TUNER_KEEP",
    show_envvar=True,
    metavar="KIND=DAYS",
    help="Days for which logs, iterations, events, audit or requests are kept; KIND=forever keeps all. "
    "[default: events=30 requests=7, all else for ever]",
)
@database_option
def serve(
    endpoint: Endpoint,
    data_dir: Path | None,
    requests_per_s: float,
    keep: tuple[str, ...],
    database: str | None,
) -> None:
    """Run the HTTP service alone (`up` runs all of it).

    Several may serve one PostgreSQL, each on a port of its own; a data directory's SQLite has one.
    """
    data = DataDir(data_dir) if data_dir else DataDir.default()
    try:
        tls = endpoint.tls_context()
        retention = Retention.read(keep)
        data.create()
        # The store before the token: a directory of a newer version is refused before anything is
        # written to it.
        with (
            serving(data, shared=database is not None),
            listening(endpoint) as listener,
            closing(Store.open(data, database=database)) as store,
        ):
            _serve(data, store, endpoint, listener, tls, requests_per_s, retention)
    except (ApiError, ResultsDbError) as error:
        raise click.ClickException(str(error)) from error


def _serve(
    data: DataDir,
    store: Store,
    endpoint: Endpoint,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    requests_per_s: float,
    retention: Retention,
) -> None:
    stopping = Event()
    settings = Settings(
        token=load_or_make_token(data.token_file),
        worker_token=load_or_make_token(data.worker_token_file),
        requests_per_s=requests_per_s,
        retention=retention,
        local_hosts_only=is_loopback(listener) and not endpoint.is_behind_proxy,
        is_behind_proxy=endpoint.is_behind_proxy,
        data_dir=data.path,
        stopping=stopping,
    )
    url = endpoint.url(listener.getsockname()[1])
    with (
        _ended_in_order(stopping),
        announced(data, url, endpoint.tls_certificate, shared=store.is_shared),
    ):
        click.echo(f"layout-tuner serves {url}; its token is in {data.token_file}")
        with nothing_collected():
            config = _config(create_app(settings, store), endpoint, tls)
        keep_for_good()
        _Server(config, stopping).run(sockets=[listener])


def _config(app: FastAPI, endpoint: Endpoint, tls: ssl.SSLContext | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level="info",
        access_log=False,
        server_header=False,
        ws="none",
        # Whoever is no proxy must not say whose request it is: guesses are counted by address.
        proxy_headers=endpoint.is_behind_proxy,
        forwarded_allow_ips=list(endpoint.proxies),
        timeout_graceful_shutdown=SHUTDOWN_PATIENCE_S,
        ssl_context_factory=None if tls is None else lambda _config, _make: tls,
    )


class _Server(uvicorn.Server):
    """Ends when it is told to, from before it begins; tells waiting requests that the end has come."""

    def __init__(self, config: uvicorn.Config, stopping: Event) -> None:
        self._stopping = stopping
        super().__init__(config)

    @property
    def should_exit(self) -> bool:
        """Whether the end has come; uvicorn looks ten times a second."""
        return self._stopping.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value and not self._stopping.is_set():
            self._stopping.set()


@contextmanager
def _ended_in_order(stopping: Event) -> Iterator[None]:
    """SIGTERM and SIGINT end the service with exit code 0 from now on, however early they come.

    They raise nothing: an exception in the middle of whatever is being imported or made then may be lost,
    and the service would go on. uvicorn handles them while it runs, and raises them again at its end.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)

    def stop(*_: object) -> None:
        # Asked first: a second signal might otherwise wait for the lock that the first one holds.
        if not stopping.is_set():
            stopping.set()

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
