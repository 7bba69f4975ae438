"""Sessions under attack: how long one lasts, what ends it, foreign pages and forms."""

from __future__ import annotations

import base64
import itertools
import socket
import ssl
from datetime import timedelta
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from fastapi import APIRouter

from layout_tuner.api.errors import AccessUndeclaredError
from layout_tuner.api.security.access_check import refuse_unchecked
from layout_tuner.api.security.roles import ACCESS, OPEN
from layout_tuner.api.security.session_cookie import form_token, is_form_token
from layout_tuner.results_db.access.browser_sessions import SESSION_IDLE_LIFE
from layout_tuner.results_db.access.tokens import hash_of_token
from tests.api.security.test_gate import OPERATIONS, Operation
from tests.kit.api import HEADERS, TOKEN, answered, bearer
from tests.kit.persons import NAVIGATION, Person, Signing, served


def test_a_session_lasts_as_long_as_it_is_used_and_until_a_second_sign_in(signing: Signing) -> None:
    person, thief = signing.signed_in(), signing.person()
    thief.take_cookies_of(person)
    assert thief.open("/").status_code == 200
    assert person.sign_in_with_code(signing.code()).status_code == 200
    assert thief.open("/").status_code == 303
    assert person.open("/").status_code == 200

    person = signing.signed_in()
    signing.clock.forward(SESSION_IDLE_LIFE.total_seconds() - 1)
    assert person.open("/").status_code == 200
    signing.clock.forward(2)
    answered(person.open("/"), 303)
    assert person.cookies == {}  # the browser is told to forget it


def test_no_secret_is_in_an_answer_or_sent_to_a_line_of_the_log(
    signing: Signing, caplog: pytest.LogCaptureFixture
) -> None:
    person, code = signing.person(), signing.code()
    person.sign_in_with_code(code)
    (secret,) = person.cookies.values()
    with socket.create_connection(signing.address) as raw:
        raw.sendall(f"GET / HTTP/9\r\nCookie: layout_tuner={secret}\r\n\r\n".encode())
        raw.recv(1000)
    page = person.open("/")
    assert secret not in page.text
    assert code not in caplog.text
    assert secret not in caplog.text


