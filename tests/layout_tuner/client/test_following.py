"""Loops over events: they end with the campaign, and survive a restart; signals; `Client()`."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx
import pytest

from layout_tuner import Client, EventsMissedError, Retries, ServiceError
from layout_tuner.api.schemas.campaigns_and_trials import CampaignDetail
from layout_tuner.api.settings import Settings
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.records import EventRead
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CAMPAIGN, TOKEN
from tests.kit.live import live_service
from tests.kit.services import ServeProcess
from tests.kit.store import make_campaign
from tests.kit.waiting import wait_until

QUICK = Retries(attempts=3, first_pause_s=0.01, longest_pause_s=0.02)


@pytest.fixture
def url(store: Store) -> Iterator[str]:
    with live_service(Settings(token=TOKEN, event_poll_s=0.01), store) as url:
        yield url.removesuffix("/v1")


class Follower:
    """Loops over the events of a campaign in a thread, to the end of the loop."""

    def __init__(self, client: Client, campaign: str) -> None:
        self.heard: list[EventRead] = []
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._follow, args=(client, campaign))
        self._thread.start()

    def _follow(self, client: Client, campaign: str) -> None:
        try:
            for event in client.campaign_events(campaign, after=0):
                self.heard.append(event)
        except Exception as error:
            self.error = error

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.heard]

    def hears(self, kind: str) -> None:
        wait_until(f"{kind} is heard", lambda: kind in self.kinds or self.error)
        assert self.error is None

    def ends(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), f"the loop goes on after {self.kinds}"
        assert self.error is None


def numbers(events: list[EventRead]) -> list[int]:
    return [event.seq for event in events if event.seq is not None]


def test_a_loop_over_the_events_of_an_ended_campaign_returns(url: str, store: Store) -> None:
    campaign = make_campaign(store)
    store.trials.add(campaign, Layout())
    store.campaigns.cancel(campaign)
    make_campaign(store, "later")
    with Client(url, TOKEN) as client:
        follower = Follower(client, "first")
        follower.ends()
        kinds = ["campaign.created", "trial.added", "campaign.ended", "trial.ended"]
        assert follower.kinds == kinds
        for seen in (1, 3, 4, 5):
            rest = list(client.campaign_events("first", after=seen))
            assert numbers(rest) == [*range(seen + 1, 5)]
        assert list(client.campaign_events("first")) == []


def test_a_loop_over_a_running_campaign_returns_after_its_last_event(
    url: str, store: Store
) -> None:
    campaign = make_campaign(store)
    for tp in (1, 2, 4):
        store.trials.add(campaign, Layout(tp=tp))
    with Client(url, TOKEN) as client:
        follower = Follower(client, "first")
        follower.hears("trial.added")
        store.campaigns.cancel(campaign)
        follower.ends()
    assert follower.kinds[-4:] == ["campaign.ended", *["trial.ended"] * 3]
    assert numbers(follower.heard) == [*range(1, 9)]


def test_events_from_the_first_that_is_stored_are_there_when_older_ones_were_deleted(
    url: str, store: Store
) -> None:
    campaign = make_campaign(store)
    store.campaigns.pause(campaign)
    store.campaigns.cancel(campaign)
    store.events.prune(store._clock())
    with Client(url, TOKEN) as client:
        assert [e.kind for e in client.campaign_events("first", after=0)] == ["campaign.ended"]
        with pytest.raises(EventsMissedError, match="events after 1 are no longer stored"):
            next(client.campaign_events("first", after=1))


class Refusals(httpx.HTTPTransport):
    """The network; it counts requests that nobody answered, and keeps the numbers of resumption."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = 0
        self.resumed: list[str | None] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/events"):
            self.resumed.append(request.headers.get("Last-Event-ID"))
        try:
            return super().handle_request(request)
        except httpx.ConnectError:
            self.refused += 1
            raise


def test_loops_and_waits_go_on_after_the_service_was_killed_and_started_again(
    tmp_path: Path,
) -> None:
    served = ServeProcess(tmp_path / "data")
    served.post("/campaigns", {**CAMPAIGN, "model": "tiny"})
    port, network = served.url.rpartition(":")[2], Refusals()
    ended: list[str] = []
    with Client(served.url, served.token, retries=QUICK, transport=network) as client:
        follower = Follower(client, "first")
        waiting = threading.Thread(target=lambda: ended.append(client.wait("first").state))
        waiting.start()
        follower.hears("campaign.created")
        served.end(signal.SIGKILL)
        # Three refusals ended a loop.
        wait_until("the service was missed", lambda: network.refused > 12)
        assert follower.error is None
        with closing(Store.open(DataDir(served.data_dir))) as store:
            store.campaigns.pause(1)
        served.start(port=port)
        try:
            follower.hears("campaign.paused")
            served.post("/campaigns/first/resume")
            served.post("/campaigns/first/cancel")
            follower.ends()
            waiting.join(60)
        finally:
            served.end()
    assert numbers(follower.heard) == [1, 2, 3, 4]
    assert ended == ["CANCELLED"]
    assert network.resumed[0] == "0"
    assert "1" in network.resumed


