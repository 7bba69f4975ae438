"""The client of a service."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final, Self

import httpx

from layout_tuner.api.security.local_tokens import read_token
from layout_tuner.client.campaigns import CampaignCalls, EventCalls, LeaderboardCalls, TrialCalls
from layout_tuner.client.errors import ServiceError
from layout_tuner.client.service import AccessCalls, AllocationCalls, CatalogueCalls, ServiceCalls
from layout_tuner.errors import ServiceNotFoundError, UrlInvalidError
from layout_tuner.protocol.connection.http_connection import TIMEOUT_S, Retries, ServiceConnection
from layout_tuner.protocol.connection.kept_sign_in import KeptSignIn
from layout_tuner.protocol.connection.service_address import locate_service, service_of
from layout_tuner.protocol.connection.tls import trusting
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.version import version

DEFAULT_RETRIES: Final = Retries()

PATIENCE_S: Final = 600.0
"""How long the service may be away before `wait` fails, or a loop over events."""


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

    ```python
    with Client() as client:
        client.create_campaign("examples/tiny.yaml", if_exists="return")
        client.wait("tiny")
        print(client.leaderboard("tiny").best.layout_key)
    ```

    Every route of the API but those that only workers call is one of its methods.

    Every method raises `ServiceError` when the service refuses or does not answer. The message of a
    refusal is the service's.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | Path | KeptSignIn | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        patience_s: float = PATIENCE_S,
        retries: Retries = DEFAULT_RETRIES,
        tls: ssl.SSLContext | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """A client of the service at an address; without one, of the service that commands call.

        Raises `ServiceError` where the address or the token is malformed, or no service is named
        or running, and `TokenFileInvalidError` where the file of the token has none.

        Args:
            url: such as http://127.0.0.1:8080; None: LAYOUT_TUNER_URL, or the service that runs on
                the data directory of this machine.
            token: a token of the service, or the path of its file; None: LAYOUT_TUNER_TOKEN_FILE,
                the sign-in of `login --device`, or the token of the data directory.
            timeout_s: longest silence of the service within an answer.
            patience_s: how long the service may be away, for example while it is restarted, before
                `wait` fails, or a loop over events.
            retries: how often, and after which pauses, requests are sent again.
            tls: trusted certificates; None: where the environment or the data directory names the
                service, the certificate that they name; else those that the system trusts.
            transport: replaces the network.
        """
        if url is None or token is None:
            try:
                # The path is not used where a token is given.
                place = locate_service(url=url, token_file=None if token is None else Path())
            except ServiceNotFoundError as error:
                raise ServiceError(str(error)) from error
            url, token = place.url, place.kept or place.token_file if token is None else token
            tls = tls or (trusting(place.certificate) if place.certificate else None)
        if not isinstance(token, KeptSignIn):
            # The text of a file ends with a newline.
            token = read_token(token) if isinstance(token, Path) else token.strip()
            # It becomes a header: httpx would refuse such a header with a message that shows it.
            if not (token.isascii() and token.isprintable()) or " " in token:
                raise ServiceError("the token holds a blank, or a character that no token has")
        self._patience_s = patience_s
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
        """The service that runs on a data directory; variables of the environment are ignored.

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
