"""Keeps when tokens were last used: now and then, beside the requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from starlette.concurrency import run_in_threadpool

from api.token_book import TokenBook
from results_db.store import Store

NOTED_EVERY_S: Final = 30.0

_log = logging.getLogger(__name__)


@asynccontextmanager
async def noting_uses(book: TokenBook, store: Store) -> AsyncIterator[None]:
    """Notes uses in the background while the block runs, and the last ones at its end."""
    task = asyncio.create_task(_note_on_and_on(book, store))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await _note(book, store)


async def _note_on_and_on(book: TokenBook, store: Store) -> None:
    while True:
        await asyncio.sleep(NOTED_EVERY_S)
        await _note(book, store)


async def _note(book: TokenBook, store: Store) -> None:
    used = book.take_uses()
    try:
        if used:
            await run_in_threadpool(store.note_tokens_used, used)
    except Exception as error:
        _log.warning("when tokens were last used could not be kept: %s", error)
