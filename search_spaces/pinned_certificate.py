"""Trust in one service by its certificate: who holds its key is meant, whatever name it answers under."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Final

from search_spaces.errors import CertificateUnreadableError

CERTIFICATE_VARIABLE: Final = "LAYOUT_TUNER_CERTIFICATE"
"""Names the file of the service's certificate to clients and workers."""

_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


def why_distrusted(error: BaseException) -> str | None:
    """Why a connection was not made, where it is the service's certificate; None: it is something else.

    Libraries between TLS and us raise errors of their own, each from the one before.
    """
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, ssl.SSLCertVerificationError):
            return str(found.verify_message)
        found = found.__cause__ or found.__context__
    return None


def distrust(url: str, why: str, *, is_pinned: bool) -> str:
    """What to do about a certificate that is not trusted.

    Args:
        url: of the service.
        why: as `why_distrusted` says.
        is_pinned: whether a certificate was named, which is another one then.
    """
    if is_pinned:
        return (
            f"the certificate of the service at {url} is not the one that --certificate names ({why}): "
            "copy the service's own, that of its --tls-certificate"
        )
    return (
        f"nobody that this machine trusts vouches for the certificate of the service at {url} ({why}): copy "
        f"the service's own, and name it with --certificate FILE or ${CERTIFICATE_VARIABLE}"
    )


def trusting(certificate: Path) -> ssl.SSLContext:
    """A client's side of TLS that trusts the service which has this certificate, and no other.

    The certificate need not be signed by anybody, and its names do not count: whoever copied the file
    knows which service it is from. Of a file with a chain the first one is the service's own.

    Raises:
        CertificateUnreadableError: the file cannot be read, or holds none.
    """
    try:
        found = _PEM.search(certificate.read_text(encoding="ascii"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        # The certificate itself is where trust ends, signed by somebody or not.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        if found is not None:
            context.load_verify_locations(cadata=found[0])
            return context
    except (OSError, UnicodeDecodeError, ssl.SSLError) as error:
        raise CertificateUnreadableError(
            f"the certificate {certificate} cannot be read: {error}"
        ) from error
    raise CertificateUnreadableError(
        f"{certificate} holds no certificate (PEM); copy the service's own, that of --tls-certificate"
    )
