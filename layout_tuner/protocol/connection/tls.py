"""TLS between a client and its service: the pinned certificate, and what to do when TLS fails."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from layout_tuner.documents.reading import why_unreadable
from layout_tuner.errors import CertificateUnreadableError

CERTIFICATE_VARIABLE: Final = "LAYOUT_TUNER_CERTIFICATE"
"""Names the file of the service's certificate to clients and workers."""

PROBE_WITHIN_S: Final = 2.0

_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)

_NO_TLS: Final = frozenset(
    {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"}
)
"""OpenSSL's reasons for bytes that are not TLS."""

_UNREACHABLE: Final = (TimeoutError, ConnectionRefusedError, socket.gaierror)


def trusting(certificate: Path) -> ssl.SSLContext:
    """A client context that trusts the service with this certificate and no other service.

    The certificate may be self-signed, and the host names in it are not checked. Of a file with a
    chain, the first certificate is used.

    Raises:
        CertificateUnreadableError: the file cannot be read, or holds no certificate.
    """
    try:
        found = _PEM.search(certificate.read_text(encoding="ascii"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        # The certificate itself ends the chain, whether it is signed by an authority or not.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        if found is not None:
            context.load_verify_locations(cadata=found[0])
            return context
    except (OSError, UnicodeDecodeError, ssl.SSLError) as error:
        raise CertificateUnreadableError(
            f"the certificate {certificate} cannot be read: {why_unreadable(error)}"
        ) from error
    raise CertificateUnreadableError(
        f"{certificate} holds no certificate (PEM); copy the service's own, that of --tls-certificate"
    )


def why_distrusted(error: BaseException) -> str | None:
    """OpenSSL's reason for refusing the certificate; None: the error has another cause."""
    for found in _chain(error):
        if isinstance(found, ssl.SSLCertVerificationError):
            return str(found.verify_message)
    return None


def speaks_no_tls(error: BaseException) -> bool:
    """Whether the server answered a TLS handshake with something that is not TLS."""
    return any(
        isinstance(found, ssl.SSLError) and found.reason in _NO_TLS for found in _chain(error)
    )


def why_unanswered(url: str, error: BaseException, *, is_pinned: bool) -> str | None:
    """What to change where the service runs and a request failed because of TLS.

    Returns:
        None where TLS is not the cause: the service may be away.
    """
    why = why_distrusted(error)
    if why is None:
        return _wrong_scheme(url, error)
    if is_pinned:
        return (
            f"the certificate of the service at {url} is not the one that --certificate names ({why}): "
            "copy the service's own, that of its --tls-certificate"
        )
    return (
        f"no authority that this machine trusts has signed the certificate of the service at {url} "
        f"({why}): copy the service's own, and name it with --certificate FILE or "
        f"${CERTIFICATE_VARIABLE}"
    )


def _wrong_scheme(url: str, error: BaseException) -> str | None:
    """What to change where the URL says http:// and the server speaks TLS, or the other way round.

    A plain request that was cut off is followed by one TLS handshake, to find out.
    """
    if speaks_no_tls(error):
        return f"what listens at {url} does not speak TLS: its address begins with http://, not https://"
    is_unreachable = any(isinstance(found, _UNREACHABLE) for found in _chain(error))
    if urlsplit(url).scheme == "http" and not is_unreachable and _speaks_tls(url):
        return f"what listens at {url} speaks TLS: its address begins with https://, not http://"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes: HTTP libraries wrap the errors of TLS in their own."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _speaks_tls(url: str) -> bool:
    parts = urlsplit(url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Nothing is sent over this connection, so the certificate need not be checked.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        address = (parts.hostname or "", parts.port or 80)
        with (
            socket.create_connection(address, PROBE_WITHIN_S) as connection,
            context.wrap_socket(connection, server_hostname=parts.hostname),
        ):
            return True
    except (OSError, ValueError):  # errors of TLS are OSErrors
        return False
