"""The HTTP transport of client, commands and workers: requests with a token, and their repetition.

It is the one module of `search_spaces` that imports httpx and tenacity.
"""

from __future__ import annotations

import random
import ssl
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import httpx
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    retry_if_result,
    stop_after_attempt,
)

from layout_tuner.documents.hosts import is_loopback_host
from layout_tuner.errors import ServiceUnansweredError, UrlInvalidError
from layout_tuner.protocol.connection.kept_sign_in import Document, KeptSignIn
from layout_tuner.protocol.connection.tls import speaks_no_tls, why_distrusted, why_unanswered

TIMEOUT_S: Final = 30.0
"""Longest silence of the service within an answer: it waits up to 20 s for work to lease."""

CONNECT_WITHIN_S: Final = 5.0

TEMPORARY: Final = frozenset({502, 503, 504})
"""Statuses of a service, or of a proxy in front of it, that is unavailable for a moment."""

TOO_MANY_REQUESTS: Final = 429
"""Status of a request that was rejected unread."""

_NOT_RECEIVED: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Errors before the service received anything: any request may be sent again."""

_PERMANENT: Final = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)
"""Errors of the client, which would occur again."""

_NETWORK: Final = frozenset({"httpx", "httpcore", "socket", "ssl", "gevent", "eventlet"})
"""Packages that raise errors of the network, the last two in place of `socket`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """How often, and after which pauses, a request is sent again.

    It is sent again only where the service did not receive it or rejected it unread, and where a
    second request changes nothing.
    """

    attempts: int = 3
    """How often a request is sent at most."""
    first_pause_s: float = 0.1
    """Longest pause before the second attempt; it doubles with each attempt."""
    longest_pause_s: float = 10.0
    """Longest pause. If the service asks for a longer one (`Retry-After`), the client gives up."""

    def pause_s(self, attempt: int) -> float:
        """Seconds between a failed attempt and the next."""
        longest_s = min(self.first_pause_s * 2.0 ** min(attempt - 1, 64), self.longest_pause_s)
        # Clients that lost their connections together must not all return at the same moment.
        return longest_s * random.uniform(0.5, 1.0)  # noqa: S311 - nobody gains from guessing it

    def of_request(self, *, is_repeatable: bool) -> Retrying:
        """Calls a function that sends a request, again where the request may be sent again.

        After the last attempt the answer is returned whatever it is, or the error raised.
        """

        def is_unheard(error: BaseException) -> bool:
            if not isinstance(error, httpx.TransportError) or isinstance(error, _PERMANENT):
                return False
            if speaks_no_tls(error) or why_distrusted(error) is not None:
                return False
            if error_of_handler(error) is not None:
                return False
            return is_repeatable or isinstance(error, _NOT_RECEIVED)

        def is_put_off(answer: httpx.Response) -> bool:
            status = answer.status_code
            if status != TOO_MANY_REQUESTS and not (status in TEMPORARY and is_repeatable):
                return False
            return _retry_after_s(answer) <= self.longest_pause_s

        def pause_s(failed: RetryCallState) -> float:
            outcome = failed.outcome
            asked_s = 0.0
            if outcome is not None and not outcome.failed:
                asked_s = _retry_after_s(outcome.result())
            return max(self.pause_s(failed.attempt_number), asked_s)

        return Retrying(
            retry=retry_if_exception(is_unheard) | retry_if_result(is_put_off),
            stop=stop_after_attempt(self.attempts),
            wait=pause_s,
            retry_error_callback=lambda last: last.outcome and last.outcome.result(),
        )


NO_RETRIES: Final = Retries(attempts=1)
"""Every request is sent once."""


class _KeptToken(httpx.Auth):
    """Sends the token of a kept sign-in, replaced in time, or where the service refuses it."""

    def __init__(self, kept: KeptSignIn, renew: Callable[[str], Document]) -> None:
        self._kept, self._renew = kept, renew

    def sync_auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response]:
        token = ""
        for _ in range(2):
            token = self._kept.token(self._renew, refused=token)
            request.headers["Authorization"] = f"Bearer {token}"
            if (yield request).status_code != HTTPStatus.UNAUTHORIZED:
                return


