"""Which subject of a provider signs in as which owner, and addresses behind a proxy."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from layout_tuner.api.security.holders import TokenBook
from layout_tuner.results_db.access.tokens import hash_of_token
from tests.api.sign_in.small_provider import SmallProvider, small_provider
from tests.kit.api import HEADERS, answered
from tests.kit.persons import NAVIGATION, Person, Signing, served


@pytest.fixture(scope="module")
def provider() -> Iterator[SmallProvider]:
    with small_provider() as provider:
        yield provider


@pytest.fixture(scope="module")
def signing(provider: SmallProvider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Signing]:
    path = tmp_path_factory.mktemp("subjects")
    with served(path, sign_in=provider.options(), wrong_codes=1000) as signing:
        yield signing


@pytest.fixture(autouse=True)
def one_clock(provider: SmallProvider, signing: Signing) -> None:
    provider.clock = signing.clock


def sign_in(signing: Signing, provider: SmallProvider, name: str, sub: str) -> httpx.Response:
    return provider.sign_in(signing.person(), sub=sub, preferred_username=name)


def signed_in(signing: Signing, provider: SmallProvider, name: str, sub: str) -> Person:
    person = signing.person()
    answered(provider.sign_in(person, sub=sub, preferred_username=name), 200)
    return person


def whoami(person: Person) -> str:
    found = person.http.get("/v1/whoami", headers=person.own)
    return str(found.json()["owner"]) if found.is_success else ""


def put(signing: Signing, owner: str, **body: Any) -> httpx.Response:
    return httpx.put(f"{signing.url}/v1/owners/{owner}", json=body, headers=HEADERS)


def everything(signing: Signing) -> tuple[Any, ...]:
    owners = signing.store.owners
    return owners.all(), owners.groups(), signing.store.access.tokens(revoked=True)


def test_a_subject_keeps_its_owner_when_its_name_changes(
    signing: Signing, provider: SmallProvider
) -> None:
    assert whoami(signed_in(signing, provider, "ann", "ann-1")) == "ann"
    (ann,) = [each for each in signing.store.owners.all() if each.name == "ann"]
    assert ann.subject == f"{provider.url}#ann-1"
    assert whoami(signed_in(signing, provider, "ann.smith", "ann-1")) == "ann"
    assert "ann.smith" not in {each.name for each in signing.store.owners.all()}


@pytest.mark.parametrize("made_by", ["sign-in", "token", "admin"])
def test_the_name_of_an_owner_of_another_is_refused(
    signing: Signing, provider: SmallProvider, made_by: str
) -> None:
    name = f"bob.{made_by}"
    if made_by == "sign-in":
        signed_in(signing, provider, name, "bob-1")
    elif made_by == "token":
        signing.store.access.create_token(name, "viewer")
    else:
        answered(put(signing, name, weight=1), 200)
    before = everything(signing)
    answer = provider.sign_in(
        signing.person(), sub="o'bob 2", preferred_username=name, groups=["thieves"]
    )
    subject = shlex.quote(f"{provider.url}#o'bob 2")
    command = f"`layout-tuner owner set {name} --subject {subject}`"
    answered(answer, 403)
    entry = signing.store.access.audit(limit=1)[0]
    assert (entry.action, entry.target) == ("sign_in.refused", provider.url)
    assert entry.details["reason"].endswith(f"an admin can give it to you with {command}")
    assert everything(signing) == before


def test_an_admin_binds_an_owner_to_a_subject_and_clears_it(
    signing: Signing, provider: SmallProvider
) -> None:
    signing.store.access.create_token("eve", "viewer")
    bound = answered(put(signing, "eve", subject=f"{provider.url}#eve-1"), 200).json()
    assert (bound["subject"], bound["weight"]) == (f"{provider.url}#eve-1", 1)
    assert whoami(signed_in(signing, provider, "eve", "eve-1")) == "eve"
    assert put(signing, "eve", weight=2).json()["subject"] == bound["subject"]
    assert put(signing, "eve", subject="").json()["subject"] is None
    assert signing.store.access.audit(limit=1)[0].details["subject"] is None
    answered(sign_in(signing, provider, "eve", "eve-1"), 403)


def test_sign_ins_of_the_subject_before_end(signing: Signing, provider: SmallProvider) -> None:
    before = signed_in(signing, provider, "kim", "kim-1")
    secret, code = signing.store.access.ask_for_device("h")
    fields = {"csrf_token": before.form_token(), "decision": "allow"}
    answered(before.send_form(f"/device?code={code}", fields), 200, "goes on by itself")
    made = httpx.post(f"{signing.url}/v1/device-tokens", json={"secret": secret})
    line = {"Authorization": f"Bearer {answered(made, 201).json()['token']}"}
    url, hashed = f"{signing.url}/v1/whoami", hash_of_token(line["Authorization"][7:].encode())
    assert httpx.get(url, headers=line).json()["owner"] == "kim"
    answered(put(signing, "kim", subject=f"{provider.url}#kim-2"), 200)
    assert before.open("/").status_code == 303
    answered(httpx.get(url, headers=line), 401)
    assert asyncio.run(TokenBook(signing.store, {}).valid_ones({hashed})) == set()
    secret = made.json()["secret"]
    answered(httpx.post(f"{signing.url}/v1/device-tokens", json={"secret": secret}), 400)
    answered(sign_in(signing, provider, "kim", "kim-1"), 403)
    assert whoami(signed_in(signing, provider, "kim", "kim-2")) == "kim"


def test_a_sign_in_renews_the_role_of_all_sessions(provider: SmallProvider, tmp_path: Path) -> None:
    options = provider.options(group_role=("hpc=submitter", "ops=admin"))
    with served(tmp_path, sign_in=options) as signing:
        provider.clock = signing.clock
        first, second = signing.person(), signing.person()
        for person, groups, role in ((first, ["ops"], "admin"), (second, ["hpc"], "submitter")):
            claims = {"sub": "7", "preferred_username": "lea", "groups": groups}
            answered(provider.sign_in(person, **claims), 200)
            who = first.http.get("/v1/whoami", headers=first.own).json()
            assert (who["role"], who["groups"]) == (role, groups)
        assert [each.name for each in signing.store.access.tokens()] == []


def test_a_session_of_a_sign_in_lasts_a_week_at_most(
    signing: Signing, provider: SmallProvider
) -> None:
    person = signed_in(signing, provider, "max", "max-1")
    for _ in range(15):
        assert person.open("/").status_code == 200
        signing.clock.forward(11 * 3600)
        hashed = hash_of_token(next(iter(person.cookies.values())).encode())
        signing.store.sign_ins.renew_sessions([hashed])
    signing.clock.forward(4 * 3600)
    assert person.open("/").status_code == 303


NO_SUBJECT = "is not the issuer's address, a #, and"


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        ("ann", NO_SUBJECT),
        ("https://sso.example", NO_SUBJECT),
        ("https://sso.example#", NO_SUBJECT),
        ("https://s#a\n", NO_SUBJECT),
        ("#1", NO_SUBJECT),
        ("https://s#" + "x" * 502, "at most 511 char"),
    ],
)
def test_an_odd_subject_is_refused(signing: Signing, subject: str, said: str) -> None:
    before = everything(signing)
    answered(put(signing, "ann", subject=subject), 422, said)
    assert everything(signing) == before


def test_a_subject_has_one_owner(signing: Signing, provider: SmallProvider) -> None:
    answered(put(signing, "one", subject=f"{provider.url}#1"), 200)
    answered(put(signing, "two", subject=f"{provider.url}#1"), 422, "is bound to another owner")
    assert "two" not in {each.name for each in signing.store.owners.all()}


def test_the_way_back_is_the_browsers_address(provider: SmallProvider, tmp_path: Path) -> None:
    options = provider.options()
    behind = {"is_behind_proxy": True, "url_prefix": "/tuner"}
    with served(tmp_path, sign_in=options, **behind) as signing:
        provider.clock = signing.clock
        person = signing.person()
        proxied = {"X-Forwarded-Host": "hpc.example:8443", "X-Forwarded-Proto": "https"}
        begun = person.open("/tuner/sign-in/with-provider?next=/submit", **proxied)
        given = provider.come_back(begun.headers["Location"])
        back = "https://hpc.example:8443/tuner/sign-in/from-provider"
        assert provider.sent["redirect_uri"] == back
        cookie, *rest = begun.headers["Set-Cookie"].split("; ")
        assert cookie.startswith("__Secure-layout_tuner_begun_8443=")
        assert {"Path=/tuner", "Secure", "HttpOnly", "SameSite=lax"} <= set(rest)
        provider.claims = {"preferred_username": "ann", "groups": []}
        headers = {**NAVIGATION, **proxied, "Sec-Fetch-Site": "cross-site", "Cookie": cookie}
        url = f"/tuner/sign-in/from-provider?{urlencode(given)}"
        answer = answered(person.http.get(url, headers=headers), 200, 'url=/tuner/submit"')
        assert provider.form["redirect_uri"] == back
        session = next(c for c in answer.headers.get_list("set-cookie") if "_begun" not in c)
        assert session.startswith("__Secure-layout_tuner_8443=")
        headers = {**NAVIGATION, **proxied, "Cookie": session.partition(";")[0]}
        answered(person.http.get("/tuner/", headers=headers), 200)


@pytest.mark.parametrize("target", ["//evil.example/", "https://evil.example/", "/\\evil.example"])
def test_nobody_is_led_elsewhere(signing: Signing, provider: SmallProvider, target: str) -> None:
    provider.claims = {"sub": "pat-1", "preferred_username": "pat", "groups": []}
    headers = {**NAVIGATION, "Sec-Fetch-Site": "cross-site"}
    for is_forged, status in ((True, 401), (False, 200)):
        person = signing.person()
        begun = person.open(f"/sign-in/with-provider?{urlencode({'next': target})}")
        given = provider.come_back(begun.headers["Location"])
        if is_forged:
            given["state"] = f"{given['state'].partition('.')[0]}.{target}"
        answer = person.http.get(f"/sign-in/from-provider?{urlencode(given)}", headers=headers)
        assert "evil.example" not in answered(answer, status).text
