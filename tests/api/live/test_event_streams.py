"""Streams of events: what watchers hear, which are admitted, and when they end."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout_tuner.api.background_loops import aligned_pause_s
from layout_tuner.api.errors import WatchersTooManyError
from layout_tuner.api.live import open_streams
from layout_tuner.api.live.open_streams import CHECK_INTERVAL_S, CLOSING_S, DISPLACED, OpenStreams
from layout_tuner.api.security.authentication import Authentication, Credential
from layout_tuner.api.security.holders import Holder, SessionBook, TokenBook
from layout_tuner.api.settings import Settings
from layout_tuner.results_db.access.tokens import hash_of_token
from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.database.events import emit
from layout_tuner.results_db.errors import DatabaseUnavailableError
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import HEADERS, TOKEN, answered, bearer
from tests.kit.live import PATIENCE_S, Watcher, live_server, live_service
from tests.kit.store import completed, lease_one, make_campaign, make_worker, post_outcome
from tests.kit.waiting import wait_until
from tests.results_db.intercepted_store import InterceptedStore

LAYOUT = Layout(num_microbatches=8)


@pytest.fixture
def settings() -> Settings:
    return Settings(token=TOKEN, event_poll_s=0.02, event_idle_poll_s=0.05)


@pytest.fixture
def url(settings: Settings, store: Store) -> Iterator[str]:
    with live_service(settings, store) as url:
        yield url


def campaign_url(url: str, campaign: int) -> str:
    return f"{url}/campaigns/{campaign}/events"


def test_a_watcher_hears_what_happens_to_all_or_to_its_campaign_and_to_no_other(
    url: str, store: Store
) -> None:
    with Watcher(f"{url}/events") as watcher:
        watcher.opened()
        mine, other = make_campaign(store, "mine"), make_campaign(store, "other")
        events = [watcher.next()[1] for _ in range(2)]
    assert [(event["seq"], event["campaign_id"]) for event in events] == [(1, mine), (2, other)]
    with Watcher(campaign_url(url, mine)) as watcher:
        assert watcher.opened() == {"after": 2, "missed": False}
        trial = store.trials.add(mine, LAYOUT)
        store.campaigns.pause(other)
        worker = make_worker(store)
        lease_one(store, worker.id)
        post_outcome(store, trial.id, 1, completed(LAYOUT))
        heard = [watcher.next() for _ in range(3)]
    assert [kind for kind, _ in heard] == ["trial.added", "trial.leased", "trial.ended"]
    _, ended = heard[-1]
    assert (ended["campaign_id"], ended["trial_id"]) == (mine, trial.id)
    assert ended["data"]["state"] == "COMPLETED"
    assert watcher.last_id == str(ended["seq"])


def test_a_watcher_that_lost_the_stream_hears_what_it_missed_once(url: str, store: Store) -> None:
    campaign = make_campaign(store)
    with Watcher(campaign_url(url, campaign)) as watcher:
        watcher.opened()
        store.campaigns.pause(campaign)
        watcher.kinds(1)
    store.campaigns.resume(campaign)
    make_campaign(store, "other")
    store.campaigns.pause(campaign)
    with Watcher(campaign_url(url, campaign), last_event_id=watcher.last_id) as again:
        assert again.opened() == {"after": 2, "missed": False}
        assert again.kinds(2) == ["campaign.resumed", "campaign.paused"]
        store.campaigns.cancel(campaign)
        assert again.kinds(1) == ["campaign.ended"]


def test_a_watcher_is_told_where_it_begins_and_whether_it_missed_something(
    url: str, store: Store
) -> None:
    campaign = make_campaign(store)
    address = campaign_url(url, campaign)
    store.campaigns.pause(campaign)
    with Watcher(f"{address}?after=0", last_event_id=1) as watcher:
        assert watcher.opened() == {"after": 1, "missed": False}, "the address is older"
        assert watcher.kinds(1) == ["campaign.paused"]
    with Watcher(address, last_event_id=900) as watcher:  # of another database
        assert watcher.opened() == {"after": 2, "missed": True}
        store.campaigns.resume(campaign)
        assert watcher.kinds(1) == ["campaign.resumed"]
    store.events.prune(store._clock())
    for last, missed in ((1, True), (2, False)):
        with Watcher(address, last_event_id=last) as watcher:
            assert watcher.opened() == {"after": last, "missed": missed}
            assert watcher.kinds(1) == ["campaign.resumed"]


def test_many_missed_events_are_sent_page_by_page_before_new_ones(
    url: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layout_tuner.api.live.event_stream.PAGE", 3)
    monkeypatch.setattr("layout_tuner.api.live.event_hub.PAGE", 3)
    campaign = make_campaign(store)
    for _ in range(4):
        store.campaigns.pause(campaign)
        store.campaigns.resume(campaign)
    with Watcher(f"{campaign_url(url, campaign)}?after=0") as watcher:
        watcher.opened()
        past = [watcher.next()[1]["seq"] for _ in range(9)]
        store.campaigns.cancel(campaign)
        assert [*past, watcher.next()[1]["seq"]] == list(range(1, 11))


def test_a_stream_needs_its_campaign_a_token_and_a_last_event_id_that_is_a_number(url: str) -> None:
    assert httpx.get(campaign_url(url, 7), headers=HEADERS).status_code == 404
    assert httpx.get(f"{url}/events").status_code == 401
    for number in ("x", "-1", "1.0", "9" * 30):
        headers = {**HEADERS, "Last-Event-ID": number}
        answered(httpx.get(f"{url}/events", headers=headers), 400, number)


def test_a_silent_stream_is_kept_alive_by_comments_until_it_must_come_again(store: Store) -> None:
    settings = Settings(token=TOKEN, event_poll_s=0.02, event_ping_s=0.05, event_stream_s=0.3)
    with (
        live_service(settings, store) as url,
        httpx.stream("GET", f"{url}/events", headers=HEADERS, timeout=30) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        lines = [*answer.iter_lines()]  # to its end
    assert ": ping" in lines
    assert "event: stream.closed" in lines
    assert "come again" in lines[lines.index("event: stream.closed") + 1]


def test_a_stream_ends_aloud_when_the_service_does(
    url: str, store: Store, settings: Settings
) -> None:
    with Watcher(f"{url}/events") as watcher:
        watcher.opened()
        settings.stopping.set()
        assert watcher.next() == ("stream.closed", {"reason": "the service ends"})
        assert watcher.has_ended()


def test_a_stream_ends_when_its_token_is_revoked_not_at_the_next_check(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_streams, "CHECK_INTERVAL_S", 1000 * PATIENCE_S)
    record, secret = store.access.create_token("w", "viewer")
    with (
        live_service(Settings(token=TOKEN, event_poll_s=0.02), store) as url,
        Watcher(f"{url}/events", headers=bearer(secret)) as watcher,
    ):
        watcher.opened()
        httpx.delete(f"{url}/tokens/{record.id}", headers=HEADERS).raise_for_status()
        assert watcher.next()[0] == "stream.closed"


def test_more_watchers_than_are_served_are_refused_until_one_leaves(store: Store) -> None:
    settings = Settings(token=TOKEN, event_poll_s=0.02, max_watchers=1)
    with live_service(settings, store) as url:
        with Watcher(f"{url}/events") as watcher:
            watcher.opened()
            refused = httpx.get(f"{url}/events", headers=HEADERS)
            answered(refused, 503, "1 watch live events already")

        def served_again() -> bool:
            with Watcher(f"{url}/events") as another:
                return another._events.get(timeout=30) is not None

        wait_until("the place is free again", served_again)


def test_a_watcher_that_catches_up_without_reading_counts_for_the_limit(store: Store) -> None:
    settings = Settings(token=TOKEN, event_poll_s=0.02, max_watchers=1)
    campaign = make_campaign(store)
    for _ in range(60):
        flood(store, campaign)
    with live_service(settings, store) as url, deaf_watcher(url):

        def refused() -> bool:
            with httpx.stream("GET", f"{url}/events", headers=HEADERS, timeout=30) as answer:
                return answer.status_code == 503

        wait_until("another is refused", refused)


@contextmanager
def deaf_watcher(url: str) -> Iterator[None]:
    """One that wants everything from the first event, and reads none of it."""
    host, port = url.split("/")[2].split(":")
    with socket.create_connection((host, int(port))) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(
            f"GET /v1/events?after=0 HTTP/1.1\r\nHost: {host}\r\n"
            f"Authorization: {HEADERS['Authorization']}\r\n\r\n".encode()
        )
        assert deaf.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200"  # it is admitted
        yield


def test_a_watcher_that_reads_nothing_is_dropped_aloud(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(token=TOKEN, event_poll_s=0.02, event_send_s=0.2, max_waiting_events=10_000)
    campaign = make_campaign(store)
    with live_service(settings, store) as url, caplog.at_level(logging.WARNING), deaf_watcher(url):

        def dropped() -> bool:
            for _ in range(20):
                flood(store, campaign)
            return "read nothing" in caplog.text

        wait_until("it is dropped", dropped)


def flood(store: Store, campaign: int) -> None:
    """Events that fill a connection soon."""
    with store._db.write() as session:
        for _ in range(50):
            emit(session, campaign, "campaign.changed", now=store._clock(), words="x" * 4000)


def test_a_watcher_with_too_many_unread_events_hears_why_it_is_dropped(store: Store) -> None:
    settings = Settings(token=TOKEN, event_poll_s=0.02, max_waiting_events=20)
    campaign = make_campaign(store)
    with live_server(settings, store) as live, Watcher(f"{live.url}/v1/events") as watcher:
        watcher.opened()
        # What comes before it has caught up is sent as it is read, however much it is.
        hub = live.server.config.app.state.hub  # type: ignore[union-attr]
        wait_until("it has caught up", lambda: hub._subscriptions)
        flood(store, campaign)
        assert watcher.kinds(20) == ["campaign.changed"] * 20
        kind, said = watcher.next()
        assert (kind, "too slow" in said["reason"]) == ("stream.closed", True)
        last = watcher.last_id
    assert last


def test_a_stream_outlives_a_database_that_is_gone_for_a_while(
    url: str, store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = make_campaign(store)
    failed: list[float] = []

    def gone(**_: object) -> None:
        failed.append(time.monotonic())
        raise DatabaseUnavailableError("the disk is full")

    with Watcher(campaign_url(url, campaign)) as watcher, caplog.at_level(logging.WARNING):
        watcher.opened()
        with monkeypatch.context() as patch:
            patch.setattr(store.events, "find", gone)
            store.campaigns.pause(campaign)
            wait_until("it was looked for in vain", lambda: len(failed) > 1)
        assert watcher.kinds(1) == ["campaign.paused"]
    assert "no live event was read: the disk is full" in caplog.text


PROMISED_S = 3.0
"""Seconds from the answer to the revocation, sign-out or expiry until the stream ends."""
UNUSED: Any = None


def credential(token_hash: str, session: str | None = None) -> Credential:
    holder = Holder(name=token_hash, owner=token_hash, role="viewer")
    return Credential(holder=holder, token_hash=token_hash, session_secret=session)


@given(asks=st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=60))
def test_a_token_without_a_stream_gets_one_and_no_exchange_is_undone(
    asks: list[tuple[str, bool]],
) -> None:
    async def ask() -> None:
        streams = OpenStreams(UNUSED, max_streams=5)
        kept: list[tuple[str, asyncio.Future[str]]] = []
        with ExitStack() as stack:
            for name, is_session in asks:
                before = Counter(each for each, ended in kept if not ended.done())
                one = credential(name, "secret" if is_session else None)
                try:
                    kept.append((name, stack.enter_context(streams.admitted(one))))
                except WatchersTooManyError:
                    assert before.total() == 5
                    assert before[name] + 2 > max(before.values())
                    continue
                after = Counter(each for each, ended in kept if not ended.done())
                assert after.total() <= 5
                assert after[name] == before[name] + 1
                displaced = [each for each in before if after[each] < before[each]]
                # What a token lost, it cannot take back from who got it.
                assert all(after[each] >= after[name] for each in displaced)

    asyncio.run(ask())


def test_a_full_service_has_room_for_another_token_and_says_who_must_wait(store: Store) -> None:
    settings = Settings(token=TOKEN, event_poll_s=0.02, max_watchers=3)
    with live_service(settings, store) as url, ExitStack() as stack:
        viewer = bearer(store.access.create_token("many", "viewer")[1])
        viewers = []
        for _ in range(3):  # the one that is admitted first is displaced
            viewers.append(stack.enter_context(Watcher(f"{url}/events", headers=viewer)))
            viewers[-1].opened()
        first = viewers[0]
        refused = httpx.get(f"{url}/events", headers=viewer)
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert "3 of them have this token" in refused.json()["detail"]
        admin = stack.enter_context(Watcher(f"{url}/events"))
        admin.opened()
        kinds = iter(lambda: first.next(), None)
        said = next(data for kind, data in kinds if kind == "stream.closed")
        assert said == {"reason": DISPLACED}
        assert first.has_ended()
        # The others go on.
        make_campaign(store)
        for each in (*viewers[1:], admin):
            assert "campaign.created" in each.kinds(1)


class CountingStore(InterceptedStore):
    """A store whose questions about tokens and sessions are counted, and may fail."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, self._count)
        self.asked, self.is_away = 0, False

    def _count(self, call: str) -> None:
        if call in ("access.tokens_by_hash", "sign_ins.sessions_by_hash"):
            self.asked += 1
            if self.is_away:
                raise DatabaseUnavailableError("away")


