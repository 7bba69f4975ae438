"""Which requests are sent again, how often, and after which pauses."""

from __future__ import annotations

from contextlib import closing

import httpx
import pytest

from search_spaces.connection.http_connection import NO_RETRIES, Retries, ServiceConnection
from search_spaces.errors import ServiceUnansweredError, UrlInvalidError

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
