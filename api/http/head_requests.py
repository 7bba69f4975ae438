"""Answers HEAD wherever GET is answered: the same status and headers, without the body."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadRequests:
    """Middleware that runs a HEAD request as its GET, and ends the answer after the headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def headers_alone(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                # At once, so that a stream of events sees a client that has gone.
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        # A copy: the server keeps its own scope, from which it knows that no body follows.
        await self._app({**scope, "method": "GET"}, receive, headers_alone)
