"""The client: its routes and parameters, what it sends again, and how it follows live events."""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from layout_tuner.api.openapi_document import openapi_text
from layout_tuner.api.settings import Settings
from layout_tuner.client.clients import Client
from layout_tuner.client.errors import EventsMissedError, ServiceError
from layout_tuner.protocol.connection.http_connection import NO_RETRIES, Retries
from layout_tuner.results_db.store import Store
from tests.kit.api import TOKEN
from tests.kit.live import live_service
from tests.kit.store import make_campaign
from tests.layout_tuner.client.samples import arguments, described

UNASKED = {"if-none-match"}
"""Headers of programs that show the same page again and again."""
OF_WORKERS = {
    *("register_worker", "drain_worker", "lease_trials", "post_heartbeat", "post_outcome")
}
"""Operations of the worker protocol: `LeaseClient` of the workers has their methods."""
METHODS = {"get", "put", "post", "patch", "delete"}


class Operation(NamedTuple):
    """One route as the OpenAPI document describes it."""

    id: str
    method: str
    path: str
    queries: set[str]
    headers: set[str]
    has_body: bool

    def serves(self, request: httpx.Request) -> bool:
        pattern = re.sub(r"\{[^}]+\}", "[^/]+", self.path)
        return request.method == self.method and bool(re.fullmatch(pattern, request.url.path))


def operations_of(document: dict[str, Any]) -> Iterator[Operation]:
    for path, item in document["paths"].items():
        for method in item.keys() & METHODS:
            operation = item[method]
            named = [(each["in"], each["name"].lower()) for each in operation.get("parameters", [])]
            yield Operation(
                id=operation["operationId"],
                method=method.upper(),
                path=path,
                queries={name for kind, name in named if kind == "query"},
                headers={name for kind, name in named if kind == "header"} - UNASKED,
                has_body=operation.get("requestBody", {}).get("required", False),
            )


def asked_by_client(name: str) -> httpx.Request:
    """What a method of the client asks."""
    asked: list[httpx.Request] = []
    transport = httpx.MockTransport(lambda request: asked.append(request) or httpx.Response(418))

    def ask() -> None:
        with Client("http://x", "t", retries=NO_RETRIES, transport=transport) as client:
            answer = getattr(client, name)(**arguments(name))
            next(answer)  # of a list; anything else has been refused already

    with pytest.raises(ServiceError, match="418"):
        ask()
    (request,) = asked
    return request


def served(request: httpx.Request, operations: list[Operation]) -> Operation:
    """The operation that answers a request; of several the one whose path has fewest gaps."""
    serving = [operation for operation in operations if operation.serves(request)]
    assert serving, f"no route serves {request.method} {request.url.path}"
    return min(serving, key=lambda operation: operation.path.count("{"))


def test_every_route_for_others_than_workers_has_a_client_method_with_all_of_its_parameters() -> (
    None
):
    operations = list(operations_of(json.loads(openapi_text())))
    queries: defaultdict[str, set[str]] = defaultdict(set)
    headers: defaultdict[str, set[str]] = defaultdict(set)
    bodies: defaultdict[str, bool] = defaultdict(bool)
    for name in described():
        request = asked_by_client(name)
        operation = served(request, operations)
        queries[operation.id] |= set(request.url.params)
        headers[operation.id] |= set(request.headers)
        bodies[operation.id] |= bool(request.content)
    assert {each.id for each in operations} - set(queries) == OF_WORKERS, "routes without a method"
    for each in operations:
        if each.id in OF_WORKERS:
            continue
        assert queries[each.id] == each.queries, f"the query of {each.id}"
        assert headers[each.id] >= each.headers, f"the headers of {each.id}"
        assert bodies[each.id] or not each.has_body, f"the body of {each.id}"


IMPATIENT = Retries(attempts=2, first_pause_s=0.01)
ROUNDS = 20


@pytest.fixture
def url(store: Store) -> Iterator[str]:
    """Of a service whose streams last a moment."""
    settings = Settings(token=TOKEN, event_poll_s=0.01, event_stream_s=0.05)
    with live_service(settings, store) as url:
        yield url.removesuffix("/v1")


