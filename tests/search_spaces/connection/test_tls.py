"""Trust in a certificate by itself: real handshakes over a pair of sockets in memory."""

import ssl
from pathlib import Path

import pytest
import trustme

from search_spaces.connection.tls import trusting
from search_spaces.errors import CertificateUnreadableError


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Runs a handshake to its end; raises what the client has against it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks = client.wrap_bio(to_client, to_server, server_hostname="any.name")
    answers = server.wrap_bio(to_server, to_client, server_side=True)
    done = set()
    for _ in range(10):
        for side in (asks, answers):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                pass
        if len(done) == 2:
            return
    raise AssertionError("the handshake never ended")


def served_with(certificate: trustme.LeafCert) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    return context


@pytest.mark.parametrize("is_between", [False, True], ids=["authority", "child authority"])
def test_the_pinned_certificate_is_trusted_under_any_name_and_no_other_of_its_authority(
    is_between: bool, tmp_path: Path
) -> None:
    authority = trustme.CA()
    issuer = authority.create_child_ca() if is_between else authority
    ours, another = (issuer.issue_cert("login1.example.org") for _ in range(2))
    file = tmp_path / "service.pem"
    for blob in ours.cert_chain_pems:
        blob.write_to_path(file, append=True)
    assert file.read_text().count("BEGIN CERTIFICATE") == 1 + is_between
    shake_hands(trusting(file), served_with(ours))
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(trusting(file), served_with(another))


def test_a_file_without_a_certificate_is_one_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "service.pem"
    with pytest.raises(CertificateUnreadableError, match="cannot be read"):
        trusting(file)
    for content, why in (
        (b"", "holds no certificate"),
        (b"\xff\xfe", "cannot be read"),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "cannot be read"),
        (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "holds no certificate"),
    ):
        file.write_bytes(content)
        with pytest.raises(CertificateUnreadableError, match=why):
            trusting(file)