FOREIGN: list[dict[str, str]] = [
    {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"},
    {"Origin": "http://evil.example"},
    {"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "none"},
    {"Origin": ""},
]
"""What browsers write into requests of pages that are not the service's; each takes the place of
what they write for its own."""

_names = (f"person-{number}" for number in itertools.count())


def of_role(signing: Signing, role: str) -> tuple[int, Person]:
    """The id of a new token, and a person who is signed in with it."""
    record, token = signing.store.access.create_token(next(_names), role)  # type: ignore[arg-type]
    return record.id, signing.signed_in(token)


def put_notes(person: Person, headers: dict[str, str]) -> httpx.Response:
    """A change by a script of a page."""
    return person.http.patch("/v1/campaigns/first", json={"notes": "n"}, headers=headers)


def cookie_of(answer: httpx.Response) -> Any:
    (morsel,) = SimpleCookie(answer.headers["Set-Cookie"]).values()
    return morsel


def test_the_cookie_is_strict_and_of_its_port_and_one_of_odd_bytes_is_none(
    signing: Signing,
) -> None:
    person = signing.person()
    cookie = cookie_of(person.sign_in_with_code(signing.code()))
    assert cookie.key == f"layout_tuner_{signing.address[1]}"
    assert (cookie["path"], cookie["samesite"], cookie["httponly"]) == ("/", "strict", True)
    assert (cookie["domain"], cookie["secure"]) == ("", "")
    assert cookie.value != TOKEN
    assert hash_of_token(TOKEN.encode()) not in cookie.value

    person = signing.signed_in()
    ((name, secret),) = person.cookies.items()
    stranger = signing.person()
    for cookie in (
        *(f"layout_tuner_1={secret}", f"layout_tuner={secret}", f"__Host-{name}={secret}"),
        *(f"{name.upper()}={secret}", f"{name} ={secret}", f'{name}="{secret}"'),
        *(f"{name}={secret}x", f"{name}={secret[:-1]}", f"{name}=%{secret[1:]}", f"{name}="),
        *(name, "=", ";;;=;", f"{name}=\xff\xfe", f"{name}=" + "\xe9" * 43, "x" * 20_000),
    ):
        odd = httpx.Headers({**NAVIGATION, "Cookie": cookie}, encoding="latin-1")
        answered(stranger.http.get("/", headers=odd), 303)
    # The right one counts wherever it stands, and beside another of its name.
    for cookie in (f"a=b; {name}={secret}; c", f"{name}=old; {name}={secret}"):
        headers = {**NAVIGATION, "Cookie": cookie}
        assert stranger.http.get("/", headers=headers).status_code == 200, cookie


def test_over_tls_the_cookie_is_bound_to_the_host(tmp_path: Path) -> None:
    authority = trustme.CA()
    service, browser = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(service)
    authority.configure_trust(browser)
    with served(tmp_path, tls=service) as signing:
        person = signing.person(verify=browser)
        code = person.http.post("/v1/sign-in-codes", headers=HEADERS).json()["code"]
        cookie = cookie_of(person.sign_in_with_code(code))
        port = signing.address[1]
        assert (cookie.key, cookie["secure"]) == (f"__Host-layout_tuner_{port}", True)
        assert (cookie["path"], cookie["samesite"]) == ("/", "strict")
        assert person.open("/").status_code == 200
        # A page of plain HTTP on this host can set a cookie without the prefix, and no other.
        with httpx.Client(base_url=signing.url, verify=browser) as other:
            named = {**NAVIGATION, "Cookie": f"layout_tuner_{port}={cookie.value}"}
            assert other.get("/", headers=named).status_code == 303


def test_a_session_and_a_stolen_cookie_end_with_the_sign_out(signing: Signing) -> None:
    _, person = of_role(signing, "submitter")
    thief = signing.person()
    thief.take_cookies_of(person)
    stolen_token = person.form_token()
    assert thief.open("/").status_code == 200
    answer = person.send_form("/sign-out", {"csrf_token": person.form_token()})
    assert (answer.status_code, answer.headers["Location"]) == (303, "/sign-in")
    assert person.cookies == {}
    assert thief.open("/").status_code == 303
    thief.take_cookies_of(signing.signed_in())  # of another session
    assert put_notes(thief, {**thief.own, "X-CSRF-Token": stolen_token}).status_code == 403
    (entry,) = signing.store.access.audit(action="session.end", limit=1)
    assert (entry.role, entry.address) == ("submitter", "127.0.0.1")


def test_a_session_ends_when_its_token_is_revoked(signing: Signing) -> None:
    token_id, person = of_role(signing, "viewer")
    assert person.open("/").status_code == 200
    answered(httpx.delete(f"{signing.url}/v1/tokens/{token_id}", headers=HEADERS), 200)
    assert person.open("/").status_code == 303
    assert person.http.get("/v1/whoami", headers=person.own).status_code == 401


def test_a_session_ends_when_its_token_expires(signing: Signing) -> None:
    expires_at = signing.clock() + timedelta(hours=1)
    _, token = signing.store.access.create_token(next(_names), "viewer", expires_at=expires_at)
    person = signing.signed_in(token)
    assert person.open("/").status_code == 200
    signing.clock.forward(3600)
    assert person.open("/").status_code == 303


@pytest.mark.parametrize("end", ["sign-out", pytest.param("revocation", marks=pytest.mark.slow)])
def test_an_event_stream_ends_with_the_session_that_opened_it(signing: Signing, end: str) -> None:
    token_id, person = of_role(signing, "viewer")
    token = person.form_token()
    with person.http.stream("GET", "/v1/events", headers=person.own) as stream:
        chunks = stream.iter_raw()
        assert b"stream.opened" in next(chunks)
        if end == "sign-out":
            person.send_form("/sign-out", {"csrf_token": token})
        else:
            signing.store.access.revoke_token(token_id)
        rest = b"".join(chunks)
    assert b"event: stream.closed" in rest
    assert b"the token is not valid any more" in rest


CHANGES = [
    operation
    for operation in OPERATIONS
    if operation.method not in ("GET", "HEAD") and ACCESS[operation.name] != OPEN
]


@pytest.fixture(scope="module")
def lasting_person(signing: Signing) -> Person:
    return signing.signed_in()


@pytest.mark.parametrize("operation", CHANGES, ids=lambda operation: operation.name)
def test_no_change_is_made_with_the_cookie_alone(
    lasting_person: Person, operation: Operation
) -> None:
    person = lasting_person
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for body, kind in ((b"{}", {"Content-Type": "application/json"}), (b"", {}), (b"a=b", form)):
        sent: dict[str, Any] = {"content": body, "headers": {**person.own, **kind}}
        answered(person.http.request(operation.method, operation.url(), **sent), 403)
    assert person.open("/").status_code == 200


@pytest.mark.parametrize("foreign", FOREIGN, ids=str)
def test_a_foreign_page_changes_nothing_even_with_the_form_token(
    lasting_person: Person, foreign: dict[str, str]
) -> None:
    person = lasting_person
    token = person.form_token()
    answered(put_notes(person, {**foreign, "X-CSRF-Token": token}), 403)
    answered(person.http.post("/sign-out", data={"csrf_token": token}, headers=foreign), 403)
    # Where one of the two headers is the service's own, the other still counts.
    for name, value in foreign.items():
        mixed = {**person.own, name: value, "X-CSRF-Token": token}
        assert put_notes(person, mixed).status_code == 403, mixed
    assert put_notes(person, {"X-CSRF-Token": token}).status_code == 403
    assert person.open("/").status_code == 200
    assert put_notes(person, {**person.own, "X-CSRF-Token": token}).status_code == 200


def test_a_form_token_is_of_one_session_and_in_a_form_of_its_kind(signing: Signing) -> None:
    person, other = signing.signed_in(), signing.signed_in()
    token = other.form_token()
    answered(put_notes(person, {**person.own, "X-CSRF-Token": token}), 403, "reload the page")
    answered(person.send_form("/sign-out", {"csrf_token": token}), 403, "reload the page")
    assert person.send_form("/sign-out", {}).status_code == 403
    assert person.open("/").status_code == 200
    assert put_notes(other, {**other.own, "X-CSRF-Token": token}).status_code == 200

    person = signing.signed_in()
    body = f"csrf_token={person.form_token()}"
    for kind in ("text/plain", "application/json", "application/x-www-form-urlencoded2", ""):
        headers = {**person.own, "Content-Type": kind}
        answered(person.http.post("/sign-out", content=body, headers=headers), 403)
    # The API reads no form: its requests have the token in the header.
    form = {**person.own, "Content-Type": "application/x-www-form-urlencoded"}
    refused = person.http.post("/v1/campaigns/first/pause", content=body, headers=form)
    answered(refused, 403, "X-CSRF-Token")
    files = {"csrf_token": (None, person.form_token())}
    assert person.http.post("/sign-out", files=files, headers=person.own).status_code == 303


def test_a_form_token_is_masked_anew_in_each_page_and_cannot_be_changed() -> None:
    secret = "s" * 43
    tokens = {form_token(secret) for _ in range(50)}
    assert len(tokens) == 50
    assert len({token[:20] for token in tokens}) == len({token[-20:] for token in tokens}) == 50
    assert all(is_form_token(secret, token) for token in tokens)
    token = tokens.pop()
    assert not is_form_token("t" * 43, token)
    raw = base64.urlsafe_b64decode(token)
    for position in range(len(raw)):
        changed = raw[:position] + bytes([raw[position] ^ 1]) + raw[position + 1 :]
        assert not is_form_token(secret, base64.urlsafe_b64encode(changed).decode())
    for odd in ("", "x", token[:-4], f"{token}AAAA", "ü" * 88, "=" * 88, None, 7, b"x"):
        assert not is_form_token(secret, odd)


@pytest.mark.parametrize(
    ("headers", "api_status", "page_status"),
    [
        ({"Sec-Fetch-Site": "same-origin"}, 200, 200),
        ({"Sec-Fetch-Site": "none"}, 200, 200),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate"}, 403, 200),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"}, 403, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 403, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403, 403),
        ({}, 403, 200),
        ({"Referer": "{url}/campaigns"}, 200, 200),
        ({"Referer": "{url}/campaigns", "Sec-Fetch-Site": "same-site"}, 403, 403),
        ({"Referer": "http://evil.example/"}, 403, 200),
        ({"Referer": "{url}.evil.example/"}, 403, 200),
        ({"Referer": "http://[::1/"}, 403, 200),
    ],
)
def test_a_cookie_reads_according_to_the_headers_of_the_browser(
    lasting_person: Person, headers: dict[str, str], api_status: int, page_status: int
) -> None:
    person = lasting_person
    headers = {name: value.format(url=person.url) for name, value in headers.items()}
    for path, expected in (("/v1/whoami", api_status), ("/", page_status)):
        assert person.http.get(path, headers=headers).status_code == expected


