"""Answers that last: a stream ends with the token that opened it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from results_db.errors import DatabaseUnavailableError

ASKED_EVERY_S: Final = 2.0
"""Seconds between looks at whether the token is still valid."""

StillValid = Callable[[], Awaitable[bool]]


async def answer_while_valid(
    app: ASGIApp,
    scope: Scope,
    receive: Receive,
    send: Send,
    still_valid: StillValid,
    *,
    asked_every_s: float = ASKED_EVERY_S,
) -> None:
    """Lets an application answer until it is done, or the token is not valid any more.

    Then it hears that its client has hung up, and its answer is brought to an end.
    """
    is_open = False

    async def noting(message: Message) -> None:
        nonlocal is_open
        is_open = message["type"] == "http.response.start" or bool(message.get("more_body"))
        await send(message)

    async def receiving() -> Message:
        heard = asyncio.ensure_future(receive())
        try:
            while True:
                done, _ = await asyncio.wait({heard}, timeout=asked_every_s)
                if done:
                    return heard.result()
                # While nobody can say, it goes on.
                with suppress(DatabaseUnavailableError):
                    if not await still_valid():
                        return {"type": "http.disconnect"}
        finally:
            heard.cancel()

    await app(scope, receiving, noting)
    if is_open:
        await send({"type": "http.response.body", "body": b"", "more_body": False})
