"""The owner whom a proxy names in a header: believed from the proxy alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.kit.api import answered, refused_line
from tests.kit.persons import Person
from tests.kit.services import ServeProcess, run_here

NAMED = {"X-Forwarded-User": "ana", "X-Forwarded-Groups": "hpc, /odd name,"}
OPTIONS = (
    *("--behind-proxy", "--owner-header", "X-Forwarded-User"),
    *("--groups-header", "X-Forwarded-Groups", "--group-role", "hpc=submitter"),
)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    served = ServeProcess(tmp_path_factory.mktemp("served") / "data", *OPTIONS)
    yield served
    assert served.end() == 0
    assert "ERROR" not in served.printed


@pytest.fixture
def person(serving: ServeProcess) -> Iterator[Person]:
    person = Person(serving.url)
    yield person
    person.http.close()


def audited(serving: ServeProcess, action: str) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = serving.get(f"/audit?action={action}")["entries"]
    return entries


def signed_in(person: Person, **headers: str) -> httpx.Response:
    """Opens a page as a browser behind the proxy, with all redirects."""
    sent = {"X-Forwarded-Proto": "http", **NAMED, **headers}
    answer = person.open("/allocations", **sent)
    assert answer.headers["Location"] == "/sign-in?next=%2Fallocations"
    return person.open(answer.headers["Location"], **sent)


def test_the_proxy_names_the_owner_and_the_groups(serving: ServeProcess, person: Person) -> None:
    assert 'url=/allocations"' in answered(signed_in(person), 200).text
    who = person.http.get("/v1/whoami", headers={**NAMED, **person.own}).json()
    assert (who["name"], who["role"]) == ("ana", "submitter")
    entry = audited(serving, "sign_in.header")[0]
    assert (entry["actor"], entry["details"]["source"]) == ("ana", "X-Forwarded-User")  # type: ignore[index]
    assert entry["details"]["groups_left_out"] == 1  # type: ignore[index]


def test_a_session_ends_when_the_proxy_names_another(person: Person) -> None:
    signed_in(person)
    other = {**NAMED, "X-Forwarded-User": "eve"}
    assert person.open("/allocations", **NAMED).status_code == 200
    assert person.open("/allocations", **other).status_code == 303
    signed_in(person)
    assert person.open("/allocations").status_code == 303


def test_the_header_alone_changes_nothing(serving: ServeProcess, person: Person) -> None:
    forged = {**NAMED, "Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    answered(httpx.post(f"{serving.url}/v1/campaigns", json={}, headers=forged), 401)
    answered(httpx.get(f"{serving.url}/v1/campaigns", headers=NAMED), 401)
    signed_in(person)
    refused = person.http.post("/v1/campaigns", json={}, headers={**NAMED, **person.own})
    answered(refused, 403, "needs its form token")


def test_an_owner_without_a_role_is_refused(serving: ServeProcess, person: Person) -> None:
    bad = signed_in(person, **{"X-Forwarded-User": "two words"})
    assert "is not 1 to 64 characters" in answered(bad, 403).text
    assert "two words" in str(audited(serving, "sign_in.refused")[0])
    reserved = signed_in(person, **{"X-Forwarded-User": "local"})
    answered(reserved, 403, "which the service gives itself")


@pytest.mark.parametrize("name", NAMED)
def test_two_headers_are_refused(serving: ServeProcess, name: str) -> None:
    """A proxy that adds its header to the one of a client would pass the client's groups on."""
    twice = [*NAMED.items(), (name, "root")]
    answered(httpx.get(f"{serving.url}/", headers=twice), 403, "sent it twice")


def test_only_the_proxy_may_send_the_header(tmp_path: Path) -> None:
    served = ServeProcess(tmp_path / "data", *OPTIONS, "--proxy", "192.0.2.1")
    try:
        sent = {**NAMED, "X-Forwarded-For": "192.0.2.1"}
        answered(httpx.get(f"{served.url}/", headers=sent), 403, "only the proxy may send")
        answered(httpx.get(f"{served.url}/", headers=served.headers), 200)
        (entry,) = audited(served, "sign_in.refused")
        assert entry["address"] == "127.0.0.1"
    finally:
        served.end()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--owner-header", "X-User"), "give --behind-proxy too"),
        (("--groups-header", "X-Groups"), "--owner-header: give both"),
        (("--oidc-issuer", "https://sso.example"), "--oidc-client-id go together"),
        (("--oidc-issuer", "http://sso.example", "--oidc-client-id", "t"), "with https://"),
        (("--oidc-issuer", "https://[", "--oidc-client-id", "t"), "with https://"),
        (("--group-role", "hpc=king"), "is not GROUP=viewer|submitter|admin"),
        (("--oidc-client-secret-file", "/none/there"), "--oidc-client-secret-file: the token"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    data_dir = tmp_path / "data"
    asked = ("serve", "--port", "0", "--data-dir", str(data_dir), *options)
    assert words in refused_line(run_here(*asked))
    assert not (data_dir / "token").exists()
