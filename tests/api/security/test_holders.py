"""Who holds a token, and until when."""

import asyncio
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest

from api.security.holders import Holder, TokenBook, local_holders
from results_db.access.tokens import TokenRecord, hash_of_token
from results_db.errors import DatabaseUnavailableError
from results_db.store import Store

T = TypeVar("T")


class CountingStore:
    """The store's look-ups, counted; and what happens in the middle of one."""

    def __init__(self, store: Store) -> None:
        self.store, self.lookups = store, 0
        self.access = self
        self.in_between: Any = lambda: None

    def now(self) -> datetime:
        return self.store.now()

    def token_by_hash(self, hashed: str) -> TokenRecord | None:
        self.lookups += 1
        found = self.store.access.token_by_hash(hashed)
        self.in_between()
        return found


@pytest.fixture
def counted(store: Store) -> CountingStore:
    return CountingStore(store)


@pytest.fixture
def book(counted: CountingStore) -> TokenBook:
    return TokenBook(counted, local_holders("lt_admin", "lt_worker"))  # type: ignore[arg-type]


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def hashed(token: str) -> str:
    return hash_of_token(token.encode())


def test_the_data_directorys_tokens_need_no_database(
    book: TokenBook, counted: CountingStore
) -> None:
    assert run(book.find(hashed("lt_admin"))) == Holder(name="local", role="admin")
    assert run(book.find(hashed("lt_worker"))) == Holder(name="local-worker", role="worker")
    assert counted.lookups == 0


def test_the_database_is_asked_once_a_second_however_many_ask(
    book: TokenBook, counted: CountingStore, ticks: Ticks, store: Store
) -> None:
    _, token = store.access.create_token("ci", "viewer")

    async def ask_often() -> None:
        for _ in range(100):
            assert await book.find(hashed(token)) is not None

    run(ask_often())
    assert counted.lookups == 1
    ticks.now += USED_FOR_S
    run(ask_often())
    assert counted.lookups == 2


def test_a_revocation_of_ones_own_is_known_at_once_and_anothers_within_a_second(
    book: TokenBook, store: Store, ticks: Ticks
) -> None:
    record, token = store.access.create_token("ci", "viewer")
    assert run(book.find(hashed(token))) is not None
    store.access.revoke_token(record.id)
    book.forget(record.id)
    assert run(book.find(hashed(token))) is None

    record, token = store.access.create_token("other", "viewer")
    assert run(book.find(hashed(token))) is not None
    store.access.revoke_token(record.id)
    ticks.now += USED_FOR_S
    assert run(book.find(hashed(token))) is None


def test_a_look_up_that_a_revocation_overtook_is_not_cached(
    book: TokenBook, counted: CountingStore, store: Store
) -> None:
    record, token = store.access.create_token("ci", "viewer")

    def revoke() -> None:
        store.access.revoke_token(record.id)
        book.forget(record.id)

    counted.in_between = revoke
    run(book.find(hashed(token)))  # asked before the revocation, and let through
    counted.in_between = lambda: None
    assert run(book.find(hashed(token))) is None


def test_a_token_ends_at_its_time_even_while_it_is_cached(
    counted: CountingStore, store: Store
) -> None:
    now = datetime.now(UTC)
    times = [now, now + timedelta(hours=2)]
    _, token = store.access.create_token("ci", "viewer", expires_at=now + timedelta(hours=1))
    counted.now = lambda: times.pop(0)  # type: ignore[method-assign]
    book = TokenBook(counted, {})  # type: ignore[arg-type]
    assert run(book.find(hashed(token))) is not None
    assert run(book.find(hashed(token))) is None


def test_a_database_that_is_away_says_so_and_is_asked_again(
    book: TokenBook, counted: CountingStore, store: Store
) -> None:
    _, token = store.access.create_token("ci", "viewer")

    def fail() -> None:
        raise DatabaseUnavailableError("away")

    counted.in_between = fail
    with pytest.raises(DatabaseUnavailableError):
        run(book.find(hashed(token)))
    counted.in_between = lambda: None
    assert run(book.find(hashed(token))) is not None


def test_uses_are_told_once(book: TokenBook, store: Store) -> None:
    record, token = store.access.create_token("ci", "viewer")
    run(book.find(hashed(token)))
    run(book.find(hashed(token)))
    run(book.find(hashed("lt_admin")))
    assert book.take_uses() == {record.id}
    assert book.take_uses() == set()
