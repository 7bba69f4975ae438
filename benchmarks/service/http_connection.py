"""A minimal keep-alive HTTP connection: load clients share two cores with the service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self


class AnswerUnexpectedError(Exception):
    """The service answered something else than was asked for."""


class HttpConnection:
    """HTTP/1.1 over one connection, one request after another."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._host = host
        self._port = port
        self._headers = f"Host: {host}:{port}\r\nAuthorization: Bearer {token}\r\n"

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._writer.close()

    async def post(self, path: str, body: bytes) -> Any:
        """Posts a JSON document; the JSON that is answered.

        Raises:
            AnswerUnexpectedError: the status is no 2xx.
        """
        head = (
            f"POST {path} HTTP/1.1\r\n{self._headers}Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        status, headers = await self._read_head()
        answer = await self._reader.readexactly(int(headers[b"content-length"]))
        if status // 100 != 2:
            raise AnswerUnexpectedError(f"{path}: {status} {answer[:500]!r}")
        return json.loads(answer)

    async def lines(
        self, path: str, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[str]:
        """Gets a stream, and yields its lines as they come, for as long as it lasts.

        Raises:
            AnswerUnexpectedError: the status is no 200.
        """
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = f"GET {path} HTTP/1.1\r\n{self._headers}Accept: text/event-stream\r\n{more}\r\n"
        self._writer.write(head.encode())
        status, answered = await self._read_head()
        if status != 200 or answered.get(b"transfer-encoding") != b"chunked":
            raise AnswerUnexpectedError(f"{path}: {status}")
        rest = b""
        while chunk := await self._read_chunk():
            *complete, rest = (rest + chunk).split(b"\n")
            for line in complete:
                yield line.decode()

    async def _read_head(self) -> tuple[int, dict[bytes, bytes]]:
        head = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = head[:-4].split(b"\r\n")
        pairs = (line.split(b":", 1) for line in lines)
        return int(first.split(b" ", 2)[1]), {k.lower(): v.strip() for k, v in pairs}

    async def _read_chunk(self) -> bytes:
        size = int(await self._reader.readline(), 16)
        chunk = await self._reader.readexactly(size)
        await self._reader.readexactly(2)
        return chunk
