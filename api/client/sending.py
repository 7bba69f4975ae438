"""How calls are sent: retries and refusals."""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import httpx
from pydantic import ValidationError

from api.client.call import Answer, Call, Item, PagedCall, SomePage
from api.errors import ServiceError
from api.schemas.campaigns_and_trials import Problem
from api.version import version
from search_spaces.connection.service_address import is_loopback_host
from search_spaces.connection.tls import speaks_no_tls, why_distrusted, why_unanswered

TIMEOUT_S: Final = 30.0
"""Longest silence of the service within an answer: it waits up to 20 s for work to lease."""

CONNECT_TIMEOUT_S: Final = 5.0

_NOT_RECEIVED: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Errors before the service received anything: any request may be sent again."""

_PERMANENT: Final = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)
"""Errors of the client, which would occur again."""

_TEMPORARY: Final = frozenset({502, 503, 504})
"""Statuses of a service, or of a proxy in front of it, that is unavailable for a moment."""

_TOO_MANY_REQUESTS: Final = 429
"""Status of a request that was rejected unread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """How often, and after which pauses, a client sends a request again.

    A request is sent again only where the service did not receive it or rejected it unread, and
    where a second request changes nothing (`Call.is_repeatable`).
    """

    attempts: int = 3
    """How often a request is sent at most."""
    first_pause_s: float = 0.1
    """Longest pause before the second attempt; it doubles with each attempt."""
    longest_pause_s: float = 10.0
    """Longest pause. If the service asks for a longer one (`Retry-After`), the client gives up."""

    def pause_after_error(
        self, call: Call[Any], attempt: int, error: httpx.TransportError
    ) -> float | None:
        """Seconds until a call without an answer is sent again; None: it is not."""
        is_permanent = isinstance(error, _PERMANENT) or speaks_no_tls(error)
        if is_permanent or why_distrusted(error) is not None:
            return None
        may_repeat = call.is_repeatable or isinstance(error, _NOT_RECEIVED)
        return self.pause_s(attempt) if may_repeat else None

    def pause_after_answer(
        self, call: Call[Any], attempt: int, answer: httpx.Response
    ) -> float | None:
        """Seconds until a call that was answered is sent again; None: the answer is final."""
        status = answer.status_code
        if status != _TOO_MANY_REQUESTS and not (status in _TEMPORARY and call.is_repeatable):
            return None
        asked_s = _retry_after_s(answer)
        pause_s = self.pause_s(attempt)
        if pause_s is None or asked_s > self.longest_pause_s:
            return None
        return max(pause_s, asked_s)

    def pause_s(self, attempt: int) -> float | None:
        """Seconds between an attempt and the next; None: it was the last."""
        if attempt >= self.attempts:
            return None
        longest_s = min(self.first_pause_s * 2.0 ** (attempt - 1), self.longest_pause_s)
        # Clients that lost their connections together must not all return at the same moment.
        return longest_s * random.uniform(0.5, 1.0)  # noqa: S311 - nobody gains from guessing it


DEFAULT_RETRIES: Final = Retries()
NO_RETRIES: Final = Retries(attempts=1)
"""Every request is sent once."""


