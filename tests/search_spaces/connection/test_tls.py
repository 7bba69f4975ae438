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


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def served_with(certificate: trustme.LeafCert) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    return context


def test_the_pinned_certificate_is_trusted_under_any_name_and_no_other_is(
    authority: trustme.CA, tmp_path: Path
) -> None:
    ours = authority.issue_cert("login1.example.org")
    another = authority.issue_cert("login1.example.org")  # signed by the same authority
    file = tmp_path / "service.pem"
    for blob in ours.cert_chain_pems:
        blob.write_to_path(file, append=True)
    shake_hands(trusting(file), served_with(ours))
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(trusting(file), served_with(another))


def test_an_authority_in_the_chain_is_not_trusted_for_others(
    authority: trustme.CA, tmp_path: Path
) -> None:
    between = authority.create_child_ca()
    ours, another = between.issue_cert("a.example"), between.issue_cert("b.example")
    file = tmp_path / "service.pem"
    for blob in ours.cert_chain_pems:
        blob.write_to_path(file, append=True)
    assert file.read_text().count("BEGIN CERTIFICATE") == 2
    shake_hands(trusting(file), served_with(ours))
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(trusting(file), served_with(another))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "holds no certificate"),
        (b"\xff\xfe", "cannot be read"),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "cannot be read"),
        (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "holds no certificate"),
    ],
)
def test_a_file_without_a_certificate_is_one_clear_error(
    tmp_path: Path, content: bytes, why: str
) -> None:
    file = tmp_path / "service.pem"
    file.write_bytes(content)
    with pytest.raises(CertificateUnreadableError, match=why):
        trusting(file)
    with pytest.raises(CertificateUnreadableError, match="cannot be read"):
        trusting(tmp_path / "missing.pem")
