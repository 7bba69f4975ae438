"""Signing in: with which codes and tokens, from which pages, and to which page it leads."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from layout_tuner.api.security.authentication import local_target
from layout_tuner.results_db.access.browser_sessions import CODE_LIFE
from layout_tuner.results_db.access.tokens import hash_of_token
from tests.kit.api import HEADERS, TOKEN, answered, bearer
from tests.kit.persons import Signing, served


def test_a_code_signs_in_with_the_role_of_its_token(signing: Signing) -> None:
    _, token = signing.store.access.create_token("ana", "viewer")
    person = signing.person()
    answer = person.sign_in_with_code(signing.code(token), "/campaigns/first?sort=name")
    assert answer.json() == {"next": "/campaigns/first?sort=name"}
    assert answer.headers["Cache-Control"] == "no-store"
    who = person.http.get("/v1/whoami", headers=person.own)
    assert (who.json()["name"], who.json()["role"]) == ("ana", "viewer")
    entry, *_ = signing.store.access.audit(actor="ana")
    assert (entry.action, entry.address) == ("session.begin", "127.0.0.1")
    assert entry.details == {"by": "code"}


def test_a_code_signs_in_once(signing: Signing) -> None:
    code, thief = signing.code(), signing.person()
    assert signing.person().sign_in_with_code(code).status_code == 200
    answered(thief.sign_in_with_code(code), 401, "was used before")
    assert thief.cookies == {}
    assert thief.sign_in_by_form(code).status_code == 401


def test_a_code_signs_in_while_it_and_its_token_are_valid(signing: Signing) -> None:
    record, token = signing.store.access.create_token("bob", "viewer")
    expired = signing.code(token)
    signing.clock.forward(CODE_LIFE.total_seconds())
    assert signing.person().sign_in_with_code(expired).status_code == 401
    orphan = signing.code(token)
    httpx.delete(f"{signing.url}/v1/tokens/{record.id}", headers=HEADERS)
    assert signing.person().sign_in_with_code(orphan).status_code == 401


def test_the_form_takes_a_token_again_and_again_and_shows_it_nowhere(signing: Signing) -> None:
    record, token = signing.store.access.create_token("eve", "submitter")
    person = signing.person()
    assert person.sign_in_with_code(token).status_code == 401
    assert "does not sign in" in person.sign_in_by_form("lt_wrong").text
    answer = person.sign_in_by_form(f" {token}\r\n", "/submit")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/submit")
    assert token not in answer.text + str(answer.headers) + str(person.cookies)
    assert person.http.get("/v1/whoami", headers=person.own).json()["name"] == "eve"
    assert signing.person().sign_in_by_form(token).status_code == 303  # a token works again
    signing.store.access.revoke_token(record.id)


def test_the_form_takes_the_address_of_a_code(signing: Signing) -> None:
    address = f"{signing.url}/sign-in#code={signing.code()}"
    assert signing.person().sign_in_by_form(address).status_code == 303


def test_no_token_of_a_worker_signs_in(signing: Signing) -> None:
    _, token = signing.store.access.create_token("frontier", "worker")
    for secret in (token, "lt_worker_of_this_directory"):
        answered(httpx.post(f"{signing.url}/v1/sign-in-codes", headers=bearer(secret)), 403)
        person = signing.person()
        answered(person.sign_in_by_form(secret), 403, "workers have no pages")
        assert person.cookies == {}
    # Nor does a row that somebody wrote into the database.
    code, _ = signing.store.sign_ins.create_code(hash_of_token(token.encode()))
    assert signing.person().sign_in_with_code(code).status_code == 403


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b'{"code":""}', "application/json", 401),
        (b'{"code":"\\ud800"}', "application/json", 401),
        (b'{"code":"lt_\\u0000"}', "application/json", 401),
        (b"[]", "application/json", 401),
        (b"{", "application/json", 401),
        (b'{"code": 7}', "application/json", 401),
        (b"secret=&next=%2F", "application/x-www-form-urlencoded", 401),
        (b"secret=lt_%00&next=%2F", "application/x-www-form-urlencoded", 401),
        (b"secret=" + b"x" * 9000, "application/x-www-form-urlencoded", 413),
        (b"\xff\xfe", "text/plain", 401),
    ],
)
def test_odd_codes_and_bodies_are_refused(
    signing: Signing, body: bytes, kind: str, status: int
) -> None:
    person = signing.person()
    headers = {**person.own, "Content-Type": kind}
    assert person.http.post("/sign-in", content=body, headers=headers).status_code == status


def test_a_page_of_another_site_cannot_sign_in(signing: Signing) -> None:
    person, code = signing.person(), signing.code()
    evil, same_site = {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "same-site"}
    for headers in (evil, {"Origin": "null"}, same_site):
        assert person.sign_in_with_code(code, **headers).status_code == 403
        assert person.sign_in_by_form(code, **headers).status_code == 403
    assert person.cookies == {}
    bare = person.http.post("/sign-in", json={"code": code})
    answered(bare, 403, "neither Sec-Fetch-Site nor Origin")
    assert person.sign_in_with_code(code).status_code == 200  # it was not spent


def test_an_address_waits_after_some_wrong_codes_but_its_tokens_work(tmp_path: Path) -> None:
    with served(tmp_path, wrong_codes=4) as signing:
        person, code = signing.person(), signing.code()
        for _ in range(5):  # right ones count for nothing
            assert person.sign_in_by_form(TOKEN).status_code == 303
        wrong = [person.sign_in_with_code(f"{'x' * 42}{number}") for number in range(2)]
        wrong += [person.sign_in_by_form(f"lt_{number}") for number in range(2)]
        assert [answer.status_code for answer in wrong] == [401] * 4
        refused = answered(person.sign_in_with_code(code), 429)
        assert int(refused.headers["Retry-After"]) >= 1
        assert person.sign_in_by_form("lt_x").status_code == 429
        for token, status in (("lt_wrong", 401), (TOKEN, 200)):
            answered(signing.person().http.get("/v1/whoami", headers=bearer(token)), status)


def test_a_sign_in_leads_to_a_page_of_the_service_and_else_to_the_first(signing: Signing) -> None:
    for target in ("/", "/campaigns/a?x=1&y=%2F%0d%0a#tab", "/sign-ins", "/.//a"):
        assert local_target(target) == target
    for target in (
        *("//evil.example", "/\\evil.example", "https://evil.example", "/\t/evil.example"),
        *("/a\r\nSet-Cookie: x=y", '/"><script>', "/" + "x" * 3000),
        *("/sign-in?next=/sign-in", "/sign-out"),
    ):
        assert local_target(target) == "/"
    for target in ("//evil.example", "/a\r\nSet-Cookie: x=y"):
        person = signing.person()
        assert person.sign_in_with_code(signing.code(), target).json() == {"next": "/"}
        answer = signing.person().sign_in_by_form(signing.code(), target)
        assert (answer.status_code, answer.headers["Location"]) == (303, "/")
        assert "x" not in answer.cookies
        shown = person.open(f"/sign-in?{httpx.QueryParams({'next': target})}")
        assert (shown.status_code, shown.headers["Location"]) == (303, "/")
        unknown = signing.person().open(f"/sign-in?{httpx.QueryParams({'next': target})}")
        assert 'name="next" value="/"' in unknown.text


def test_a_page_without_a_session_leads_to_the_sign_in_and_back_and_programs_get_a_401(
    signing: Signing,
) -> None:
    person = signing.person()
    answer = answered(person.open("/?state=RUNNING&name_contains=%C3%BC//evil"), 303)
    query = "state%3DRUNNING%26name_contains%3D%25C3%25BC%2F%2Fevil"
    assert answer.headers["Location"] == f"/sign-in?next=%2F%3F{query}"
    page = answered(person.open(answer.headers["Location"]), 200)
    found = re.search(r'name="next" value="([^"]*)"', page.text)
    target = found[1].replace("&amp;", "&")
    assert target == "/?state=RUNNING&name_contains=%C3%BC//evil"
    assert person.sign_in_with_code(signing.code(), target).json()["next"] == target
    assert person.open(answer.headers["Location"]).headers["Location"] == target
    assert person.open(target).status_code == 200

    person = signing.person()
    for path, accept in (("/v1/campaigns", "text/html"), ("/", "*/*"), ("/metrics", "text/plain")):
        answer = answered(person.http.get(path, headers={"Accept": accept}), 401)
        assert answer.headers["WWW-Authenticate"] == 'Bearer realm="layout-tuner"'


def test_a_link_in_a_mail_arrives_with_the_session(signing: Signing) -> None:
    """A link of another site comes without the Strict cookie; what our page asks for has it."""
    person, stranger = signing.signed_in(), signing.person()
    bare = answered(stranger.open("/?state=RUNNING", **{"Sec-Fetch-Site": "cross-site"}), 200)
    assert "set-cookie" not in bare.headers
    found = re.search(r'http-equiv="refresh" content="0;url=([^"]+)"', bare.text)
    own = {"Sec-Fetch-Site": "same-origin"}
    gone_on = person.open(found[1], **own)
    assert (gone_on.status_code, gone_on.headers["Location"]) == (303, "/?state=RUNNING")
    assert person.open(gone_on.headers["Location"], **own).status_code == 200
    # Without a session the same way ends at the sign-in page: there is no circle.
    assert "One-time code or token" in stranger.open(found[1], **own).text


def test_the_sign_in_page_runs_our_scripts_alone_and_is_not_kept(signing: Signing) -> None:
    page = signing.person().open("/sign-in")
    assert page.headers["Referrer-Policy"] == "same-origin"  # else forms say "Origin: null"
    assert "script-src 'self'" in page.headers["Content-Security-Policy"]
    assert page.headers["Cache-Control"] == "no-store"
    assert page.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "<script>" not in page.text


def test_a_code_in_a_link_of_another_site_takes_a_click(signing: Signing) -> None:
    person = signing.person()
    assert "data-at-once" in person.open("/sign-in").text
    assert "data-at-once" not in person.open("/sign-in", **{"Sec-Fetch-Site": "cross-site"}).text
