"""The client of a service."""

from __future__ import annotations

import ssl
from typing import Self

import httpx

from api.client.campaigns import CampaignCalls, EventCalls, LeaderboardCalls, TrialCalls
from api.client.following import Follower
from api.client.sending import DEFAULT_RETRIES, TIMEOUT_S, Connection, Retries
from api.client.service import AccessCalls, AllocationCalls, CatalogueCalls, ServiceCalls
from api.errors import ServiceError
from api.security.local_tokens import read_token
from results_db.database.data_dir import DataDir
from search_spaces.connection.service_address import service_of
from search_spaces.errors import ServiceNotFoundError


class Calls(
    CampaignCalls,
    TrialCalls,
    LeaderboardCalls,
    EventCalls,
    ServiceCalls,
    CatalogueCalls,
    AllocationCalls,
    AccessCalls,
):
    """Every route of the API but those that only workers call, as methods of the client."""


class Client(Calls, Follower):
    """A blocking client of a service; threads may share it.

    Every method raises `ServiceError` when the service refuses or does not answer. The message of a
    refusal is the service's.
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
            url: such as http://127.0.0.1:8080.
            token: a token of the service.
            timeout_s: longest silence of the service within an answer.
            retries: how often, and after which pauses, requests are sent again.
            tls: trusted certificates; None: those that the system trusts.
            transport: replaces the network.
        """
        self._connection = Connection(
            url=url, token=token, timeout_s=timeout_s, retries=retries, tls=tls
        )
        self._http = httpx.Client(transport=transport, **self._connection.settings)

    @classmethod
    def of_data_dir(cls, data_dir: DataDir) -> Self:
        """The service that runs on a data directory of this machine.

        Raises:
            ServiceError: none runs there.
            TokenFileInvalidError: its token cannot be read.
        """
        try:
            service = service_of(data_dir.path)
        except ServiceNotFoundError as error:
            raise ServiceError(str(error)) from error
        return cls(service.url, read_token(data_dir.token_file), tls=service.tls_context())

    @property
    def url(self) -> str:
        """The address of the service, without a slash at its end."""
        return self._connection.url.rstrip("/")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes its connections."""
        self._http.close()
