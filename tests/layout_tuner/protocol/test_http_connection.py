"""Which requests are sent again, which certificates are trusted, and what is said of outages."""

from __future__ import annotations

import logging
import ssl
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import trustme

from layout_tuner.errors import (
    CertificateUnreadableError,
    LayoutTunerError,
    ServiceUnansweredError,
    UrlInvalidError,
)
from layout_tuner.protocol.connection.http_connection import NO_RETRIES, Retries, ServiceConnection
from layout_tuner.protocol.connection.outage_log import MOST_STARTS, START_WINDOW_S, OutageLog
from layout_tuner.protocol.connection.tls import trusting
from tests.kit.store import at_once

OK = httpx.Response(200)
QUICK = Retries(attempts=3, first_pause_s=0.001, longest_pause_s=0.002)

Happening = httpx.Response | type[httpx.TransportError]


class Service:
    """Answers each request with the next happening, and counts the requests."""

    def __init__(self, *happenings: Happening) -> None:
        self._left = list(happenings)
        self.num_requests = 0

    def __call__(self, _request: httpx.Request) -> httpx.Response:
        self.num_requests += 1
        happening = self._left.pop(0)
        if isinstance(happening, httpx.Response):
            return httpx.Response(happening.status_code, headers=happening.headers)
        raise happening("as a test wants it")


def status_of(service: Service, retries: Retries, *, is_repeatable: bool = True) -> int:
    transport = httpx.MockTransport(service)
    connection = ServiceConnection("http://x", "t", retries=retries, transport=transport)
    with closing(connection):
        return connection.request("GET", "/", is_repeatable=is_repeatable).status_code


LOST = (httpx.ReadError, httpx.ReadTimeout, httpx.Response(503))
"""Troubles after which the service may have acted on a request."""
NOT_RECEIVED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.Response(429))
OTHERS = (httpx.RemoteProtocolError, httpx.Response(502), httpx.Response(504))


@pytest.mark.parametrize("trouble", [*LOST, *NOT_RECEIVED, *OTHERS])
def test_a_request_is_sent_again_if_it_is_repeatable_or_has_not_arrived(trouble: Happening) -> None:
    service = Service(trouble, trouble, OK)
    assert status_of(service, QUICK) == 200
    assert service.num_requests == 3
    change = Service(trouble, OK)
    if trouble in NOT_RECEIVED:
        assert status_of(change, QUICK, is_repeatable=False) == 200
    elif isinstance(trouble, httpx.Response):
        assert status_of(change, QUICK, is_repeatable=False) == trouble.status_code
        assert change.num_requests == 1
    else:
        with pytest.raises(ServiceUnansweredError):
            status_of(change, QUICK, is_repeatable=False)
        assert change.num_requests == 1