def test_a_client_hears_each_event_once_over_many_streams(url: str, store: Store) -> None:
    campaign = make_campaign(store)

    def pause_and_resume() -> None:
        for _ in range(ROUNDS):
            store.campaigns.pause(campaign)
            store.campaigns.resume(campaign)

    writing = threading.Thread(target=pause_and_resume)
    with Client(url, TOKEN) as client:
        events = client.campaign_events("first", after=0)
        heard = [next(events)]
        writing.start()
        heard += [next(events) for _ in range(2 * ROUNDS)]
        writing.join()
    assert [event.seq for event in heard] == list(range(1, 2 * ROUNDS + 2))
    assert {event.campaign_id for event in heard} == {campaign}


def test_a_client_reports_pruned_events_and_refusals(url: str, store: Store) -> None:
    campaign = make_campaign(store)
    store.campaigns.pause(campaign)
    store.campaigns.resume(campaign)
    store.events.prune(store._clock())
    with Client(url, TOKEN) as client, pytest.raises(EventsMissedError, match="no longer stored"):
        next(client.campaign_events("first", after=1))

    with Client(url, TOKEN) as client, pytest.raises(ServiceError, match="no campaign named"):
        next(client.campaign_events("nothing"))
    with (
        Client("http://127.0.0.1:1", TOKEN, retries=IMPATIENT) as client,
        pytest.raises(ServiceError, match="does not answer"),
    ):
        next(client.events())


OPENED = 'event: stream.opened\ndata: {"after":1,"missed":false}\nid: 1\n\n'
CLOSED = 'event: stream.closed\ndata: {"reason":"come again"}\n\n'


QUICK = Retries(attempts=3, first_pause_s=0.001, longest_pause_s=0.002)


class Service:
    """Refuses each request with the next answer, and keeps the requests."""

    def __init__(self, *answers: httpx.Response) -> None:
        self._left = list(answers)
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        return self._left.pop(0)


def refused(
    service: Service, ask: Callable[[Client], Any], retries: Retries = QUICK
) -> ServiceError:
    transport = httpx.MockTransport(service)
    with (
        Client("http://x", "t", retries=retries, transport=transport) as client,
        pytest.raises(ServiceError) as caught,
    ):
        ask(client)
    return caught.value


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited between requests."""
    pauses: list[float] = []
    monkeypatch.setattr("layout_tuner.client.calls.time.sleep", pauses.append)
    return pauses


def next_event(client: Client) -> None:
    next(client.events())


def stream(text: str) -> httpx.Response:
    return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, text=text)


@pytest.mark.parametrize("text", ["", OPENED, ": is alive\n\n"])
def test_a_stream_that_ends_at_once_is_retried_with_pauses(pauses: list[float], text: str) -> None:
    streams = Service(*(stream(text) for _ in range(10)))
    error = refused(streams, next_event, Retries(attempts=3, first_pause_s=1.0))
    assert "end as soon as they begin, 3 times now" in str(error)
    first, second = pauses
    assert 0.5 <= first <= 1.0 <= second <= 2.0


def test_a_stream_that_the_service_closes_is_reopened_with_pauses(pauses: list[float]) -> None:
    streams = Service(*map(stream, [OPENED, OPENED + CLOSED] * 5), httpx.Response(404))
    assert refused(streams, next_event, IMPATIENT).status == 404
    assert len(pauses) == 10
    assert min(pauses) >= IMPATIENT.first_pause_s / 2


def test_reads_are_sent_again_and_changes_are_not() -> None:
    reading = Service(httpx.Response(503), httpx.Response(503), httpx.Response(404))
    assert refused(reading, Client.health).status == 404
    assert refused(Service(httpx.Response(503)), lambda c: c.pause_campaign("tiny")).status == 503


def test_a_submission_is_sent_again_under_the_same_key() -> None:
    def submit(client: Client) -> None:
        client.create_campaign({"name": "a"})

    service = Service(httpx.Response(503), httpx.Response(503), httpx.Response(409))
    assert refused(service, submit).status == 409
    keys = [request.headers["Idempotency-Key"] for request in service.asked]
    assert len(keys) == 3
    assert len(set(keys)) == 1
    refused(other := Service(httpx.Response(409)), submit)
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
    for token in ("lt_a b", "lt_\na", "lt_é"):
        with pytest.raises(ServiceError) as caught:
            Client("http://x", token)
        assert "lt_" not in str(caught.value)