def test_two_questions_check_any_number_of_streams_and_an_outage_ends_none(store: Store) -> None:
    async def check() -> None:
        counted: Any = CountingStore(store)
        book, sessions = TokenBook(counted, {}), SessionBook(counted)
        of_all = Authentication(book=book, sessions=sessions, cookie=UNUSED, guess_limit=UNUSED)
        streams = OpenStreams(of_all, 1000)
        made = [store.access.create_token(f"t{number}", "viewer") for number in range(20)]
        hashes = [hash_of_token(secret.encode()) for _, secret in made]
        secrets = [store.sign_ins.create_session(each) for each in hashes[:10]]
        with ExitStack() as stack:
            opened = [
                stack.enter_context(streams.admitted(credential(each, session)))
                for each, session in zip(hashes, [*secrets, *[None] * 10], strict=True)
                for _ in range(10)
            ]
            await streams._check()
            assert counted.asked == 2
            counted.is_away = True
            store.access.revoke_token(made[-1][0].id)
            store.sign_ins.end_session(hash_of_token(secrets[0].encode()))
            task = asyncio.create_task(streams.run())
            await until(lambda: counted.asked > 2)
            assert not any(ended.done() for ended in opened)
            counted.is_away = False
            await until(lambda: opened[0].done())
            assert [ended.done() for ended in opened] == [True] * 10 + [False] * 180 + [True] * 10
            task.cancel()

    async def until(condition: Any) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.01)

    asyncio.run(check())


