"""The two clients: the same calls, waited for or awaited."""

from __future__ import annotations

import ssl
from typing import Self

import httpx

from api.client.access import AccessCalls
from api.client.allocations import AllocationCalls
from api.client.campaigns import CampaignCalls
from api.client.catalogue import CatalogueCalls
from api.client.events import EventCalls
from api.client.following import AsyncFollower, SyncFollower
from api.client.leaderboards import LeaderboardCalls
from api.client.retries import DEFAULT_RETRIES, Retries
from api.client.sending import TIMEOUT_S, Connection
from api.client.service import ServiceCalls
from api.client.trials import TrialCalls
from api.client.workers import WorkerCalls
from api.errors import ServiceError
from api.local_service import LocalService, find_service
from api.token_file import read_token
from results_db.data_dir import DataDir


class Calls(
    CampaignCalls,
    CatalogueCalls,
    TrialCalls,
    LeaderboardCalls,
    AllocationCalls,
    WorkerCalls,
    ServiceCalls,
    AccessCalls,
    EventCalls,
):
    """Every route of the API, as methods of both clients."""


class Client(Calls, SyncFollower):
    """A service, seen from outside; safe to share between threads.

    Every method raises `ServiceError` when the service refuses or does not answer; the message is the
    service's own.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_s: float = TIMEOUT_S,
        retries: Retries = DEFAULT_RETRIES,
        tls: ssl.SSLContext | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """A client of the service at an address.

        Args:
            url: where it is, as http://127.0.0.1:8080.
            token: what it lets in.
            timeout_s: longest silence of the service within an answer.
            retries: how often, and after what pauses, what may be sent again is sent.
            tls: whose certificates are trusted; None: those that the system trusts.
            transport: speaks to the service in place of the network.
        """
        self._connection = _connection(url, token, timeout_s, retries, tls)
        self._http = httpx.Client(transport=transport, **self._connection.settings)

    @classmethod
    def of_data_dir(cls, data_dir: DataDir) -> Self:
        """The service that runs on a data directory of this machine.

        Raises:
            ServiceError: none runs there.
            TokenFileInvalidError: its token cannot be read.
        """
        service, token = _service_of(data_dir)
        return cls(service.url, token, tls=service.tls_context())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes its connections."""
        self._http.close()


class AsyncClient(Calls, AsyncFollower):
    """The same service for programs with an event loop of asyncio; methods are awaited.

    Every method raises `ServiceError` when the service refuses or does not answer; the message is the
    service's own. Lists are asynchronous iterators: `async for trial in client.trials("tiny")`.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_s: float = TIMEOUT_S,
        retries: Retries = DEFAULT_RETRIES,
        tls: ssl.SSLContext | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """A client of the service at an address; the arguments are those of `Client`."""
        self._connection = _connection(url, token, timeout_s, retries, tls)
        self._http = httpx.AsyncClient(transport=transport, **self._connection.settings)

    @classmethod
    def of_data_dir(cls, data_dir: DataDir) -> Self:
        """The service that runs on a data directory of this machine.

        Raises:
            ServiceError: none runs there.
            TokenFileInvalidError: its token cannot be read.
        """
        service, token = _service_of(data_dir)
        return cls(service.url, token, tls=service.tls_context())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes its connections."""
        await self._http.aclose()


def _connection(
    url: str, token: str, timeout_s: float, retries: Retries, tls: ssl.SSLContext | None
) -> Connection:
    return Connection(url=url, token=token, timeout_s=timeout_s, retries=retries, tls=tls)


def _service_of(data_dir: DataDir) -> tuple[LocalService, str]:
    try:
        service = find_service(data_dir)
    except OSError as error:
        raise ServiceError(
            f"the data directory {data_dir.path} cannot be used ({error.strerror}): name another with "
            "--data-dir, or say where the service is with --url and --token-file"
        ) from error
    if service is None:
        raise ServiceError(
            f"no service runs on the data directory {data_dir.path}: start one with "
            "`layout-tuner up`, or say where it is with --url and --token-file"
        )
    return service, read_token(data_dir.token_file)
