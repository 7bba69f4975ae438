"""`layout-tuner up`: the whole service on this machine.

Its process lives as long as the service, so it imports nothing heavy: no HTTP client, no database.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from layout_tuner.api.http.bind_address import Endpoint
from layout_tuner.api.http.url_prefix import read_prefix
from layout_tuner.api.process.supervisor import Child, start_and_wait, until_signalled, watch
from layout_tuner.api.security.local_tokens import read_token
from layout_tuner.cli.options.command_options import stated
from layout_tuner.cli.options.database_options import (
    database_option,
    default_visibility_option,
)
from layout_tuner.cli.options.endpoint_options import endpoint_options
from layout_tuner.cli.options.open_limits_options import arguments_of, open_limits_options
from layout_tuner.cli.options.refusals import fail, refusals, refuse
from layout_tuner.cli.options.simulation_options import simulation_options
from layout_tuner.cli.service.login import sign_in_url
from layout_tuner.protocol.connection.data_home import PRIVATE_UMASK
from layout_tuner.protocol.connection.running_service import LocalService, find_service
from layout_tuner.protocol.connection.service_address import DATABASE_VARIABLE
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.database.wait_for_server import START_PATIENCE_S
from layout_tuner.timing_mark import SHARED_CORES_VARIABLE
from layout_tuner.tuner.driver.open_limits import OpenLimits
from layout_tuner.version import missing_packages
from layout_tuner.workers.simulation.simulation_settings import SimulationOptions

SERVE_PATIENCE_S = START_PATIENCE_S + 30.0
"""The service waits for a database that does not answer, then takes some time to start."""


@click.command()
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where everything is kept.")
@endpoint_options
@click.option("--cluster", default="local-cpu", show_default=True, help="What the worker runs on.")
@click.option(
    "--trainers",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON or YAML file of the programs that probes may run besides the embedded trainer.",
)
@click.option(
    "--launcher",
    type=click.Choice(["local", "ray"]),
    default="ray",
    show_default=True,
    help="How the worker starts ranks: by this machine's zygote, or by agents in Ray.",
)
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="With --simulate: nodes of each worker.",
)
@simulation_options
@open_limits_options
@default_visibility_option
@database_option
def up(
    data_dir: Path | None,
    endpoint: Endpoint,
    cluster: str,
    trainers: Path | None,
    launcher: str,
    nodes: int,
    simulation: SimulationOptions | None,
    limits: OpenLimits,
    default_visibility: str,
    database: str | None,
) -> None:
    """Run everything on this machine: service, driver and worker.

    With --simulate the worker measures nothing: a simulator answers the probes.
    """
    if simulation is not None:
        for option in stated("cluster", "trainers", "launcher"):
            refuse(f"{option} and --simulate exclude each other")
    elif stated("nodes"):
        refuse("--nodes and --simulate go together")
    elif launcher == "ray" and (
        lacks := missing_packages("layout-tuner up", ["ray"], extra="worker")
    ):
        fail(f"{lacks}; or start it with --launcher local")
    os.umask(PRIVATE_UMASK)  # children inherit it
    data = DataDir(data_dir) if data_dir else DataDir.default()
    os.environ[SHARED_CORES_VARIABLE] = "1"  # and this, as do ranks
    os.environ["LAYOUT_TUNER_DEFAULT_VISIBILITY"] = default_visibility
    with refusals():
        endpoint.sign_in.refuse_unusable(is_behind_proxy=endpoint.is_behind_proxy)
        endpoint = replace(endpoint, url_prefix=read_prefix(endpoint.url_prefix))
        data.create()
        worker_options = _worker_options(cluster, trainers, launcher, nodes, simulation)
        _run(data, endpoint, worker_options, arguments_of(limits), database)


def _run(
    data: DataDir,
    endpoint: Endpoint,
    worker_options: Sequence[str],
    driver_options: Sequence[str],
    database: str | None,
) -> None:
    serve = _serve(data, endpoint, database)
    with until_signalled() as stopping:
        children = [serve]
        try:
            if not start_and_wait(
                serve,
                lambda: _service(data, serve) is not None,
                SERVE_PATIENCE_S,
                stopping=stopping,
                say=_say,
            ):
                return
            service = _service(data, serve)
            assert service is not None
            # A restarted service keeps its port: the worker would not find another one.
            port = urlsplit(service.url).port or endpoint.port
            serve.argv = _serve(data, replace(endpoint, port=port), database).argv
            children += [
                _child(
                    data, "driver", "--data-dir", str(data.path), *driver_options, database=database
                ),
                _worker(data, service, worker_options),
            ]
            for child in children[1:]:
                child.start()
            _greet(data, service, endpoint.url_prefix)
            watch(children, stopping=stopping, say=_say, each_round=_when_ready(service))
            _say("stopping the worker, the driver and the service")
        finally:
            # The worker is first: it needs the service to return its lease.
            for child in reversed(children):
                child.stop()
    _say("stopped; campaigns go on at the next `layout-tuner up`")


def _serve(data: DataDir, endpoint: Endpoint, database: str | None) -> Child:
    options = ("--data-dir", str(data.path), "--supervisor", str(os.getpid()), *endpoint.arguments)
    return _child(data, "serve", *options, database=database)


def _child(data: DataDir, command: str, *options: str, database: str | None = None) -> Child:
    # -P: do not import modules from the current directory.
    argv = [sys.executable, "-P", "-m", "layout_tuner", command, *options]
    # In the environment: all users of the machine can list arguments. Only processes that open the
    # database get it; a worker and its ranks have no password of the database.
    environment = {name: value for name, value in os.environ.items() if name != DATABASE_VARIABLE}
    if database is not None:
        environment[DATABASE_VARIABLE] = database
    else:
        environment.pop("PGPASSWORD", None)
    log = data.logs / f"{command}.log"
    return Child(name=command, argv=argv, log=log, environment=environment)


def _worker_options(
    cluster: str,
    trainers: Path | None,
    launcher: str,
    nodes: int,
    simulation: SimulationOptions | None,
) -> Sequence[str]:
    if simulation is not None:
        return (*simulation.arguments, "--nodes", str(nodes))
    options = () if trainers is None else ("--trainers", str(trainers.absolute()))
    return ("--cluster", cluster, "--launcher", launcher, *options)


def _worker(data: DataDir, service: LocalService, options: Sequence[str]) -> Child:
    trusted = ("--certificate", str(service.certificate)) if service.certificate else ()
    # A worker that is started by hand has the host's name.
    own = ("--spool-dir", str(data.path / "spool"), "--name", f"{socket.gethostname()}-up")
    where = ("--url", service.url, *trusted, "--token-file", str(data.worker_token_file))
    return _child(data, "worker", *where, *own, *options)


def _service(data: DataDir, serve: Child) -> LocalService | None:
    """The service of this child, once it answers."""
    assert serve.process is not None
    service = find_service(data.path, pid=serve.process.pid)
    return None if service is None or _health(service) is None else service


def _health(service: LocalService) -> Any:
    """The health that the service reports; None while it does not answer."""
    return _ask(service, "GET", "/v1/health", within_s=2.0)


def _ask(service: LocalService, method: str, path: str, *, within_s: float, token: str = "") -> Any:
    """The document with which the service answers; None where it refuses, or does not answer."""
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),  # a proxy would connect to its own loopback
        urllib.request.HTTPSHandler(context=service.tls_context()),
    )
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    asked = urllib.request.Request(service.url + path, method=method, headers=headers)  # noqa: S310
    try:
        with opener.open(asked, timeout=within_s) as answer:
            return json.load(answer)
    except (OSError, http.client.HTTPException, ValueError):
        return None


def _when_ready(service: LocalService) -> Callable[[], None]:
    """Prints once, at one of its calls, that the driver runs and a worker has registered."""
    said = False

    def look() -> None:
        nonlocal said
        health = None if said else _health(service)  # None: it restarts
        if health and health["driver_alive"] and health["workers"]:
            _say(f"ready: the driver is at work, and {health['workers']} worker")
            said = True

    return look


def _greet(data: DataDir, service: LocalService, url_prefix: str) -> None:
    _say(f"layout-tuner is up at {service.url}{url_prefix}")
    token = read_token(data.token_file)
    created = _ask(service, "POST", "/v1/sign-in-codes", within_s=10.0, token=token)
    if created is not None:  # otherwise the service has just stopped answering
        _say(f"  sign in    {sign_in_url(service.url + url_prefix, created['code'])}")
        _say("             (works once, within ten minutes; `layout-tuner login` prints another)")
    _say(f"  token file {data.token_file} (an admin's, readable by you alone)")
    _say(f"  API        {service.url}{url_prefix}/docs")
    _say(f"  logs       {data.logs}")
    _say(
        "Ctrl-C ends it; campaigns go on at the next start. Starting the driver and the worker ..."
    )


def _say(line: str) -> None:
    click.echo(line)
    sys.stdout.flush()