def test_other_statuses_and_the_last_attempt_are_final() -> None:
    for status in (400, 401, 403, 404, 409, 422, 500):
        assert status_of(Service(httpx.Response(status)), QUICK) == status
    service = Service(*[httpx.ReadError] * 3)
    with pytest.raises(ServiceUnansweredError, match="http://x does not answer") as caught:
        status_of(service, QUICK)
    assert caught.value.may_be_down
    assert service.num_requests == 3
    assert status_of(Service(*[httpx.Response(503)] * 3), QUICK) == 503
    once = Service(httpx.ConnectError, OK)
    with pytest.raises(ServiceUnansweredError):
        status_of(once, NO_RETRIES)
    assert once.num_requests == 1


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, which take no time."""
    taken: list[float] = []
    monkeypatch.setattr("tenacity.nap.time.sleep", taken.append)
    return taken


def test_pauses_double_up_to_the_longest_unless_the_service_states_them(
    pauses: list[float],
) -> None:
    retries = Retries(attempts=6, first_pause_s=1.0, longest_pause_s=3.0)
    assert status_of(Service(*[httpx.Response(503)] * 6), retries) == 503
    for pause_s, longest_s in zip(pauses, (1.0, 2.0, 3.0, 3.0, 3.0), strict=True):
        assert longest_s / 2 <= pause_s <= longest_s
    pauses.clear()

    def put_off(seconds: str) -> httpx.Response:
        return httpx.Response(429, headers={"Retry-After": seconds})

    retries = Retries(first_pause_s=0.1, longest_pause_s=10.0)
    assert status_of(Service(put_off("7"), OK), retries) == 200
    assert pauses.pop() == 7.0
    assert status_of(Service(put_off("11")), retries) == 429
    assert pauses == []
    assert status_of(Service(put_off("soon"), OK), retries) == 200
    assert pauses.pop() <= 0.1


def test_a_closed_connection_answers_nothing_and_one_without_an_address_is_not_made() -> None:
    connection = ServiceConnection("http://x", "t")
    connection.close()
    with pytest.raises(ServiceUnansweredError, match="closed"):
        connection.request("GET", "/")
    for url in ("localhost:8080", "ftp://host", "http://", "http://[::1"):
        with pytest.raises(UrlInvalidError, match="is not the address of a service"):
            ServiceConnection(url, "t")


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Runs a handshake to its end; raises what the client has against it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks = client.wrap_bio(to_client, to_server, server_hostname="any.name")
    answers = server.wrap_bio(to_server, to_client, server_side=True)
    done = set()
    for _ in range(10):
        for side in (asks, answers):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                pass
        if len(done) == 2:
            return
    raise AssertionError("the handshake never ended")


def served_with(certificate: trustme.LeafCert) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    return context


@pytest.mark.parametrize("is_between", [False, True], ids=["authority", "child authority"])
def test_the_pinned_certificate_is_trusted_under_any_name_and_no_other_of_its_authority(
    is_between: bool, tmp_path: Path
) -> None:
    authority = trustme.CA()
    issuer = authority.create_child_ca() if is_between else authority
    ours, another = (issuer.issue_cert("login1.example.org") for _ in range(2))
    file = tmp_path / "service.pem"
    for blob in ours.cert_chain_pems:
        blob.write_to_path(file, append=True)
    assert file.read_text().count("BEGIN CERTIFICATE") == 1 + is_between
    shake_hands(trusting(file), served_with(ours))
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(trusting(file), served_with(another))


def test_a_file_without_a_certificate_is_one_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "service.pem"
    with pytest.raises(CertificateUnreadableError, match="cannot be read"):
        trusting(file)
    for content, why in (
        (b"", "holds no certificate"),
        (b"\xff\xfe", "cannot be read"),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "cannot be read"),
        (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "holds no certificate"),
    ):
        file.write_bytes(content)
        with pytest.raises(CertificateUnreadableError, match=why):
            trusting(file)


LOG = logging.getLogger("tests.outage")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_an_outage_is_one_line_at_its_start_and_one_with_its_duration_at_its_end(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    outage = OutageLog(LOG, "the disk", most_reasons=2, clock=clock)
    outage.worked()
    assert lines(caplog) == []
    for _ in range(100):
        for reason in ("the disk is full", "the disk is gone", "the disk is back"):
            outage.failed(reason)
    starts = [line.split("; ")[0] for line in lines(caplog)]
    assert starts == ["the disk is full", "the disk is gone"], "as many reasons as are wanted"
    clock.now = 12.34
    outage.worked()
    outage.worked()
    assert lines(caplog)[2:] == ["the disk works again after 12.3 s (failed attempts: 300)"]


def test_an_outage_ends_once_nothing_has_failed_for_a_while_and_its_own_part_works(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    outage = OutageLog(LOG, "the service", settled_after_s=6.0, clock=clock)
    for _ in range(100):
        outage.failed("leases are refused")
        clock.now += 5
        outage.worked()
    assert len(lines(caplog)) == 1
    clock.now += 1
    outage.worked()
    assert lines(caplog)[1:] == ["the service works again after 500.0 s (failed attempts: 100)"]
    caplog.clear()
    outage = OutageLog(LOG, "the database")
    outage.failed("the disk is full", part="writing")
    outage.worked("reading")
    assert len(lines(caplog)) == 1
    outage.worked("writing")
    assert len(lines(caplog)) == 2


def test_a_traceback_is_written_of_errors_that_nobody_expected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logged = LayoutTunerError("it is away")
    logged.is_logged = True
    outage = OutageLog(LOG, "the round")
    for error in (LayoutTunerError("it is full"), logged, ZeroDivisionError("a bug")):
        outage.failed("this round failed", error)
    starts = [line.split(";")[0] for line in lines(caplog)]
    assert starts == ["this round failed: it is full", "this round failed: a bug"]
    assert [record.exc_info is not None for record in caplog.records] == [False, True]


def test_what_fails_and_works_in_turn_does_not_flood_and_is_written_once_it_lasts(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    outage = OutageLog(LOG, "the page", clock=clock)
    for _ in range(100):
        outage.failed("the page is damaged")
        outage.worked()
    outage.failed("the page is away")
    assert len(lines(caplog)) == 2 * MOST_STARTS
    clock.now = START_WINDOW_S
    outage.failed("the page is away for long")
    outage.worked()
    start, end = lines(caplog)[2 * MOST_STARTS :]
    assert start.startswith("the page is away for long; ")
    assert f"({100 - MOST_STARTS} shorter outages before it were not written)" in start
    assert end == "the page works again after 60.0 s (failed attempts: 2)"


def test_threads_that_fail_at_once_write_one_line(caplog: pytest.LogCaptureFixture) -> None:
    outage = OutageLog(LOG, "the database")

    def fail() -> None:
        for _ in range(200):
            outage.failed("it is away")

    at_once(*[fail] * 8)
    outage.worked()
    assert len(lines(caplog)) == 2
    assert lines(caplog)[1].endswith("(failed attempts: 1600)")
