"""Which sessions are valid, and which of them are renewed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from api.security.holders import RENEWED_EVERY, SessionBook, TokenBook, noting_uses
from results_db.access.sign_ins import SESSION_IDLE_LIFE
from results_db.access.tokens import hash_of_token
from results_db.store import Store
from tests.kit.postgres import upgraded
from tests.kit.store import TurnableClock

TOKEN = hash_of_token(b"lt_somebody")


@pytest.fixture
def clock() -> TurnableClock:
    return TurnableClock()


@pytest.fixture
def store(tmp_path: Path, clock: TurnableClock) -> Iterator[Store]:
    with closing(Store.open(upgraded(tmp_path), clock=clock)) as store:
        yield store


@pytest.fixture
def book(store: Store) -> SessionBook:
    return SessionBook(store)


@pytest.fixture
def session(store: Store) -> str:
    """The hash of the secret of a new session."""
    return hash_of_token(store.sign_ins.create_session(TOKEN).encode())


def find(book: SessionBook, session: str) -> str | None:
    return asyncio.run(book.find(session))


def test_a_session_leads_to_its_token(book: SessionBook, session: str) -> None:
    assert find(book, session) == TOKEN
    assert find(book, TOKEN) is None


def test_an_ended_session_is_not_valid(
    book: SessionBook, store: Store, session: str, clock: TurnableClock
) -> None:
    other = hash_of_token(store.sign_ins.create_session(TOKEN).encode())
    store.sign_ins.end_session(session)
    assert find(book, session) is None
    assert find(book, other) == TOKEN
    clock.forward(SESSION_IDLE_LIFE.total_seconds())
    assert find(book, other) is None


def test_a_session_is_renewed_when_it_was_used_and_not_more_often_than_needed(
    book: SessionBook, session: str, clock: TurnableClock
) -> None:
    find(book, session)
    assert book.take_uses() == set()  # it has just begun
    clock.forward(RENEWED_EVERY.total_seconds() + 1)
    find(book, session)
    find(book, session)
    assert book.take_uses() == {session}
    assert book.take_uses() == set()


def test_the_service_renews_used_sessions_in_the_background(
    book: SessionBook, store: Store, session: str, clock: TurnableClock
) -> None:
    unused = hash_of_token(store.sign_ins.create_session(TOKEN).encode())
    clock.forward(3600)

    async def serve() -> None:
        async with noting_uses(TokenBook(store, {}), book, store):
            assert await book.find(session) == TOKEN

    asyncio.run(serve())
    renewed, old = store.sign_ins.session_by_hash(session), store.sign_ins.session_by_hash(unused)
    assert renewed is not None
    assert old is not None
    assert renewed.expires_at == clock() + SESSION_IDLE_LIFE
    assert old.expires_at < renewed.expires_at
