"""The address that the service listens on, and its protection: loopback, TLS, or a proxy."""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from layout_tuner.api.errors import ServiceStartError
from layout_tuner.api.http.sign_in_options import NO_SIGN_IN_OPTIONS, SignInOptions

BACKLOG: Final = 1024
LOCAL_PROXIES: Final = ("127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """The address that the service listens on, from its command line."""

    host: str
    port: int
    """0: any free port."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    """The certificate's key, in PEM; both are given or neither."""
    is_behind_proxy: bool = False
    """Whether a proxy encrypts and states the address of the client."""
    proxies: tuple[str, ...] = LOCAL_PROXIES
    """Addresses or networks of proxies whose X-Forwarded-For is trusted."""
    url_prefix: str = "/"
    """The path below which the proxy shows the service; / and an empty one: at the root."""
    sign_in: SignInOptions = NO_SIGN_IN_OPTIONS

    @property
    def arguments(self) -> list[str]:
        """The same as options of the command line."""
        return [
            *("--host", self.host, "--port", str(self.port)),
            *(("--tls-certificate", str(self.tls_certificate)) if self.tls_certificate else ()),
            *(("--tls-key", str(self.tls_key)) if self.tls_key else ()),
            *(("--behind-proxy",) if self.is_behind_proxy else ()),
            *(word for proxy in self.proxies for word in ("--proxy", proxy)),
            *(("--url-prefix", self.url_prefix) if self.url_prefix.strip("/") else ()),
            *self.sign_in.arguments,
        ]

    def url(self, port: int) -> str:
        """The URL for clients on this machine."""
        # Clients cannot connect to a wildcard address.
        wildcards = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared only
        shown = wildcards.get(self.host.strip("[]"), self.host.strip("[]"))
        scheme = "http" if self.tls_certificate is None else "https"
        return f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{port}"

    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS context of the service; None: plain HTTP.

        Raises:
            ServiceStartError: one of the two files is missing or unreadable, or they do not match.
        """
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ServiceStartError("--tls-certificate and --tls-key go together: give both")
        if self.tls_certificate is None or self.tls_key is None:
            return None
        _refuse_open_to_all(self.tls_key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(
                self.tls_certificate, self.tls_key, password=_refuse_encrypted_key
            )
        except (OSError, ssl.SSLError) as error:
            raise ServiceStartError(
                f"the certificate {self.tls_certificate} and the key {self.tls_key} cannot be used: "
                f"{error.strerror or error}"
            ) from error
        return context


@contextmanager
def listening(endpoint: Endpoint) -> Iterator[socket.socket]:
    """A socket that already listens, so clients can connect as soon as the address is printed.

    Raises:
        ServiceStartError: the port is in use, the address is not of this machine, or it would be
            reachable from other machines without encryption.
    """
    host, port = endpoint.host, endpoint.port
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM
        )[0]
    except OSError as error:
        raise ServiceStartError(f"{host!r} is not an address to listen on: {error}") from error
    _refuse_unprotected(endpoint, str(address[0]))
    # asyncio turns Nagle's algorithm off only for sockets with the protocol TCP. With Nagle's
    # algorithm, a response waits 40 ms for the client to acknowledge its headers.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            raise ServiceStartError(_why_not_bound(host, port, error)) from error
        yield listener


def is_loopback(listener: socket.socket) -> bool:
    """Whether a socket is reachable from this machine only."""
    return _is_loopback(str(listener.getsockname()[0]))


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _refuse_unprotected(endpoint: Endpoint, address: str) -> None:
    for proxy in endpoint.proxies:
        try:
            ipaddress.ip_network(proxy)
        except ValueError as error:
            raise ServiceStartError(f"--proxy {proxy!r}: {error}") from error
    if endpoint.tls_certificate or endpoint.is_behind_proxy or _is_loopback(address):
        return
    raise ServiceStartError(
        f"other machines reach {endpoint.host}, and over plain HTTP tokens can be read on the way: give "
        "--tls-certificate and --tls-key, or --behind-proxy where a proxy encrypts, or listen on loopback "
        "(--host 127.0.0.1) and come through ssh -L"
    )


def _why_not_bound(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is in use by another program: end it, or choose another with "
            "--port (0 takes a free one)"
        )
    return f"cannot listen on {host} port {port}: {error.strerror}"


def _refuse_open_to_all(key: Path) -> None:
    try:
        mode = key.stat().st_mode & 0o777
    except OSError as error:
        raise ServiceStartError(f"the key {key} cannot be read: {error.strerror}") from error
    if mode & 0o007:
        raise ServiceStartError(f"everybody can read the key {key} (mode {mode:o}): chmod 600 it")


def _refuse_encrypted_key() -> NoReturn:
    raise ServiceStartError(
        "the key of --tls-key is encrypted, and the service does not ask for its password: decrypt it "
        "(openssl pkey), open to you alone"
    )