def test_a_session_makes_no_codes_a_token_in_the_header_wins_and_a_forwarded_host_does_not(
    signing: Signing,
) -> None:
    person = signing.signed_in()
    name = next(_names)
    _, viewer = signing.store.access.create_token(name, "viewer")
    for given, status in ((f"Bearer {viewer}", 200), ("Bearer lt_wrong", 401), ("Basic x", 401)):
        answer = person.http.get("/v1/whoami", headers={"Authorization": given})
        assert answer.status_code == status, given
        assert status == 401 or answer.json()["name"] == name
    # It needs no form token, and gets no further with one.
    headers = {**bearer(viewer), "X-CSRF-Token": person.form_token(), **person.own}
    answered(put_notes(person, headers), 403, f"the token '{name}' has the role viewer")

    headers = {**person.own, "X-CSRF-Token": person.form_token()}
    answered(person.http.post("/v1/sign-in-codes", headers=headers), 403, "layout-tuner login")

    person = signing.signed_in()
    headers = {"X-Forwarded-Host": "evil.example", "X-CSRF-Token": person.form_token()}
    answered(put_notes(person, {**headers, "Origin": "http://evil.example"}), 403)
    assert put_notes(person, {**person.own, **headers}).status_code == 200


def test_a_form_of_an_ended_session_leads_back(signing: Signing) -> None:
    token_id, person = of_role(signing, "viewer")
    fields = {"csrf_token": person.form_token()}
    httpx.delete(f"{signing.url}/v1/tokens/{token_id}", headers=HEADERS).raise_for_status()
    referer = {"Referer": f"{signing.url}/campaigns/first?a=b"}
    answer = answered(person.send_form("/sign-out", fields, **referer), 303)
    assert answer.headers["Location"] == "/sign-in?next=%2Fcampaigns%2Ffirst%3Fa%3Db&why=ended"
    foreign = person.send_form("/sign-out", fields, Referer="http://evil.example/x")
    assert foreign.headers["Location"] == "/sign-in?next=%2F"