def test_the_sum_of_all_waits_leaves_more_than_half_a_second_for_the_work() -> None:
    ticks = [number * CHECK_INTERVAL_S / 100 for number in range(100)]
    longest = max(aligned_pause_s(now, CHECK_INTERVAL_S) for now in ticks)
    assert longest + CLOSING_S + 0.5 < PROMISED_S


def test_a_waiting_worker_gets_no_trial_after_its_token_was_revoked(store: Store) -> None:
    settings = Settings(token=TOKEN, lease_poll_s=0.02)
    with live_server(settings, store) as live, ThreadPoolExecutor(1) as pool:
        url = f"{live.url}/v1"
        record, secret = store.access.create_token("w", "worker")
        worker = make_worker(store.by(Actor(name="w", role="worker")))
        campaign = make_campaign(store)
        asked = {"json": {"wait_s": 20}, "headers": bearer(secret), "timeout": PATIENCE_S}
        asking = pool.submit(httpx.post, f"{url}/workers/{worker.id}/leases", **asked)
        metrics = live.server.config.app.state.metrics  # type: ignore[union-attr]
        wait_until("it waits", lambda: metrics.in_flight._value.get() == 1)
        httpx.delete(f"{url}/tokens/{record.id}", headers=HEADERS).raise_for_status()
        store.trials.add(campaign, Layout(num_microbatches=8))
        assert asking.result(PATIENCE_S).json() == {"leases": []}
