"""`layout-tuner serve`: the HTTP service in this process."""

from __future__ import annotations

import gc
import os
import socket
import ssl
import sys
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Final

import click

from layout_tuner.api.app import create_app
from layout_tuner.api.http.bind_address import Endpoint, is_loopback, listening
from layout_tuner.api.http.connection_limits import (
    MAX_CONNECTIONS,
    ConnectionLimits,
    allow_connections,
)
from layout_tuner.api.http.server import LimitedServer
from layout_tuner.api.http.url_prefix import read_prefix
from layout_tuner.api.http.webhook_hosts import read_hosts
from layout_tuner.api.process.local_service import announced, serving
from layout_tuner.api.process.supervisor import signals_to
from layout_tuner.api.security.local_tokens import load_or_make_token
from layout_tuner.api.settings import Settings
from layout_tuner.cli.options.database_options import (
    database_option,
    default_visibility_option,
    half_life_option,
    keep_option,
)
from layout_tuner.cli.options.endpoint_options import endpoint_options
from layout_tuner.cli.options.refusals import refusals
from layout_tuner.protocol.connection.data_home import PRIVATE_UMASK
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.database.stderr_log import log_to_stderr
from layout_tuner.results_db.database.wait_for_server import once_it_answers
from layout_tuner.results_db.records import Visibility
from layout_tuner.results_db.retention import Retention
from layout_tuner.results_db.store import Store

GIL_SWITCH_S: Final = 0.0001
"""Seconds for which a busy thread keeps the others waiting; Python's default is 0.005."""


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
    "--max-connections",
    type=click.IntRange(1, 100_000),
    help="Connections that are open at once; idle ones are closed for new ones. "
    f"[default: {MAX_CONNECTIONS}, or what the limit of open files allows]",
)
@keep_option
@default_visibility_option
@half_life_option
@click.option(
    "--webhook-hosts",
    multiple=True,
    envvar="LAYOUT_TUNER_WEBHOOK_HOSTS",
    show_envvar=True,
    metavar="HOST",
    help="Host to which webhooks may go, such as hooks.example.org, *.example.org:8443 or, without TLS, "
    "http://chat; a private one has to be named exactly. [default: none]",
)
@click.option("--supervisor", type=int, hidden=True, help="Process id of the `up` that runs this.")
@database_option
def serve(
    endpoint: Endpoint,
    data_dir: Path | None,
    requests_per_s: float,
    max_connections: int | None,
    keep: tuple[str, ...],
    default_visibility: Visibility,
    share_half_life: float,
    webhook_hosts: tuple[str, ...],
    supervisor: int | None,
    database: str | None,
) -> None:
    """Run the HTTP service alone (`up` runs all of it).

    Several may serve one PostgreSQL, each on a port of its own; a data directory's SQLite has one.
    """
    os.umask(PRIVATE_UMASK)
    data = DataDir(data_dir) if data_dir else DataDir.default()
    with refusals():
        tls = endpoint.tls_context()
        endpoint.sign_in.refuse_unusable(is_behind_proxy=endpoint.is_behind_proxy)
        endpoint = replace(endpoint, url_prefix=read_prefix(endpoint.url_prefix))
        retention = Retention.read(keep)
        hosts = read_hosts(webhook_hosts)
        log_to_stderr("layout_tuner", "uvicorn")
        limits = ConnectionLimits(max_connections=allow_connections(max_connections))
        data.create()
        # The store is opened before the token is made: nothing is written to a directory of a
        # newer version.
        with (
            serving(data, shared=database is not None),
            listening(endpoint) as listener,
            closing(once_it_answers(lambda: Store.open(data, database=database))) as store,
        ):
            settings = Settings(
                token=load_or_make_token(data.token_file),
                worker_token=load_or_make_token(data.worker_token_file),
                requests_per_s=requests_per_s,
                retention=retention,
                webhook_hosts=hosts,
                local_hosts_only=is_loopback(listener) and not endpoint.is_behind_proxy,
                is_behind_proxy=endpoint.is_behind_proxy,
                url_prefix=endpoint.url_prefix,
                default_visibility=default_visibility,
                data_dir=data.path,
                sign_in=endpoint.sign_in,
            )
            store.shares.use_half_life(share_half_life * 86_400.0)
            _serve(data, store, settings, endpoint, listener, tls, limits, supervisor)


def _serve(
    data: DataDir,
    store: Store,
    settings: Settings,
    endpoint: Endpoint,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    limits: ConnectionLimits,
    supervisor: int | None,
) -> None:
    url = endpoint.url(listener.getsockname()[1])
    with (
        _ended_in_order(settings.stopping),
        announced(
            data, url, endpoint.tls_certificate, shared=store.is_shared, supervisor=supervisor
        ),
    ):
        click.echo(f"layout-tuner serves {url}; its token is in {data.token_file}")
        app = create_app(settings, store)
        proxies = endpoint.proxies if endpoint.is_behind_proxy else ()
        served = app.state.owner_sign_in.behind(proxies, app)
        server = LimitedServer(served, limits, settings.stopping, tls=tls)
        collect_rarely()
        sys.setswitchinterval(GIL_SWITCH_S)
        server.run(sockets=[listener])


def collect_rarely() -> None:
    """Tunes the garbage collector of a process that has just started.

    Modules and routes are never collected. New objects are after 5,000 of them, not 700: half of
    the time of ranking 100,000 layouts was spent in collections that found nothing.
    """
    gc.freeze()
    gc.set_threshold(5000, *gc.get_threshold()[1:])


def _ended_in_order(stopping: Event) -> AbstractContextManager[None]:
    """SIGTERM and SIGINT in the block end the service with exit code 0.

    They raise no exception: one that is raised during an import may be lost, and the service would
    go on. uvicorn handles the signals while it runs, and raises them again at its end.
    """

    def stop(*_: object) -> None:
        # Checked first: a second signal might wait for the lock that the first one holds.
        if not stopping.is_set():
            stopping.set()

    return signals_to(stop)
