"""Refuses request bodies that are too large, whatever their headers say."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.problems import problem_response


class BodyLimit:
    """Counts what arrives, and answers 413 as soon as it is too much."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                # FastAPI passes this one on while it reads the body, whatever else it catches.
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._problem)
            return message

        if _declared_length(scope) > self._max_bytes:
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            refusal = problem_response(status, self._problem, headers={"Connection": "close"})
            await refusal(scope, receive, send)
            return
        await self._app(scope, counted, send)

    @property
    def _problem(self) -> str:
        return f"the request body is larger than {self._max_bytes} bytes"


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0