def test_a_service_that_stays_away_ends_a_loop_after_the_patience(store: Store) -> None:
    make_campaign(store)
    service = ExitStack()
    url = service.enter_context(live_service(Settings(token=TOKEN), store)).removesuffix("/v1")
    with Client(url, TOKEN, retries=QUICK, patience_s=0.2) as client:
        with service:
            follower = Follower(client, "first")
            follower.hears("campaign.created")
        wait_until("the loop has ended", lambda: follower.error)
        with pytest.raises(ServiceError, match="does not answer"):
            next(client.campaign_events("first"))
    assert isinstance(follower.error, ServiceError)
    assert "does not answer" in str(follower.error)


def test_waiting_ends_at_its_timeout_also_while_the_service_is_away(store: Store) -> None:
    make_campaign(store)

    class Last(Client):
        """A client whose service ends before its second answer."""

        num_reads = 0

        def campaign(self, campaign: str) -> CampaignDetail:
            self.num_reads += 1
            if self.num_reads == 2:
                service.close()
            return super().campaign(campaign)

    with ExitStack() as service:
        url = service.enter_context(live_service(Settings(token=TOKEN), store)).removesuffix("/v1")
        client = Last(url, TOKEN, retries=QUICK, patience_s=20)
        with client, pytest.raises(TimeoutError, match=r"not seen to end in 2 s: .* answer"):
            client.wait("first", timeout_s=2)


def reads() -> bool:
    """Whether the main thread waits for bytes of a service."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    where = frame.f_globals.get("__name__"), frame.f_code.co_name
    return where == ("httpcore._backends.sync", "read")


@contextmanager
def signalled(raised: Exception) -> Iterator[None]:
    """A handler raises this in the main thread while that waits for a service."""

    def handle(_number: int, _frame: object) -> None:
        raise raised

    before = signal.signal(signal.SIGUSR1, handle)

    def interrupt() -> None:
        wait_until("the client reads", reads)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        yield
    finally:
        interrupting.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("kind", [TimeoutError, ConnectionError, RuntimeError])
@pytest.mark.parametrize("ask", [lambda c: next(c.events()), Client.health])
def test_the_error_of_a_signal_handler_comes_through(
    ask: Callable[[Client], object], kind: type[Exception], url: str, store: Store
) -> None:
    """While the client waits for an event, and for an answer that does not come."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        where = f"http://127.0.0.1:{port}" if ask is Client.health else url
        with (
            Client(where, TOKEN, retries=QUICK) as client,
            pytest.raises(kind, match=r"^enough$") as caught,
            signalled(kind("enough")),
        ):
            ask(client)
    assert type(caught.value) is kind


def test_a_client_without_arguments_is_of_the_service_that_the_environment_names(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token.txt"
    file.write_text(f"{TOKEN}\n")
    monkeypatch.setenv("LAYOUT_TUNER_DATA_DIR", str(tmp_path / "nothing"))
    monkeypatch.setenv("LAYOUT_TUNER_URL", url)
    monkeypatch.setenv("LAYOUT_TUNER_TOKEN_FILE", str(file))
    named: list[Callable[[], Client]] = [
        Client,
        lambda: Client(url),
        lambda: Client(token=TOKEN),
        lambda: Client(url, file),
        lambda: Client(url, file.read_text()),
    ]
    for make in named:
        with make() as client:
            assert client.url == url
            assert client.whoami().role == "admin"


def test_a_client_without_arguments_finds_the_service_of_the_data_directory(
    service: ServeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYOUT_TUNER_DATA_DIR", str(tmp_path / "data"))
    with pytest.raises(ServiceError, match=r"no service runs on .* or \$LAYOUT_TUNER_URL and"):
        Client()
    with pytest.raises(ServiceError, match=r"is on another machine.*\$LAYOUT_TUNER_TOKEN_FILE"):
        Client("http://login1.example.org:8080")
    monkeypatch.setenv("LAYOUT_TUNER_DATA_DIR", str(service.data_dir))
    with Client() as client:
        assert client.url == service.url
        assert client.whoami().role == "admin"
