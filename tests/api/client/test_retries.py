from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from api.client import Client, Retries
from api.client.sending import NO_RETRIES
from api.client.service import ServiceCalls
from api.errors import ServiceError

HEALTH = {
    "status": "ok",
    "version": "1",
    "database": True,
    "driver_seen_at": None,
    "driver_alive": False,
    "workers": 0,
}
OK = httpx.Response(200, json=HEALTH)
QUICK = Retries(attempts=3, first_pause_s=0.001, longest_pause_s=0.002)

Happening = httpx.Response | type[httpx.TransportError]


class Service:
    """Answers as it is told, one happening a request; keeps what it was asked."""

    def __init__(self, *happenings: Happening) -> None:
        self.left: list[Happening] = list(happenings)
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        happening = self.left.pop(0)
        if isinstance(happening, httpx.Response):
            return httpx.Response(
                happening.status_code, headers=happening.headers, content=happening.content
            )
        raise happening("as a test wants it")


def ask(service: Service, retries: Retries, method: str, *args: Any) -> Any:
    transport = httpx.MockTransport(service)
    with Client("http://x", "t", retries=retries, transport=transport) as client:
        return getattr(client, method)(*args)


@pytest.mark.parametrize(
    "trouble",
    [
        httpx.ConnectError,
        httpx.ReadError,
        httpx.ReadTimeout,
        httpx.RemoteProtocolError,
        httpx.Response(502),
        httpx.Response(503),
        httpx.Response(504),
        httpx.Response(429),
    ],
)
def test_a_read_is_repeated_after_a_passing_trouble(trouble: Happening) -> None:
    service = Service(trouble, trouble, OK)
    assert ask(service, QUICK, "health").status == "ok"
    assert len(service.asked) == 3


def test_patience_has_an_end() -> None:
    service = Service(*[httpx.ReadError] * 3)
    with pytest.raises(ServiceError, match="http://x does not answer") as caught:
        ask(service, QUICK, "health")
    assert caught.value.status is None
    assert len(service.asked) == 3
    with pytest.raises(ServiceError, match="503") as caught:
        ask(Service(*[httpx.Response(503)] * 3), QUICK, "health")
    assert caught.value.status == 503


@pytest.mark.parametrize("trouble", [httpx.ReadError, httpx.ReadTimeout, httpx.Response(503)])
def test_a_change_that_may_have_been_heard_is_not_sent_twice(trouble: Happening) -> None:
    service = Service(trouble, OK)
    with pytest.raises(ServiceError):
        ask(service, QUICK, "pause_campaign", "tiny")
    assert len(service.asked) == 1


@pytest.mark.parametrize("trouble", [httpx.ConnectError, httpx.ConnectTimeout, httpx.Response(429)])
def test_a_change_that_nobody_heard_is_sent_again(trouble: Happening) -> None:
    refused = httpx.Response(409, json={})
    service = Service(trouble, refused)
    with pytest.raises(ServiceError, match="409"):
        ask(service, QUICK, "pause_campaign", "tiny")
    assert len(service.asked) == 2


def test_a_submission_is_sent_again_under_the_same_key() -> None:
    service = Service(httpx.ReadTimeout, httpx.Response(503), httpx.Response(409))
    with pytest.raises(ServiceError):
        ask(service, QUICK, "create_campaign", {"name": "a"})
    keys = [request.headers["Idempotency-Key"] for request in service.asked]
    assert len(keys) == 3
    assert len(set(keys)) == 1
    with pytest.raises(ServiceError):
        ask(other := Service(httpx.Response(409)), QUICK, "create_campaign", {"name": "a"})
    assert other.asked[0].headers["Idempotency-Key"] not in keys, "another submission"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422, 500])
def test_an_answer_is_an_answer(status: int) -> None:
    service = Service(httpx.Response(status))
    with pytest.raises(ServiceError, match=str(status)):
        ask(service, QUICK, "health")
    assert len(service.asked) == 1


def test_without_retries_everything_is_sent_once() -> None:
    service = Service(httpx.ConnectError, OK)
    with pytest.raises(ServiceError):
        ask(service, NO_RETRIES, "health")
    assert len(service.asked) == 1


def pauses(retries: Retries, answers: Sequence[httpx.Response]) -> list[float | None]:
    call = inspect.unwrap(ServiceCalls.health)(None)
    return [
        retries.pause_after_answer(call, attempt, answer)
        for attempt, answer in enumerate(answers, 1)
    ]


def test_pauses_double_up_to_the_longest() -> None:
    retries = Retries(attempts=6, first_pause_s=1.0, longest_pause_s=3.0)
    *found, last = pauses(retries, [httpx.Response(503)] * 6)
    for pause_s, longest_s in zip(found, (1.0, 2.0, 3.0, 3.0, 3.0), strict=True):
        assert pause_s is not None
        assert longest_s / 2 <= pause_s <= longest_s
    assert last is None


def test_the_service_says_how_long_to_wait_and_is_not_waited_for_without_end() -> None:
    def asks_for(seconds: str) -> httpx.Response:
        return httpx.Response(429, headers={"Retry-After": seconds})

    retries = Retries(first_pause_s=0.1, longest_pause_s=10.0)
    assert pauses(retries, [asks_for("7")]) == [7.0]
    assert pauses(retries, [asks_for("11")]) == [None]
    (unclear,) = pauses(retries, [asks_for("soon")])
    assert unclear is not None
    assert unclear <= 0.1


def test_a_refusal_names_the_fields() -> None:
    problem = {
        "type": "urn:layout-tuner:problem:request-invalid",
        "title": "request invalid",
        "status": 422,
        "detail": "query.limit: too large",
        "errors": [{"field": "query.limit", "message": "too large"}],
    }
    service = Service(httpx.Response(422, json=problem))
    with pytest.raises(ServiceError, match=r"query\.limit: too large") as caught:
        ask(service, NO_RETRIES, "health")
    assert caught.value.problem is not None
    assert caught.value.problem.errors is not None
    assert caught.value.problem.errors[0].field == "query.limit"


@pytest.mark.parametrize("token", ["lt_a b", "lt_\n", "lt_é"])
def test_a_token_that_cannot_be_one_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ServiceError) as caught:
        Client("http://x", token)
    assert "lt_" not in str(caught.value)


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ServiceError, match="is not the address of a service"):
        Client("http://[::1", "t")
