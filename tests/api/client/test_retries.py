"""What the client sends again, and how it reports refusals."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from api.client import Client, Retries
from api.errors import ServiceError

QUICK = Retries(attempts=3, first_pause_s=0.001, longest_pause_s=0.002)


class Service:
    """Refuses each request with the next answer, and keeps the requests."""

    def __init__(self, *answers: httpx.Response) -> None:
        self._left = list(answers)
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        return self._left.pop(0)


def refused(service: Service, method: str, *args: Any) -> ServiceError:
    transport = httpx.MockTransport(service)
    with (
        Client("http://x", "t", retries=QUICK, transport=transport) as client,
        pytest.raises(ServiceError) as caught,
    ):
        getattr(client, method)(*args)
    return caught.value


def test_reads_are_sent_again_and_changes_are_not() -> None:
    reading = Service(httpx.Response(503), httpx.Response(503), httpx.Response(404))
    assert refused(reading, "health").status == 404
    assert refused(Service(httpx.Response(503)), "pause_campaign", "tiny").status == 503


def test_a_submission_is_sent_again_under_the_same_key() -> None:
    service = Service(httpx.Response(503), httpx.Response(503), httpx.Response(409))
    assert refused(service, "create_campaign", {"name": "a"}).status == 409
    keys = [request.headers["Idempotency-Key"] for request in service.asked]
    assert len(keys) == 3
    assert len(set(keys)) == 1
    refused(other := Service(httpx.Response(409)), "create_campaign", {"name": "a"})
    assert other.asked[0].headers["Idempotency-Key"] not in keys, "another submission"


def test_a_service_that_does_not_answer_may_have_to_be_started() -> None:
    with (
        Client("http://127.0.0.1:1", "t", retries=QUICK) as client,
        pytest.raises(ServiceError, match=r"does not answer .* `layout-tuner up` starts one") as it,
    ):
        client.health()
    assert it.value.status is None


def test_a_token_or_an_address_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(ServiceError, match="is not the address of a service"):
        Client("http://[::1", "t")
    for token in ("lt_a b", "lt_\n", "lt_é"):
        with pytest.raises(ServiceError) as caught:
            Client("http://x", token)
        assert "lt_" not in str(caught.value)