@pytest.mark.parametrize("path", ["/nothing", "/sign-out"])
def test_refusals_are_pages_for_persons_and_documents_for_programs(
    signing: Signing, path: str
) -> None:
    _, person = of_role(signing, "viewer")
    page = person.open(path)
    assert page.status_code in (404, 405)
    assert page.headers["Content-Type"].startswith("text/html")
    assert "script-src 'self'" in page.headers["Content-Security-Policy"]
    assert "All campaigns</a>" in page.text
    asked = {**NAVIGATION, "Accept": "application/json"}
    document = person.http.get(path, headers=asked)
    assert document.headers["Content-Type"] == "application/problem+json"
    assert document.json()["detail"].partition(";")[0][1:] in page.text


def test_refusals_of_methods_forms_the_api_and_odd_paths_are_told_as_safely(
    signing: Signing,
) -> None:
    _, person = of_role(signing, "viewer")
    assert person.open("/sign-out").headers["Allow"] == "POST"
    refused = answered(person.send_form("/sign-out", {"csrf_token": "old"}), 403, "reload the page")
    assert refused.headers["Content-Type"].startswith("text/html")
    api = person.http.get("/v1/tokens", headers={**NAVIGATION, **person.own})
    assert api.headers["Content-Type"] == "application/problem+json"
    # What is not there may have any name.
    odd = person.open("/<script>alert(1)</script>")
    assert "<script>alert" not in odd.text


PROXIED = {"Host": "127.0.0.1:8080", "X-Forwarded-Host": "tuner.example"}


def test_behind_a_proxy_the_name_that_the_browser_sees_counts(tmp_path: Path) -> None:
    with served(tmp_path, is_behind_proxy=True) as signing:
        own = {"Origin": "https://tuner.example", "Sec-Fetch-Site": "same-origin"}
        for host in ({"Host": "tuner.example"}, PROXIED):
            person = signing.person(headers=host)
            answer = answered(person.sign_in_with_code(signing.code(), **own), 200)
            cookie = cookie_of(answer)
            # The page's Origin says that the browser uses TLS, where the proxy does not.
            assert (cookie.key, cookie["secure"]) == ("__Host-layout_tuner", True)
            sent = {"Cookie": f"{cookie.key}={cookie.value}"}
            page = answered(person.open("/", **sent), 200)
            token = page.text.partition('name="csrf-token" content="')[2].partition('"')[0]
            fields = {"csrf_token": token}
            for foreign in ("https://evil.example", "null", "https://tuner.example:1"):
                for site in ("same-origin", "cross-site", None):
                    attack = {**sent, "Origin": foreign}
                    if site:
                        attack["Sec-Fetch-Site"] = site
                    answered(person.http.post("/sign-out", data=fields, headers=attack), 403)
            answered(person.http.post("/sign-out", data=fields, headers=sent), 403)
            answered(person.http.post("/sign-out", data=fields, headers={**sent, **own}), 303)
            assert person.open("/", **sent).status_code == 303


def test_a_route_that_changes_something_has_to_check_forms() -> None:
    router = APIRouter()

    @router.post("/unchecked")
    def change_unchecked() -> None:
        """Lacks the check."""

    with pytest.raises(AccessUndeclaredError, match="change_unchecked lacks the check"):
        refuse_unchecked(router.routes)
