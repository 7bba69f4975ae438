"""Re-checks the token of long-lived responses and ends the stream once it is revoked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from results_db.errors import DatabaseUnavailableError

CHECK_INTERVAL_S: Final = 2.0
"""Seconds between two checks of the token."""

NOT_VALID: Final = "the token is not valid any more: it was revoked, or has expired"

StillValid = Callable[[], Awaitable[bool]]


async def answer_while_valid(
    app: ASGIApp,
    scope: Scope,
    receive: Receive,
    send: Send,
    still_valid: StillValid,
    *,
    check_interval_s: float = CHECK_INTERVAL_S,
) -> None:
    """Runs an application until it is done or the token is no longer valid.

    Then it receives `http.disconnect` with a `reason`, as if the client had disconnected, but it
    may still send why it ends. A response that it leaves open is ended.
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
                done, _ = await asyncio.wait({heard}, timeout=check_interval_s)
                if done:
                    return heard.result()
                # During an outage of the database the stream continues.
                with suppress(DatabaseUnavailableError):
                    if not await still_valid():
                        return {"type": "http.disconnect", "reason": NOT_VALID}
        finally:
            heard.cancel()

    await app(scope, receiving, noting)
    if is_open:
        await send({"type": "http.response.body", "body": b"", "more_body": False})
