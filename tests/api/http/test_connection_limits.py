"""What a client can use of the service before it shows a token: attacks over TCP and TLS."""

import dataclasses
import json
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from layout_tuner.api.http import server
from layout_tuner.api.http.connection_limits import ConnectionLimits
from layout_tuner.api.settings import Settings
from layout_tuner.results_db.store import Store
from tests.kit.api import HEADERS, INTRODUCTION, TOKEN, answered
from tests.kit.live import PATIENCE_S, Live, Watcher, live_server
from tests.kit.postgres import upgraded
from tests.kit.python_process import python_words
from tests.kit.store import make_campaign
from tests.kit.waiting import wait_until

HEALTH = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n"
BEARER = f"Authorization: Bearer {TOKEN}\r\n".encode()
POST = b"POST /v1/campaigns HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + BEARER + b"Transfer-Encoding: chunked\r\n\r\n"
HASTY = ConnectionLimits(
    body_s=0.2, body_bytes_per_s=1 << 20, unread_s=0.4, linger_s=0.2, check_interval_s=0.05
)
"""Short limits for tests, except for the time for headers, in which each client must connect."""

HASTY_HEADERS = ConnectionLimits(header_s=2.0, linger_s=0.2, check_interval_s=0.05)
"""A time for headers short enough for a test, and long enough for a client on a busy machine."""


@pytest.fixture(scope="module", params=["plain", "tls"])
def server_tls(request: pytest.FixtureRequest, tls: ssl.SSLContext) -> ssl.SSLContext | None:
    return tls if request.param == "tls" else None


def serving(limits: ConnectionLimits) -> Any:
    """A fixture of a service with these limits, for the tests of the module."""

    @pytest.fixture(scope="module")
    def served(
        tmp_path_factory: pytest.TempPathFactory, server_tls: ssl.SSLContext | None
    ) -> Iterator[Live]:
        with (
            closing(Store.open(upgraded(tmp_path_factory.mktemp("served")))) as store,
            live_server(Settings(token=TOKEN), store, limits=limits, tls=server_tls) as live,
        ):
            yield live

    return served


live, hasty, hasty_headers = map(serving, (ConnectionLimits(), HASTY, HASTY_HEADERS))


def trusting_all() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def connected(live: Live, source: str = "127.0.0.1") -> socket.socket:
    """A connection to the service, past its TLS handshake where it has one."""
    plain = socket.create_connection(live.address, PATIENCE_S, source_address=(source, 0))
    return trusting_all().wrap_socket(plain) if live.url.startswith("https") else plain


def read_to_end(connection: socket.socket) -> bytes:
    """All that the service sends until it closes the connection."""
    read = b""
    with suppress(ConnectionError, ssl.SSLEOFError):
        while part := connection.recv(65536):
            read += part
    return read


def read_answer(connection: socket.socket) -> bytes:
    """One answer with its body, of a connection that stays open."""
    read = b""
    while b"\r\n\r\n" not in read:
        part = connection.recv(65536)
        assert part, read
        read += part
    head, _, body = read.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    assert length is not None, head
    while len(body) < int(length[1]):
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def status_of(answer: bytes) -> int:
    """The status of the first answer; 0: the connection was closed without one."""
    return int(answer.split(None, 2)[1]) if answer else 0


def send_what_is_taken(connection: socket.socket, data: bytes) -> None:
    """Sends until the service closes the connection."""
    with suppress(OSError):
        connection.sendall(data)


