"""Addresses: a prefix, which a proxy may remove; http:// to TLS, and https:// where none is."""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from layout_tuner.api.app import create_app
from layout_tuner.api.errors import ServiceStartError
from layout_tuner.api.http.url_prefix import read_prefix
from layout_tuner.api.settings import Settings
from layout_tuner.client.clients import Client
from layout_tuner.client.errors import ServiceError
from layout_tuner.results_db.store import Store
from layout_tuner.workers.errors import WorkerError
from layout_tuner.workers.service.lease_client import ServiceHttp
from tests.kit.api import HEADERS, TOKEN, answered, refused_line
from tests.kit.live import PATIENCE_S
from tests.kit.persons import Signing, served
from tests.kit.services import run_here

PREFIX = "/group/tuner"


@pytest.fixture(scope="module")
def signing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Signing]:
    with served(tmp_path_factory.mktemp("prefix"), url_prefix=PREFIX) as signing:
        yield signing


@pytest.fixture(params=[PREFIX, ""], ids=["passed on", "removed"])
def sent(request: pytest.FixtureRequest) -> str:
    """What a proxy leaves of the prefix."""
    return str(request.param)


def test_pages_their_links_and_their_assets_have_the_prefix(signing: Signing, sent: str) -> None:
    person = signing.person()
    answer = person.open(f"{sent}/?state=RUNNING")
    where = f"{PREFIX}/sign-in?next=%2F%3Fstate%3DRUNNING"
    assert (answer.status_code, answer.headers["Location"]) == (303, where)
    page = person.open(f"{sent}/sign-in?next=%2F%3Fstate%3DRUNNING")
    assert f'action="{PREFIX}/sign-in"' in page.text
    assert 'name="next" value="/?state=RUNNING"' in page.text
    for path in re.findall(r'(?:src|href)="([^"#]+)"', page.text):
        assert path.startswith(f"{PREFIX}/"), path
        asset = person.open(sent + path.removeprefix(PREFIX))
        assert asset.status_code in (200, 303), path


def test_a_session_begins_and_ends_with_a_cookie_of_the_prefix(signing: Signing, sent: str) -> None:
    person = signing.person()
    document = {"code": signing.code(), "next": "/?state=RUNNING"}
    begun = person.http.post(f"{sent}/sign-in", json=document, headers=person.own)
    assert begun.json() == {"next": f"{PREFIX}/?state=RUNNING"}
    (cookie,) = SimpleCookie(begun.headers["Set-Cookie"]).values()
    assert cookie["path"] == PREFIX
    kept = {"Cookie": f"{cookie.key}={cookie.value}"}
    first = answered(person.open(f"{sent}/", **kept), 200, f'href="{PREFIX}/"')
    token = re.search(r'name="csrf_token" value="([^"]+)"', first.text)
    fields = {"csrf_token": token[1]}
    ended = person.send_form(f"{sent}/sign-out", fields, **kept)
    assert (ended.status_code, ended.headers["Location"]) == (303, f"{PREFIX}/sign-in")
    (removed,) = SimpleCookie(ended.headers["Set-Cookie"]).values()
    assert (removed.value, removed["path"]) == ("", PREFIX)


def test_the_api_and_its_documentation_have_the_prefix(signing: Signing, sent: str) -> None:
    with httpx.Client(base_url=signing.url, headers=HEADERS, trust_env=False) as http:
        assert http.get(f"{sent}/v1/whoami").json()["role"] == "admin"
        assert http.get(f"{sent}/v1/nothing").status_code == 404
        refused = http.delete(f"{sent}/v1/campaigns")
        assert (refused.status_code, refused.headers["Allow"]) == (405, "GET, HEAD, POST")
        page = http.get(f"{sent}/docs")
        for path in re.findall(r"""(?:src|href|url)[=:]\s*["']([^"']+)["']""", page.text):
            assert path.startswith(f"{PREFIX}/"), path
            assert http.get(sent + path.removeprefix(PREFIX)).status_code == 200, path
        assert http.get(f"{sent}/openapi.json").json()["servers"] == [{"url": PREFIX}]


@pytest.mark.parametrize(
    "path",
    [
        *(f"{PREFIX}{PREFIX}/v1/campaigns", f"{PREFIX}//v1/campaigns", f"{PREFIX}/"),
        *(f"{PREFIX}/%76%31/campaigns", f"{PREFIX}/../v1/campaigns"),
    ],
)
def test_no_spelling_of_the_prefix_leads_around_the_gate(signing: Signing, path: str) -> None:
    assert httpx.get(f"{signing.url}{path}").status_code in (401, 404, 307)


def test_a_prefix_is_a_path_of_plain_words_that_begins_as_no_route_does() -> None:
    for given, read in (("", ""), ("/", ""), ("/tuner", "/tuner"), ("/a/b-c_d.e~/", "/a/b-c_d.e~")):
        assert read_prefix(given) == read
    for odd in (
        *("tuner", "//tuner", "/a//b", "/..", "/a/../b", "/.a", "/a b", "/a;b", "/a\r\nX: y", "/ü"),
        *("/a%2fb", "/{a}", "/a?b", "/a#b", "https://a", "/" + "a" * 200),
    ):
        with pytest.raises(ServiceStartError, match=r"--url-prefix .* is not a path: write it as"):
            read_prefix(odd)

    with closing(Store("sqlite:////never/opened")) as store:
        for prefix in ("/v1", "/docs/tuner", "/sign-in", "/assets"):
            settings = Settings(token=TOKEN, url_prefix=prefix)
            with pytest.raises(ServiceStartError, match=r"begin it with another word than .*docs"):
                create_app(settings, store)


@pytest.mark.parametrize("command", ["serve", pytest.param("up", marks=pytest.mark.slow)])
def test_a_prefix_that_is_no_path_is_one_clear_error(tmp_path: Path, command: str) -> None:
    options = ("--port", "0", "--data-dir", str(tmp_path / "data"), "--url-prefix", "tuner")
    line = refused_line(run_here(command, *options))
    assert line.startswith("Error: --url-prefix 'tuner' is not a path")


@pytest.fixture(scope="module", params=["ours", "another"])
def tls_address(
    request: pytest.FixtureRequest, tls: ssl.SSLContext, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Ports that speak TLS: our service, which answers plain HTTP, and a server that hangs up."""
    if request.param == "another":
        with hanging_up(tls) as address:
            yield address
        return
    with served(tmp_path_factory.mktemp("tls"), tls=tls) as signing:
        yield signing.url.partition("://")[2]


@pytest.fixture(scope="module")
def plain_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("plain")) as signing:
        yield signing.url.partition("://")[2]


@contextmanager
def hanging_up(tls: ssl.SSLContext) -> Iterator[str]:
    """A TLS server that closes connections which do not begin with TLS, as most servers do."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(PATIENCE_S)


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
        line = refused_line(run_here(*command, *options))
        assert "begins with https://, not http://" in line
