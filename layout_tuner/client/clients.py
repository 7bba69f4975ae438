"""The client of a service."""

from __future__ import annotations

import ssl
from typing import Final, Self

import httpx

from layout_tuner.api.security.local_tokens import read_token
from layout_tuner.client.campaigns import CampaignCalls, EventCalls, LeaderboardCalls, TrialCalls
from layout_tuner.client.errors import ServiceError
from layout_tuner.client.service import AccessCalls, AllocationCalls, CatalogueCalls, ServiceCalls
from layout_tuner.errors import ServiceNotFoundError, UrlInvalidError
from layout_tuner.protocol.connection.http_connection import TIMEOUT_S, Retries, ServiceConnection
from layout_tuner.protocol.connection.service_address import service_of
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.version import version

DEFAULT_RETRIES: Final = Retries()


class Client(
    CampaignCalls,
    TrialCalls,
    LeaderboardCalls,
    EventCalls,
    ServiceCalls,
    CatalogueCalls,
    AllocationCalls,
    AccessCalls,
):
    """A blocking client of a service; threads may share it.

    Every route of the API but those that only workers call is one of its methods.

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

        Raises `ServiceError` where the address or the token is malformed.

        Args:
            url: such as http://127.0.0.1:8080.
            token: a token of the service.
            timeout_s: longest silence of the service within an answer.
            retries: how often, and after which pauses, requests are sent again.
            tls: trusted certificates; None: those that the system trusts.
            transport: replaces the network.
        """
        # The token becomes a header: httpx would refuse such a header with a message that shows it.
        if not (token.isascii() and token.isprintable()) or " " in token:
            raise ServiceError("the token holds a blank, or a character that no token has")
        try:
            self._connection = ServiceConnection(
                url,
                token,
                user_agent=f"layout-tuner/{version()}",
                tls=tls,
                timeout_s=timeout_s,
                retries=retries,
                transport=transport,
            )
        except UrlInvalidError as error:
            raise ServiceError(str(error)) from error

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
        return self._connection.url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes its connections."""
        self._connection.close()
