"""Beyond loopback: what the service refuses to start on, TLS, proxies, and pages from elsewhere."""

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme
from click.testing import CliRunner

from layout_tuner.api.http.bind_address import Endpoint, listening
from layout_tuner.cli.command_table import token as token_command
from layout_tuner.client.clients import Client
from layout_tuner.client.errors import ServiceError
from layout_tuner.protocol.connection.http_connection import Retries
from layout_tuner.protocol.worker_messages import WorkerCreate
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.workers.errors import ServiceUnreachableError
from layout_tuner.workers.service.lease_client import LeaseClient
from tests.kit.api import INTRODUCTION, answered, ends, refused_line
from tests.kit.services import ServeProcess, run_here


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for a name that this machine does not have, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    issued = trustme.CA().issue_cert("tuner.example")
    issued.cert_chain_pems[0].write_to_path(folder / "certificate.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "key.pem").chmod(0o600)
    return folder / "certificate.pem", folder / "key.pem"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    served = ServeProcess(tmp_path_factory.mktemp("served") / "data")
    yield served
    assert served.end() == 0
    assert "ERROR" not in served.printed


def worker_token_of(served: ServeProcess) -> str:
    return (served.data_dir / "worker-token").read_text().strip()


def refusal(tmp_path: Path, *options: str) -> str:
    """What the service says that refuses to start; it has written nothing then."""
    data_dir = tmp_path / "data"
    line = refused_line(run_here("serve", "--port", "0", "--data-dir", str(data_dir), *options))
    assert not (data_dir / "token").exists()
    return line


def test_listening_beyond_loopback_needs_tls_or_a_proxy_and_on_loopback_nothing(
    tmp_path: Path,
) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        line = refusal(tmp_path, "--host", host)
        assert "over plain HTTP tokens can be read on the way" in line
        assert "--tls-certificate" in line
        assert "--behind-proxy" in line
    assert "--proxy 'nobody'" in refusal(tmp_path, "--behind-proxy", "--proxy", "nobody")

    for host in ("127.0.0.1", "localhost", "127.0.0.2", "::1", "[::1]"):
        with listening(Endpoint(host=host, port=0)) as listener:
            assert listener.getsockname()[1] > 0


def test_tls_is_served_to_commands_and_workers_that_trust_the_certificate(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    file, key = certificate
    served = ServeProcess(tmp_path / "data", "--tls-certificate", str(file), "--tls-key", str(key))
    try:
        assert served.url.startswith("https://127.0.0.1:")
        with Client.of_data_dir(DataDir(served.data_dir)) as client:
            assert client.whoami().role == "admin"
        options = ["--url", served.url, "--token-file", str(served.data_dir / "token")]
        listed = ["list", *options, "--certificate", str(file)]
        ends(CliRunner().invoke(token_command, listed), 0)
        worker_token = worker_token_of(served)
        _refuse_what_is_not_trusted(tmp_path, served, options, worker_token)
        with LeaseClient(served.url, worker_token, certificate=file) as worker:
            assert worker.register(WorkerCreate(**INTRODUCTION)).worker_id
        without_forward_secrecy = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        without_forward_secrecy.check_hostname = False
        without_forward_secrecy.verify_mode = ssl.CERT_NONE
        without_forward_secrecy.maximum_version = ssl.TLSVersion.TLSv1_2
        without_forward_secrecy.set_ciphers("AES128-SHA")
        with socket.create_connection(_address(served)) as plain, pytest.raises(ssl.SSLError):
            without_forward_secrecy.wrap_socket(plain)
    finally:
        served.end()


def _refuse_what_is_not_trusted(
    tmp_path: Path, served: ServeProcess, options: list[str], worker_token: str
) -> None:
    line = refused_line(CliRunner().invoke(token_command, ["list", *options]))
    assert "no authority that this machine trusts has signed" in line
    assert "name it with --certificate FILE or $LAYOUT_TUNER_CERTIFICATE" in line
    assert "is it running" not in line
    other = tmp_path / "other.pem"
    trustme.CA().issue_cert("tuner.example").cert_chain_pems[0].write_to_path(other)
    with (
        LeaseClient(served.url, worker_token, certificate=other) as worker,
        pytest.raises(ServiceUnreachableError, match="is not the one that --certificate names"),
    ):
        worker.unregister("anybody")
    # The next time would be the same: it is not waited for.
    patient = Retries(first_pause_s=3600.0, longest_pause_s=3600.0)
    with (
        Client(served.url, served.token, retries=patient) as client,
        pytest.raises(ServiceError, match="name it with --certificate"),
    ):
        client.whoami()


def _address(served: ServeProcess) -> tuple[str, int]:
    url = httpx.URL(served.url)
    return url.host, url.port


@pytest.mark.slow
def test_certificates_that_cannot_be_used_are_one_clear_error(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    file, key = certificate
    other = trustme.CA().issue_cert("tuner.example").private_key_pem
    (tmp_path / "other.pem").touch(0o600)
    other.write_to_path(tmp_path / "other.pem")
    (tmp_path / "open.pem").write_bytes(key.read_bytes())
    (tmp_path / "open.pem").chmod(0o644)
    for options, why in (
        (("--tls-certificate", str(file)), "go together"),
        (("--tls-key", str(key)), "go together"),
        (("--tls-certificate", str(file), "--tls-key", "/none"), "cannot be read"),
        (("--tls-certificate", "/none", "--tls-key", str(key)), "cannot be used"),
        (("--tls-certificate", str(file), "--tls-key", str(tmp_path / "other.pem")), "cannot be"),
        (("--tls-certificate", str(file), "--tls-key", str(tmp_path / "open.pem")), "everybody"),
    ):
        line = refusal(tmp_path, *options)
        assert why in line, line


def test_foreign_hosts_and_origins_are_refused_and_answers_have_security_headers(
    served: ServeProcess,
) -> None:
    def ask(path: str, **headers: str) -> httpx.Response:
        return httpx.get(f"{served.url}{path}", headers={**served.headers, **headers})

    for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", ""):
        for path in ("/v1/health", "/docs", "/v1/campaigns"):
            answered(ask(path, Host=host), 421, "listens on this machine alone")
    for host in ("localhost:1", "127.0.0.1", "[::1]:8080", "tuner.localhost"):
        answered(ask("/v1/whoami", Host=host), 200)

    port = httpx.URL(served.url).port
    for origin in ("http://evil.example", "null", f"http://localhost:{port}", "http://127.0.0.1:1"):
        answered(ask("/v1/whoami", Origin=origin), 403, "may not use this service")
    own = answered(ask("/v1/whoami", Origin=served.url), 200)
    assert "access-control-allow-origin" not in own.headers

    answer = ask("/v1/health")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert "script-src 'self'" in ask("/docs").headers["Content-Security-Policy"]


def test_a_proxy_on_this_machine_asks_by_its_own_name(tmp_path: Path) -> None:
    served = ServeProcess(tmp_path / "data", "--behind-proxy")
    try:
        named = {**served.headers, "Host": "tuner.example", "Origin": "https://tuner.example"}
        answered(httpx.get(f"{served.url}/v1/whoami", headers=named), 200)
    finally:
        served.end()


GUESS = "lt_guessed_token_of_somebody"


@pytest.mark.slow
def test_behind_a_proxy_the_service_listens_everywhere_and_counts_guesses_by_client(
    tmp_path: Path,
) -> None:
    served = ServeProcess(tmp_path / "data", "--host", "0.0.0.0", "--behind-proxy")
    try:
        named = {**served.headers, "Host": "tuner.example", "Origin": "https://tuner.example"}
        assert httpx.get(f"{served.url}/v1/whoami", headers=named).status_code == 200
        assert 429 not in guesses_of_many_clients(served)
    finally:
        served.end()


def guesses_of_many_clients(served: ServeProcess) -> list[int]:
    """The answers to wrong codes that seem to come from many clients behind a proxy."""
    return [
        httpx.post(
            f"{served.url}/sign-in",
            json={"code": GUESS},
            headers={"Sec-Fetch-Site": "same-origin", "X-Forwarded-For": f"198.51.100.{number}"},
        ).status_code
        for number in range(12)
    ]


def _send_tokens_everywhere(served: ServeProcess) -> None:
    with httpx.Client(base_url=served.url) as http:
        for path in ("/v1/campaigns", "/v1/nothing", f"/v1/campaigns/x?token={GUESS}", "/docs"):
            for given in (served.token, GUESS, f"{GUESS}\t{GUESS}"):
                http.get(path, headers={"Authorization": f"Bearer {given}"})
                http.post(path, headers={"Authorization": f"Basic {given}"}, content=b"{")
    with socket.create_connection(_address(served)) as raw:
        raw.sendall(f"GET {GUESS} HTTP/9\r\nAuthorization: Bearer {GUESS}\r\n\r\n".encode())
        raw.recv(1000)


def test_without_a_proxy_a_client_cannot_claim_other_addresses_and_no_token_is_logged(
    served: ServeProcess,
) -> None:
    """The last test of the module: it ends its service."""
    made = served.post("/tokens", {"name": "ci", "role": "viewer"})["token"]
    assert 429 in guesses_of_many_clients(served)
    _send_tokens_everywhere(served)
    served.end()
    for secret in (served.token, worker_token_of(served), made, GUESS):
        assert secret not in served.printed
    files = served.data_dir.glob("results.sqlite3*")
    kept = b"".join(file.read_bytes() for file in files if file.is_file())
    assert made.encode() not in kept
    assert served.token.encode() not in kept