class ServiceConnection:
    """Sends requests to one service; threads may share it. UrlInvalidError for a wrong address."""

    def __init__(
        self,
        url: str,
        token: str | KeptSignIn,
        *,
        user_agent: str = "layout-tuner",
        tls: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: Retries = NO_RETRIES,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Connects at the first request, with the arguments of `layout_tuner.Client`.

        `user_agent` names the program to the service.
        """
        refuse_unless_http(url)
        self.url = url.rstrip("/")
        """The address of the service, without a slash at its end."""
        self.retries = retries
        self._timeout_s = timeout_s
        self._is_pinned = tls is not None
        is_https = self.url.lower().startswith("https:")
        self._http = httpx.Client(
            base_url=self.url,
            headers={"User-Agent": user_agent},
            auth=_KeptToken(token, self._renewed) if isinstance(token, KeptSignIn) else None,
            # Plain HTTP needs no certificates; reading those of the system takes time.
            verify=tls or is_https or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            # A proxy of the environment would connect to its own loopback, not to ours.
            trust_env=not is_loopback_host(httpx.URL(self.url).host),
            transport=transport,
        )
        if token and isinstance(token, str):
            self._http.headers["Authorization"] = f"Bearer {token}"

    def close(self) -> None:
        self._http.close()

    def _renewed(self, secret: str) -> Document:
        """Exchanges the secret of a kept sign-in; ServiceUnansweredError if it gets no other."""
        send, url, has_ended = self._http.request, self.url, False
        try:
            answer = send("POST", "/v1/device-tokens", json={"secret": secret}, auth=None)
            has_ended = answer.status_code == HTTPStatus.BAD_REQUEST
            answer.raise_for_status()
        except httpx.HTTPError as error:
            again = f" has ended: `layout-tuner login --device --url {url}` begins another"
            why = again if has_ended else f" cannot be renewed ({error})"
            message = f"the sign-in at {url}{why}"
            raise ServiceUnansweredError(message, may_be_down=not has_ended) from error
        renewed: Document = answer.json()
        return renewed

    def request(
        self,
        method: str,
        path: str,
        *,
        is_repeatable: bool = False,
        within_s: float | None = None,
        is_stream: bool = False,
        **content: Any,
    ) -> httpx.Response:
        """Sends a request; returns the answer, whatever its status.

        Args:
            method: such as GET.
            path: from the root of the service; names in it are quoted.
            is_repeatable: whether a second request changes nothing.
            within_s: longest silence of the service; None: that of the connection.
            is_stream: whether the answer is still to be read, unless it is a refusal.
            content: query, headers and body, as `httpx.Client.request` takes them.

        Raises:
            ServiceUnansweredError: no answer came.

        What a signal handler of the caller raises meanwhile is raised as it is.
        """
        longest_s = self._timeout_s if within_s is None else within_s
        timeout = httpx.Timeout(longest_s, connect=min(longest_s, CONNECT_WITHIN_S))

        def attempt() -> httpx.Response:
            request = self._http.build_request(method, path, timeout=timeout, **content)
            answer = self._http.send(request, stream=is_stream)
            if is_stream and not answer.is_success:
                answer.read()
            return answer

        try:
            return self.retries.of_request(is_repeatable=is_repeatable)(attempt)
        # RuntimeError: the connection was closed meanwhile.
        except (httpx.RequestError, RuntimeError) as error:
            if (raised := error_of_handler(error)) is not None:
                raise raised from None
            why = why_unanswered(self.url, error, is_pinned=self._is_pinned)
            raise ServiceUnansweredError(
                why
                or f"the service at {self.url} does not answer ({error or type(error).__name__})",
                may_be_down=why is None and not self._http.is_closed,
            ) from error


def error_of_handler(error: BaseException) -> BaseException | None:
    """What a signal handler raised within a request; None: the error is one of the network's.

    A handler runs inside of whatever the main thread is doing. `TimeoutError` is also what a socket
    raises, so httpx would take that of a handler for a silent service.
    """
    found: BaseException | None = error
    while type(found).__module__.partition(".")[0] in ("httpx", "httpcore"):
        found = found and (found.__cause__ or found.__context__)
    if not isinstance(found, OSError | RuntimeError):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(found.__traceback__)]
    packages = [str(each.f_globals.get("__name__")).partition(".")[0] for each in frames]
    is_network = _NETWORK.isdisjoint(packages) or packages[-1] in _NETWORK
    return None if is_network else found


def refuse_unless_http(url: str) -> None:
    """Raises UrlInvalidError for a text that can't be the HTTP address of a service."""
    try:
        parsed = httpx.URL(url)
        parsed.host.encode("idna")  # as a name lookup does
    except (httpx.InvalidURL, UnicodeError) as error:
        raise UrlInvalidError(f"{url!r} is not the address of a service: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UrlInvalidError(
            f"{url!r} is not the address of a service: it must begin with http:// or https://, as in "
            "http://login1.example.org:8080"
        )


def _retry_after_s(answer: httpx.Response) -> float:
    """The pause that the service asks for in whole seconds; 0 where it asks for none."""
    asked = answer.headers.get("Retry-After", "")
    return float(asked) if asked.isascii() and asked.isdigit() else 0.0
