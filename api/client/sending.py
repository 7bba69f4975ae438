"""How calls are sent: one at a time and waited for, or beside others in an event loop."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, NoReturn

import httpx
from pydantic import ValidationError

from api.client.call import Answer, Call, Item, Listing, SomePage
from api.client.retries import DEFAULT_RETRIES, Retries
from api.errors import ServiceError
from api.local_service import LOOPBACK
from api.schemas import Problem
from api.version import version
from search_spaces.pinned_certificate import distrust, why_distrusted

TIMEOUT_S: Final = 30.0
"""Longest silence of the service within an answer: its longest wait for work to lease is 20 s."""

CONNECT_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """Where a service is and how to speak to it.

    Raises:
        ServiceError: at construction, when the address is none, or the token cannot be one.
    """

    url: str
    token: str
    timeout_s: float = TIMEOUT_S
    """Longest silence of the service within an answer."""
    retries: Retries = DEFAULT_RETRIES
    tls: ssl.SSLContext | None = None
    """Whose certificates are trusted; None: those that the system trusts."""

    def __post_init__(self) -> None:
        try:
            httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ServiceError(f"{self.url!r} is not the address of a service: {error}") from error
        # In a header; and the refusal of whoever finds it there would show it.
        if not (self.token.isascii() and self.token.isprintable()) or " " in self.token:
            raise ServiceError("the token holds a blank, or a character that no token has")

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that both kinds of httpx's clients take."""
        return {
            "base_url": self.url.rstrip("/"),
            "headers": {
                "Authorization": f"Bearer {self.token}",
                "User-Agent": f"layout-tuner/{version()}",
            },
            "timeout": httpx.Timeout(self.timeout_s, connect=CONNECT_TIMEOUT_S),
            "verify": True if self.tls is None else self.tls,
            # A proxy of the environment would look for its own loopback, not for ours.
            "trust_env": httpx.URL(self.url).host not in LOOPBACK,
        }

    def unanswered(self, error: httpx.TransportError) -> NoReturn:
        """Says that no answer came."""
        if isinstance(error, httpx.UnsupportedProtocol):
            raise ServiceError(
                f"the service's address {self.url} is none: it begins with http:// or https://"
            ) from error
        why = why_distrusted(error)
        if why is not None:
            raise ServiceError(distrust(self.url, why, is_pinned=self.tls is not None)) from error
        raise ServiceError(
            f"the service at {self.url} does not answer ({error or type(error).__name__}); "
            "is it running? `layout-tuner up` starts one"
        ) from error

    def read(self, call: Call[Answer], response: httpx.Response) -> Answer:
        """What the service answered.

        Raises:
            ServiceError: it refused, or answered what this version does not understand.
        """
        if not response.is_success:
            raise refusal(response)
        try:
            return call.read(response)
        except ValidationError as error:
            raise ServiceError(
                f"{self.url} answered what this version does not understand "
                f"({error.error_count()} fields); are client and service of the same version?"
            ) from error


class SyncSender:
    """Sends calls one after the other."""

    _connection: Connection
    _http: httpx.Client

    def send(self, call: Call[Answer]) -> Answer:
        """Sends a call and reads its answer.

        Raises:
            ServiceError: the service refused or did not answer.
        """
        for attempt in count(1):
            try:
                response = self._http.request(**_request(call))
            except httpx.TransportError as error:
                pause_s = self._connection.retries.pause_after_error(call, attempt, error)
                if pause_s is None:
                    self._connection.unanswered(error)
            else:
                pause_s = self._connection.retries.pause_after_answer(call, attempt, response)
                if pause_s is None:
                    return self._connection.read(call, response)
            time.sleep(pause_s)
        raise AssertionError  # the loop has no end

    def walk(self, listing: Listing[SomePage, Item]) -> Iterator[Item]:
        """All items of a list, page after page as they are asked for."""
        cursor: str | None = None
        while True:
            page = self.send(listing.page(cursor))
            yield from listing.items(page)
            cursor = page.next_cursor
            if cursor is None:
                return


class AsyncSender:
    """Sends calls beside others, in an event loop of asyncio."""

    _connection: Connection
    _http: httpx.AsyncClient

    async def send(self, call: Call[Answer]) -> Answer:
        """Sends a call and reads its answer.

        Raises:
            ServiceError: the service refused or did not answer.
        """
        for attempt in count(1):
            try:
                response = await self._http.request(**_request(call))
            except httpx.TransportError as error:
                pause_s = self._connection.retries.pause_after_error(call, attempt, error)
                if pause_s is None:
                    self._connection.unanswered(error)
            else:
                pause_s = self._connection.retries.pause_after_answer(call, attempt, response)
                if pause_s is None:
                    return self._connection.read(call, response)
            await asyncio.sleep(pause_s)
        raise AssertionError  # the loop has no end

    async def walk(self, listing: Listing[SomePage, Item]) -> AsyncIterator[Item]:
        """All items of a list, page after page as they are asked for."""
        cursor: str | None = None
        while True:
            page = await self.send(listing.page(cursor))
            for item in listing.items(page):
                yield item
            cursor = page.next_cursor
            if cursor is None:
                return


def refusal(response: httpx.Response) -> ServiceError:
    """Why the service refused, in its own words where it has any."""
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        words = f"the service answered {response.status_code} {response.reason_phrase}"
        return ServiceError(words.rstrip(), status=response.status_code)
    return ServiceError(problem.detail, status=response.status_code, problem=problem)


def _request(call: Call[Any]) -> Mapping[str, Any]:
    return {
        "method": call.method,
        "url": call.path,
        "params": {name: value for name, value in call.query.items() if value is not None},
        "json": call.json,
        "content": call.content,
        "headers": call.headers,
    }
