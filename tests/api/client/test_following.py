"""The client follows live events of a real service, and goes on where a stream was lost."""

import threading
from collections.abc import Iterator

import httpx
import pytest

from api.client import Client, Retries
from api.errors import EventsMissedError, ServiceError
from api.settings import Settings
from results_db.store import Store
from tests.kit.api import TOKEN
from tests.kit.live import live_service
from tests.kit.store import make_campaign

IMPATIENT = Retries(attempts=2, first_pause_s=0.01)
ROUNDS = 20


@pytest.fixture
def url(store: Store) -> Iterator[str]:
    """Of a service whose streams last a moment."""
    settings = Settings(token=TOKEN, event_poll_s=0.01, event_stream_s=0.05)
    with live_service(settings, store) as url:
        yield url.removesuffix("/v1")


def pause_and_resume(store: Store, campaign: int) -> None:
    for _ in range(ROUNDS):
        store.campaigns.pause(campaign)
        store.campaigns.resume(campaign)


def test_a_client_hears_each_event_once_over_many_streams(url: str, store: Store) -> None:
    campaign = make_campaign(store)
    writing = threading.Thread(target=pause_and_resume, args=(store, campaign))
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


class Streams:
    """Answers each request with the next stream, and keeps how long was waited between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
        self._left = list(texts)
        self.pauses: list[float] = []
        monkeypatch.setattr("api.client.calls.time.sleep", self.pauses.append)

    def __call__(self, _request: httpx.Request) -> httpx.Response:
        if not self._left:
            return httpx.Response(404)
        headers = {"Content-Type": "text/event-stream"}
        return httpx.Response(200, headers=headers, text=self._left.pop(0))

    def follow(self, retries: Retries) -> None:
        transport = httpx.MockTransport(self)
        with Client("http://service", TOKEN, retries=retries, transport=transport) as client:
            next(client.events())


@pytest.mark.parametrize("text", ["", OPENED, ": is alive\n\n"])
def test_a_stream_that_ends_at_once_is_retried_with_pauses(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    streams = Streams(monkeypatch, *[text] * 10)
    with pytest.raises(ServiceError, match="end as soon as they begin, 3 times now"):
        streams.follow(Retries(attempts=3, first_pause_s=1.0))
    first, second = streams.pauses
    assert 0.5 <= first <= 1.0 <= second <= 2.0


def test_a_stream_that_the_service_closes_is_reopened_with_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams(monkeypatch, *[OPENED, OPENED + CLOSED] * 5)
    with pytest.raises(ServiceError, match="404 Not Found"):
        streams.follow(IMPATIENT)
    assert len(streams.pauses) == 10
    assert min(streams.pauses) >= IMPATIENT.first_pause_s / 2
