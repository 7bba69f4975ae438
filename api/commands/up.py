"""`layout-tuner up`: the whole service on this machine."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import click
import httpx

from api.errors import ApiError
from api.local_service import find_service
from api.supervisor import Child, start_and_wait, until_signalled, watch
from api.token_file import read_token
from results_db.data_dir import DataDir
from results_db.errors import ResultsDbError

SERVE_PATIENCE_S = 30.0


@click.command()
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where everything is kept.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option("--cluster", default="local-cpu", show_default=True, help="What the worker runs on.")
def up(data_dir: Path | None, host: str, port: int, cluster: str) -> None:
    """Run everything on this machine: service, driver and worker."""
    data = DataDir(data_dir) if data_dir else DataDir.default()
    try:
        data.create()
        _run(data, host, port, cluster)
    except (ApiError, ResultsDbError) as error:
        raise click.ClickException(str(error)) from error


def _run(data: DataDir, host: str, port: int, cluster: str) -> None:
    serve = _serve(data, host, port)
    with until_signalled() as stopping:
        children = [serve]
        try:
            start_and_wait(serve, lambda: _service_url(data, serve) is not None, SERVE_PATIENCE_S)
            url = _service_url(data, serve)
            assert url is not None
            # A free port was taken for good: the worker would not find a service that moved.
            serve.argv = _serve(data, host, httpx.URL(url).port or port).argv
            children += [
                _child(data, "driver", "--data-dir", str(data.path)),
                _worker(data, url, cluster),
            ]
            for child in children[1:]:
                child.start()
            _greet(data, url)
            ready = _Readiness(url)
            watch(children, stopping=stopping, say=_say, each_round=ready.look)
            _say("stopping")
        finally:
            # The worker first: it ends its probe, returns its lease, and needs the service for that.
            for child in reversed(children):
                child.stop()


def _serve(data: DataDir, host: str, port: int) -> Child:
    return _child(data, "serve", "--data-dir", str(data.path), "--host", host, "--port", str(port))


def _child(data: DataDir, command: str, *options: str) -> Child:
    # -P: files of the directory that the user stands in are no modules of ours.
    argv = [sys.executable, "-P", "-m", "api.cli", command, *options]
    return Child(name=command, argv=argv, log=data.logs / f"{command}.log")


def _worker(data: DataDir, url: str, cluster: str) -> Child:
    return _child(
        data,
        "worker",
        "--url",
        url,
        "--token-file",
        str(data.token_file),
        "--cluster",
        cluster,
        "--spool-dir",
        str(data.path / "spool"),
        "--name",
        f"{socket.gethostname()}-up",  # a worker that is started by hand has the host's name
    )


def _service_url(data: DataDir, serve: Child) -> str | None:
    """The address of our own service, once it answers."""
    assert serve.process is not None
    service = find_service(data)
    if service is None or service.pid != serve.process.pid:
        return None
    try:
        httpx.get(f"{service.url}/v1/health", timeout=2.0).raise_for_status()
    except httpx.HTTPError:
        return None
    return service.url


class _Readiness:
    """Says once that the driver is at work and a worker has registered."""

    def __init__(self, url: str) -> None:
        self._url, self._said = url, False

    def look(self) -> None:
        if self._said:
            return
        try:
            health = httpx.get(f"{self._url}/v1/health", timeout=2.0).json()
        except (httpx.HTTPError, ValueError):
            return  # being restarted; asked again in the next round
        if health["driver_alive"] and health["workers"]:
            _say(f"ready: the driver is at work, and {health['workers']} worker")
            self._said = True


def _greet(data: DataDir, url: str) -> None:
    _say(f"layout-tuner is up at {url}")
    _say(f"  token      {read_token(data.token_file)}")
    _say(f"             (kept in {data.token_file}, readable by you alone)")
    _say(f"  API        {url}/docs")
    _say(f"  logs       {data.logs}")
    _say(
        "Ctrl-C ends it; campaigns go on at the next start. Starting the driver and the worker ..."
    )


def _say(line: str) -> None:
    click.echo(line)
    sys.stdout.flush()