def send_for_ever(connection: socket.socket, data: bytes, pause_s: float = 0.0) -> None:
    """Sends until the service closes the connection, which it must."""
    with suppress(BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
        while True:
            connection.sendall(data)
            time.sleep(pause_s)


def is_well(live: Live) -> bool:
    with httpx.Client(verify=trusting_all(), timeout=PATIENCE_S) as client:
        return client.get(f"{live.url}/v1/health").status_code == 200


@pytest.mark.sampled(2)
def test_a_service_that_is_to_end_does_not_wait_for_its_next_look(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "TICK_S", 3600.0)
    with live_server(Settings(token=TOKEN), store) as live:
        assert httpx.get(f"{live.url}/v1/health").is_success
    # `live_server` has told it to end, and waited for the end.


def test_a_header_of_100_mib_is_refused_and_others_are_answered_meanwhile(live: Live) -> None:
    stop = threading.Event()
    answers: list[int] = []

    def attack() -> None:
        while not stop.is_set():
            with connected(live) as connection:
                connection.sendall(HEALTH + b"X: ")
                for _ in range(100 << 4):
                    send_what_is_taken(connection, b"x" * (64 << 10))
                answers.append(status_of(read_to_end(connection)))

    attackers = [threading.Thread(target=attack) for _ in range(2)]
    for attacker in attackers:
        attacker.start()
    try:
        # Answers come while both attackers send: parsing one whole header would take longer.
        for _ in range(3):
            assert is_well(live)
        # An answer is lost where a connection is closed before its client has sent everything.
        wait_until("an attacker was answered", lambda: 431 in answers)
    finally:
        stop.set()
        for attacker in attackers:
            attacker.join(PATIENCE_S)
    assert set(answers) <= {431, 0}, "a header is read no further than its limit"


def test_a_header_that_trickles_in_is_counted_together_in_each_request_of_a_connection(
    live: Live,
) -> None:
    with connected(live) as connection:
        connection.sendall(HEALTH + b"X: ")
        for _ in range(200):
            send_what_is_taken(connection, b"x" * 400)
        answer = read_answer(connection)
    assert status_of(answer) == 431
    problem = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert problem["detail"] == "the request's headers are larger than 64 KiB"
    assert b"connection: close" in answer.lower()

    with connected(live) as connection:
        connection.sendall(HEALTH + b"\r\n")
        assert status_of(read_answer(connection)) == 200
        connection.sendall(HEALTH + b"X: " + b"y" * 60_000 + b"\r\n\r\n")
        assert status_of(read_answer(connection)) == 200
        send_what_is_taken(connection, HEALTH + b"X: " + b"y" * 90_000)
        assert status_of(read_answer(connection)) == 431

    with connected(live) as connection:
        late = b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + BEARER + b"\r\n"
        connection.sendall(POST + late)
        assert status_of(read_answer(connection)) == 401


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (HEALTH + b"X: y\r\n" * 99 + b"\r\n", 200),
        (HEALTH + b"X: y\r\n" * 100 + b"\r\n", 431),
        (HEALTH + b"X: " + b"y" * 60_000 + b"\r\n\r\n", 200),
        (HEALTH + b"X: " + b"y" * 65_600 + b"\r\n\r\n", 431),
        (HEALTH + (b"X: " + b"y" * 2000 + b"\r\n") * 40 + b"\r\n", 431),
        (HEALTH + b"x" * 70_000 + b": y\r\n\r\n", 431),
        (b"GET /v1/health?" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
        (b"GET /v1/health?" + b"x" * 70_000, 414),
        (b"\r\n" * 40_000, 431),
        (HEALTH + b" folded\r\n" * 10_000, 400),
        (b"no HTTP at all\r\n\r\n", 400),
        (HEALTH + b"Upgrade: h2c\r\nConnection: Upgrade\r\n\r\n", 200),
        (HEALTH + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n", 200),
        (CHUNKED + b"1;" + b"e" * 90_000, 431),
        (CHUNKED + b"1\r\n{\r\n0\r\nX: " + b"t" * 90_000, 431),
        (CHUNKED + b"1\r\n{\r\n0\r\n" + b"X: t\r\n" * 200, 431),
        (CHUNKED + b"no length\r\n", 400),
    ],
)
def test_a_request_is_answered_by_its_size(live: Live, request_: bytes, status: int) -> None:
    with connected(live) as connection:
        send_what_is_taken(connection, request_)
        answer = read_answer(connection)
    assert status_of(answer) == status, answer[:300]
    assert is_well(live)


@pytest.mark.sampled(2)
def test_a_header_that_does_not_come_closes_the_connection(hasty_headers: Live) -> None:
    # An empty line is no request (RFC 9112, section 2.2).
    first = [(b"", 0), (b"G", 408), (b"GET /v1/health", 408), (HEALTH + b"X: ", 408), (b"\r\n", 0)]
    later = [(b"G", 408), (HEALTH, 408), (b"\r\n", 0)]
    with ExitStack() as opened:
        connections = []
        for number, (sent, _) in enumerate((*first, *later)):
            connections.append(opened.enter_context(connected(hasty_headers)))
            if number >= len(first):
                connections[-1].sendall(HEALTH + b"\r\n")
                assert status_of(read_answer(connections[-1])) == 200
            connections[-1].sendall(sent)
        ends = [status_of(read_to_end(each)) for each in connections]
    assert ends == [status for _, status in (*first, *later)]

    with connected(hasty_headers) as connection:
        connection.sendall(POST + b"Content-Length: 100000000\r\n\r\n")
        assert status_of(read_answer(connection)) == 401
        send_for_ever(connection, b" ", pause_s=0.01)


def test_a_header_that_trickles_in_has_no_longer_time(store: Store) -> None:
    """The time counts from its first byte, however many come after it."""
    limits = dataclasses.replace(HASTY_HEADERS, header_bytes=1 << 40, num_headers=1 << 40)
    with live_server(Settings(token=TOKEN), store, limits=limits) as live, connected(live) as slow:
        slow.sendall(HEALTH)
        send_for_ever(slow, b"X: y\r\n", pause_s=0.01)
        assert is_well(live)


def test_plain_http_on_a_tls_port_is_told_so_and_a_handshake_that_does_not_come_ends(
    store: Store, tls: ssl.SSLContext
) -> None:
    with (
        live_server(Settings(token=TOKEN), store, limits=HASTY_HEADERS, tls=tls) as live,
        ExitStack() as opened,
    ):
        connections = []
        for sent in (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"):
            connection = socket.create_connection(live.address, PATIENCE_S)
            connections.append(opened.enter_context(connection))
            connection.sendall(sent)
        for connection in connections:
            assert read_to_end(connection) == b""
        wait_until("no connection is left", lambda: len(live.server.connections) == 0)
        assert is_well(live)
        plain = httpx.get(live.url.replace("https", "http") + "/v1/health")
        answered(plain, 400, "this port speaks TLS: the address begins with https://")
        assert is_well(live)


def test_a_body_that_stops_coming_is_answered_408_and_a_client_that_reads_nothing_is_hung_up_on(
    hasty: Live,
) -> None:
    for begun in (POST + BEARER + b"Content-Length: 1000\r\n\r\n{", CHUNKED + b"1\r\n{\r\n"):
        with connected(hasty) as connection:
            connection.sendall(begun)
            assert status_of(read_to_end(connection)) == 408
    wait_until("no connection is left", lambda: len(hasty.server.connections) == 0)

    with connected(hasty) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        send_for_ever(connection, b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
    wait_until("no connection is left", lambda: len(hasty.server.connections) == 0)


def test_a_request_that_waits_for_its_answer_may_wait_longer_than_headers_may_take(
    store: Store,
) -> None:
    """A worker waits for a lease while the beginning of its next request arrives."""
    settings = Settings(token=TOKEN, lease_poll_s=0.02)
    with live_server(settings, store, limits=HASTY_HEADERS) as live:
        worker = httpx.post(f"{live.url}/v1/workers", json=INTRODUCTION, headers=HEADERS).json()
        lease = json.dumps({"wait_s": 2 * HASTY_HEADERS.header_s}).encode()
        with connected(live) as connection:
            asked = f"/v1/workers/{worker['worker_id']}/leases".encode()
            length = f"Content-Length: {len(lease)}\r\n\r\n".encode()
            connection.sendall(POST.replace(b"/v1/campaigns", asked) + BEARER + length + lease)
            connection.sendall(HEALTH)
            answer = read_to_end(connection)
        assert status_of(answer) == 200
        assert answer.count(b"HTTP/1.1 ") == 1, answer
        assert b"leases" in answer


def test_more_pipelined_requests_than_may_wait_are_not_taken(live: Live) -> None:
    with connected(live) as connection:
        send_what_is_taken(connection, (HEALTH + b"\r\n") * 400)
        answers = read_to_end(connection)
    num_answered = answers.count(b"HTTP/1.1 200")
    assert 0 < num_answered < 400
    assert answers.count(b"connection: close") == 1
    assert is_well(live)


def test_idle_connections_make_room_for_new_ones(
    store: Store, server_tls: ssl.SSLContext | None
) -> None:
    limits = ConnectionLimits(max_connections=8)
    with (
        live_server(Settings(token=TOKEN), store, limits=limits, tls=server_tls) as live,
        ExitStack() as idle,
    ):
        for _ in range(30):
            idle.enter_context(connected(live))
            assert len(live.server.connections) <= 8
        assert is_well(live)


def test_idle_ones_displace_no_watcher_and_no_other_client(store: Store) -> None:
    settings = Settings(token=TOKEN, event_poll_s=0.02)
    limits = ConnectionLimits(max_connections=8)
    with (
        live_server(settings, store, limits=limits) as live,
        Watcher(f"{live.url}/v1/events") as watcher,
        connected(live) as other,
        ExitStack() as idle,
    ):
        watcher.opened()
        other.sendall(HEALTH + b"\r\n")
        assert status_of(read_answer(other)) == 200
        for _ in range(30):
            idle.enter_context(connected(live, source="127.0.0.2"))
        wait_until("the flood was accepted", lambda: len(live.server.connections) == 8)
        other.sendall(HEALTH + b"\r\n")
        assert status_of(read_answer(other)) == 200
        make_campaign(store)
        assert watcher.next()[0] == "campaign.created"


def test_a_connection_too_many_is_told_to_come_again(
    store: Store, server_tls: ssl.SSLContext | None
) -> None:
    limits = ConnectionLimits(max_connections=2)
    with (
        live_server(Settings(token=TOKEN), store, limits=limits, tls=server_tls) as live,
        connected(live) as first,
        connected(live) as second,
    ):
        for watcher in (first, second):
            watcher.sendall(HEALTH.replace(b"health", b"events") + BEARER + b"\r\n")
            assert status_of(watcher.recv(65536)) == 200
        if server_tls is None:
            answer = answered(httpx.get(f"{live.url}/v1/health"), 503)
            assert answer.headers["Retry-After"] == "5"
            assert "holds 2 connections already" in answer.json()["detail"]
        else:
            with pytest.raises(OSError):
                connected(live)
        first.close()
        wait_until("a place is free", lambda: len(live.server.connections) < 2)
        assert is_well(live)


def test_refusals_do_not_fill_the_log(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with live_server(Settings(token=TOKEN), store) as live:
        for _ in range(20):
            with connected(live) as connection:
                send_what_is_taken(connection, b"no HTTP\r\n\r\n")
                assert status_of(read_to_end(connection)) == 400
    assert len([record for record in caplog.records if "400" in record.getMessage()]) == 1


def test_an_address_that_is_none_is_answered_400(
    hasty: Live, caplog: pytest.LogCaptureFixture
) -> None:
    for address in (b"CONNECT x:1", b"GET http://[", b"GET http://a:99999999/"):
        for is_first in (True, False):
            with connected(hasty) as connection:
                if not is_first:
                    connection.sendall(HEALTH + b"\r\n")
                    assert read_answer(connection).startswith(b"HTTP/1.1 200 ")
                connection.sendall(address + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert read_to_end(connection).startswith(b"HTTP/1.1 400 ")
    assert not [record for record in caplog.records if record.exc_info]
    with connected(hasty) as connection:  # what came before it is still answered
        connection.sendall(HEALTH + b"\r\nGET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 200 ")


FEW_FILES = """
import resource, sys
from layout_tuner.cli.main import main
resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))
serve = ["serve", "--port", "0", "--data-dir", sys.argv[1]]
try:
    main([*serve, "--max-connections", "5000"])
except SystemExit as refused:
    print("refused with", refused.code, file=sys.stderr)
main(serve)
"""


def test_a_service_that_may_open_few_files_says_so_and_refuses_more_connections(
    tmp_path: Path,
) -> None:
    serve = subprocess.Popen(
        python_words(FEW_FILES, str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert "layout-tuner serves http" in serve.stdout.readline()
    finally:
        serve.terminate()
        line, code, *printed = serve.communicate(timeout=60)[1].splitlines()
    assert "5000 connections need 5256 open files, and this process may have at most 1000" in line
    assert "--max-connections 744" in line
    assert (code, serve.returncode) == ("refused with 1", 0)
    assert "may have 1000 open files, and so at most 744 connections at once" in "".join(printed)
