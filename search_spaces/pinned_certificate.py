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
