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


def test_a_revocation_is_known_at_once(book: TokenBook, store: Store) -> None:
    record, token = store.access.create_token("ci", "viewer")
    assert run(book.find(hashed(token))) is not None
    store.access.revoke_token(record.id)
    assert run(book.find(hashed(token))) is None


def test_a_token_ends_at_its_time(counted: CountingStore, store: Store) -> None:
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


def test_each_use_of_a_token_is_reported_once(book: TokenBook, store: Store) -> None:
    record, token = store.access.create_token("ci", "viewer")
    run(book.find(hashed(token)))
    run(book.find(hashed(token)))
    run(book.find(hashed("lt_admin")))
    assert book.take_uses() == {record.id}
    assert book.take_uses() == set()
