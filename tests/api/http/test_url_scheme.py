"""http:// to a port that speaks TLS, and https:// to one that does not: clear errors."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from api.client import Client
from api.errors import ServiceError
from api.settings import Settings
from results_db.store import Store
from tests.kit.api import TOKEN
from tests.kit.live import PATIENCE_S, live_server
from tests.kit.postgres import upgraded
from tests.kit.services import run_here
from workers.errors import WorkerError
from workers.service.lease_client import ServiceHttp


@pytest.fixture(scope="module", params=["ours", "another"])
def tls_address(
    request: pytest.FixtureRequest, tls: ssl.SSLContext, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Ports that speak TLS: our service, which answers plain HTTP, and a server that hangs up."""
    if request.param == "another":
        with hanging_up(tls) as address:
            yield address
        return
    with (
        closing(Store.open(upgraded(tmp_path_factory.mktemp("tls")))) as store,
        live_server(Settings(token=TOKEN), store, tls=tls) as live,
    ):
        yield live.url.partition("://")[2]


@pytest.fixture(scope="module")
def plain_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        closing(Store.open(upgraded(tmp_path_factory.mktemp("plain")))) as store,
        live_server(Settings(token=TOKEN), store) as live,
    ):
        yield live.url.partition("://")[2]


@contextmanager
def hanging_up(tls: ssl.SSLContext) -> Iterator[str]:
    """A TLS server that closes connections which do not begin with TLS, as most servers do."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    accepted, _ = listener.accept()
                    accepted.settimeout(PATIENCE_S)
                    with suppress(OSError), accepted, tls.wrap_socket(accepted, server_side=True):
                        pass

        # A daemon: whatever fails, this thread must not keep the interpreter from ending.
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE_S)
        assert not thread.is_alive()


def said_by_client(url: str) -> str:
    with Client(url, TOKEN) as client, pytest.raises(ServiceError) as refused:
        client.whoami()
    return str(refused.value)


def said_by_worker(url: str) -> str:
    with closing(ServiceHttp(url, TOKEN)) as service, pytest.raises(WorkerError) as refused:
        service.request("GET", "/v1/whoami", None)
    return str(refused.value)


@pytest.mark.parametrize("said_by", [said_by_client, said_by_worker])
def test_tls_to_plain_http_is_told_to_use_http(
    plain_address: str, said_by: Callable[[str], str]
) -> None:
    said = said_by(f"https://{plain_address}")
    assert f"https://{plain_address} does not speak TLS" in said
    assert "begins with http://, not https://" in said


def test_plain_http_to_tls_is_told_to_use_https(tls_address: str, tmp_path: Path) -> None:
    for said in (said_by_client(f"http://{tls_address}"), said_by_worker(f"http://{tls_address}")):
        assert "speaks TLS" in said
        assert "begins with https://, not http://" in said
        assert "is it running" not in said
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    options = ("--url", f"http://{tls_address}", "--token-file", str(token))
    for command in (("campaign", "list"), ("allocation", "show")):
        refused = run_here(*command, *options)
        assert refused.exit_code == 1
        (line,) = refused.stderr.splitlines()
        assert "begins with https://, not http://" in line