def _retry_after_s(answer: httpx.Response) -> float:
    """The pause that the service asks for in whole seconds; 0 where it asks for none."""
    asked = answer.headers.get("Retry-After", "")
    return float(asked) if asked.isascii() and asked.isdigit() else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """The address of a service and how to talk to it.

    Raises:
        ServiceError: at construction, when the address or the token is malformed.
    """

    url: str
    token: str
    timeout_s: float = TIMEOUT_S
    """Longest silence of the service within an answer."""
    retries: Retries = DEFAULT_RETRIES
    tls: ssl.SSLContext | None = None
    """Trusted certificates; None: those that the system trusts."""

    def __post_init__(self) -> None:
        try:
            httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ServiceError(f"{self.url!r} is not the address of a service: {error}") from error
        # The token becomes a header: httpx would refuse such a header with a message that shows it.
        if not (self.token.isascii() and self.token.isprintable()) or " " in self.token:
            raise ServiceError("the token holds a blank, or a character that no token has")

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `httpx.Client`."""
        return {
            "base_url": self.url.rstrip("/"),
            "headers": {
                "Authorization": f"Bearer {self.token}",
                "User-Agent": f"layout-tuner/{version()}",
            },
            "timeout": httpx.Timeout(self.timeout_s, connect=CONNECT_TIMEOUT_S),
            "verify": True if self.tls is None else self.tls,
            # A proxy of the environment would connect to its own loopback, not to ours.
            "trust_env": not is_loopback_host(httpx.URL(self.url).host),
        }

    def read(self, call: Call[Answer], response: httpx.Response) -> Answer:
        """The answer of the service.

        Raises:
            ServiceError: this version cannot read the answer.
        """
        try:
            return call.read(response)
        except ValidationError as error:
            raise ServiceError(
                f"{self.url} answered what this version does not understand "
                f"({error.error_count()} fields); are client and service of the same version?"
            ) from error

    def pause_after_error(
        self, call: Call[Any], attempt: int, error: httpx.TransportError
    ) -> float:
        """Seconds until a call without an answer is sent again.

        Raises:
            ServiceError: it is not sent again.
        """
        pause_s = self.retries.pause_after_error(call, attempt, error)
        if pause_s is None:
            self._raise_unanswered(error)
        return pause_s

    def pause_after_refusal(self, call: Call[Any], attempt: int, response: httpx.Response) -> float:
        """Seconds until a call that was not answered with success is sent again.

        Raises:
            ServiceError: it is not sent again.
        """
        pause_s = self.retries.pause_after_answer(call, attempt, response)
        if pause_s is None:
            raise _refusal(response)
        return pause_s

    def _raise_unanswered(self, error: httpx.TransportError) -> NoReturn:
        if isinstance(error, httpx.UnsupportedProtocol):
            raise ServiceError(
                f"the service's address {self.url} is invalid: it must begin with http:// or https://"
            ) from error
        why = why_unanswered(self.url, error, is_pinned=self.tls is not None)
        if why is not None:
            raise ServiceError(why) from error
        raise ServiceError(
            f"the service at {self.url} does not answer ({error or type(error).__name__}); "
            "is it running? `layout-tuner up` starts one"
        ) from error


def _refusal(response: httpx.Response) -> ServiceError:
    """Why the service refused, in the words of its problem document where it sent one."""
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        words = f"the service answered {response.status_code} {response.reason_phrase}"
        return ServiceError(words.rstrip(), status=response.status_code)
    return ServiceError(problem.detail, status=response.status_code, problem=problem)


class Sender:
    """Sends calls one after the other."""

    _connection: Connection
    _http: httpx.Client

    def send(self, call: Call[Answer]) -> Answer:
        """Sends a call and reads its answer.

        Raises:
            ServiceError: the service refused or did not answer.
        """
        request, attempt = _request(call), 0
        while True:
            attempt += 1
            try:
                response = self._http.request(**request)
            except httpx.TransportError as error:
                pause_s = self._connection.pause_after_error(call, attempt, error)
            else:
                if response.is_success:
                    return self._connection.read(call, response)
                pause_s = self._connection.pause_after_refusal(call, attempt, response)
            time.sleep(pause_s)

    def walk(self, listing: PagedCall[SomePage, Item]) -> Iterator[Item]:
        """All items of a list; the next page is requested when its first item is."""
        cursor: str | None = None
        while True:
            page = self.send(listing.page(cursor))
            yield from listing.items(page)
            cursor = page.next_cursor
            if cursor is None:
                return


def _request(call: Call[Any]) -> Mapping[str, Any]:
    return {
        "method": call.method,
        "url": call.path,
        "params": {name: value for name, value in call.query.items() if value is not None},
        "json": call.json,
        "content": call.content,
        "headers": call.headers,
    }
