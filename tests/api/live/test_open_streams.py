"""Which streams are admitted, and when they end: in this process, and in real services."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
from hypothesis import given
from hypothesis import strategies as st

from api.background_loops import aligned_pause_s
from api.errors import WatchersTooManyError
from api.live.open_streams import CHECK_INTERVAL_S, CLOSING_S, DISPLACED, OpenStreams
from api.security.authentication import Authentication, Credential
from api.security.holders import Holder, SessionBook, TokenBook
from api.settings import Settings
from results_db.access.tokens import hash_of_token
from results_db.actor import Actor
from results_db.errors import DatabaseUnavailableError
from results_db.store import Store
from search_spaces.spec.layout import Layout
from tests.kit.api import HEADERS, TOKEN
from tests.kit.live import PATIENCE_S, Watcher, live_server, live_service
from tests.kit.postgres import upgraded
from tests.kit.store import make_campaign, make_worker
from tests.kit.waiting import wait_until
from tests.results_db.intercepted_store import InterceptedStore

PROMISED_S = 3.0
"""Seconds from the answer to the revocation, sign-out or expiry until the stream ends."""


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def credential(token_hash: str, session: str | None = None) -> Credential:
    holder = Holder(name=token_hash, role="viewer")
    return Credential(holder=holder, token_hash=token_hash, session_secret=session)


def authentication(store: Any) -> Authentication:
    unused: Any = None
    return Authentication(
        book=TokenBook(store, {}), sessions=SessionBook(store), cookie=unused, guess_limit=unused
    )


@given(asks=st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=60))
def test_a_token_without_a_stream_gets_one_and_no_exchange_is_undone(
    asks: list[tuple[str, bool]],
) -> None:
    unused: Any = None

    async def ask() -> None:
        streams = OpenStreams(unused, max_streams=5)
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


def test_a_full_service_has_room_for_another_token_and_says_who_must_wait(tmp_path: Path) -> None:
    settings = Settings(token=TOKEN, event_poll_s=0.02, max_watchers=3)
    with (
        closing(Store.open(upgraded(tmp_path / "data"))) as store,
        live_service(settings, store) as url,
        ExitStack() as stack,
    ):
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


def test_two_questions_check_any_number_of_streams_and_an_outage_ends_none(tmp_path: Path) -> None:
    async def check(store: Store) -> None:
        counted = CountingStore(store)
        streams = OpenStreams(authentication(counted), 1000)
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

    with closing(Store.open(upgraded(tmp_path))) as store:
        asyncio.run(check(store))


def test_the_sum_of_all_waits_leaves_more_than_half_a_second_for_the_work() -> None:
    ticks = [number * CHECK_INTERVAL_S / 100 for number in range(100)]
    longest = max(aligned_pause_s(now, CHECK_INTERVAL_S) for now in ticks)
    assert longest + CLOSING_S + 0.5 < PROMISED_S


def test_a_waiting_worker_gets_no_trial_after_its_token_was_revoked(tmp_path: Path) -> None:
    settings = Settings(token=TOKEN, lease_poll_s=0.02)
    with (
        closing(Store.open(upgraded(tmp_path / "data"))) as store,
        live_server(settings, store) as live,
        ThreadPoolExecutor(1) as pool,
    ):
        url = f"{live.url}/v1"
        record, secret = store.access.create_token("w", "worker")
        worker = make_worker(store.by(Actor(name="w", role="worker")))
        campaign = make_campaign(store)
        asking = pool.submit(
            httpx.post,
            f"{url}/workers/{worker.id}/leases",
            json={"wait_s": 20},
            headers=bearer(secret),
            timeout=PATIENCE_S,
        )
        metrics = live.server.config.app.state.metrics  # type: ignore[union-attr]
        wait_until("it waits", lambda: metrics.in_flight._value.get() == 1)
        httpx.delete(f"{url}/tokens/{record.id}", headers=HEADERS).raise_for_status()
        store.trials.add(campaign, Layout(num_microbatches=8))
        assert asking.result(PATIENCE_S).json() == {"leases": []}
