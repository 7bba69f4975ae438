"""Which ID tokens are accepted, with keys and a provider that the tests make themselves."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest
from joserfc import jws
from joserfc.errors import ClaimError, InvalidKeyIdError, JoseError
from joserfc.jwk import ECKey, KeySet

from layout_tuner.api.errors import ProviderUnavailableError, SignInOwnerError, SignInRefusedError
from layout_tuner.api.http.sign_in_options import SignInOptions
from layout_tuner.api.security.oidc import Provider, verified
from tests.api.sign_in.small_provider import (
    CLIENT,
    ISSUER,
    NONCE,
    NOW,
    OTHER,
    RSA,
    SmallProvider,
    signed,
    small_provider,
    unpadded,
)

EC = ECKey.generate_key("P-256", {"kid": "e"})
PUBLIC = KeySet.import_key_set(KeySet([RSA, EC]).as_dict())


def accepted(token: str, keys: KeySet = PUBLIC) -> dict[str, Any]:
    return verified(token, keys, ISSUER, CLIENT, NONCE, NOW)


@pytest.mark.parametrize(
    "claims",
    [
        {},
        {"aud": [CLIENT]},
        {"aud": [CLIENT, "other"], "azp": CLIENT},
        {"iat": NOW + 60},
        {"exp": NOW - 59, "iat": NOW - 300},
        {"nbf": NOW + 60},
    ],
)
def test_a_right_token_is_accepted(claims: dict[str, Any]) -> None:
    assert accepted(signed(**claims))["sub"] == "1"
    assert accepted(signed(EC, {"alg": "ES256", "kid": "e"}, **claims))["sub"] == "1"


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ({"iss": "https://evil.example"}, "iss"),
        ({"iss": [ISSUER]}, "iss"),
        ({"iss": None}, "iss"),
        ({"aud": "other"}, "aud"),
        ({"aud": ["other"]}, "aud"),
        ({"aud": None}, "aud"),
        ({"aud": [CLIENT, "other"]}, "another client"),
        ({"azp": "other"}, "another client"),
        ({"exp": NOW - 60}, "expired"),
        ({"exp": None}, "exp"),
        ({"exp": "soon"}, "exp"),
        ({"iat": NOW + 61}, "in the future"),
        ({"iat": None}, "iat"),
        ({"nbf": NOW + 61}, "not yet valid"),
        ({"nonce": None}, "another sign-in"),
        ({"nonce": [NONCE]}, "another sign-in"),
        ({"nonce": "n-2"}, "another sign-in"),
        ({"sub": ""}, "sub"),
        ({"sub": 7}, "sub"),
    ],
)
def test_a_wrong_claim_is_refused(claims: dict[str, Any], words: str) -> None:
    with pytest.raises(ClaimError, match=words):
        accepted(signed(**claims))


def forgeries() -> dict[str, str]:
    head, claims, signature = signed().split(".")
    other = signed(sub="2").split(".")[1]
    none, by_secret = (
        unpadded(f'{{"alg":"{alg}","kid":"a"}}'.encode()) for alg in ("none", "HS256")
    )
    public = RSA.as_pem(private=False)
    mac = unpadded(hmac.digest(public, f"{by_secret}.{claims}".encode(), "sha256"))
    return {
        "another key": signed(OTHER),
        "another kid": signed(OTHER, {"alg": "RS256", "kid": "b"}),
        "secret of public key": f"{by_secret}.{claims}.{mac}",
        "key of another type": signed(RSA, {"alg": "RS256", "kid": "e"}),
        "its own key": signed(OTHER, {"alg": "RS256", "kid": "b", "jwk": OTHER.as_dict(False)}),
        "changed claims": f"{head}.{other}.{signature}",
        "no signature": f"{head}.{claims}.",
        "none": f"{none}.{claims}.",
        "no token": "x",
        "no text": "é.é.é",
        "no claims": jws.serialize_compact({"alg": "RS256", "kid": "a"}, b"[]", RSA),
    }


@pytest.mark.parametrize("forged", forgeries().values(), ids=forgeries())
def test_a_forged_token_is_refused(forged: str) -> None:
    with pytest.raises((JoseError, ValueError)):
        accepted(forged)


def test_a_token_without_a_kid_needs_a_single_key() -> None:
    token = signed(header={"alg": "RS256"})
    assert accepted(token, KeySet([RSA]))["sub"] == "1"
    with pytest.raises(InvalidKeyIdError):
        accepted(token)


def test_roles_come_from_groups_and_the_highest_counts() -> None:
    options = SignInOptions(group_role=("a=viewer", "b=admin", "c=submitter"), default_role="none")

    def role(*groups: str) -> str:
        return str(options.admitted("ana", groups, "").session["role"])

    assert [role("a"), role("c", "a"), role("a", "b", "c")] == ["viewer", "submitter", "admin"]
    for groups, words in ((), "in no group"), (("d",), "in no group"), (None, "nothing states"):
        with pytest.raises(SignInOwnerError, match=words):
            options.admitted("ana", groups, "")


def test_options_are_passed_on_as_they_were_given() -> None:
    given = SignInOptions(
        oidc_issuer=ISSUER, default_role="none", group_role=("a=viewer", "b=admin")
    )
    words = given.arguments
    assert words[words.index("--default-role") + 1] == "none"
    assert [words[n + 1] for n, word in enumerate(words) if word == "--group-role"] == [
        "a=viewer",
        "b=admin",
    ]


class Admitted(NamedTuple):
    """Whom a provider signs in."""

    owner: str
    subject: str
    groups: frozenset[str] | None
    groups_left_out: int


@pytest.fixture
def small() -> Iterator[SmallProvider]:
    with small_provider() as small:
        yield small


def signing_in(small: SmallProvider, times: int = 1, **options: Any) -> list[Admitted]:
    """Sign-ins one after the other at one service."""
    cookie, back = "c" * 43, "http://127.0.0.1/back"

    async def sign_in() -> list[Admitted]:
        provider, found = Provider(small.options(**options), lambda: datetime.now(UTC)), []
        try:
            for _ in range(times):
                given = small.come_back(await provider.begin(cookie, "/", back))
                found.append(await provider.finish(cookie, given, back))
        finally:
            await provider.close()
        subjects = [each.session["subject"].removeprefix(f"{small.url}#") for each in found]
        return [
            Admitted(each.owner, subject, each.groups, each.session["groups_left_out"])
            for each, subject in zip(found, subjects, strict=True)
        ]

    return asyncio.run(sign_in())


@pytest.mark.parametrize(
    ("cookie", "change"),
    [("d" * 43, ""), (None, ""), ("", ""), ("c" * 43, "x"), ("c" * 43, "é")],
)
def test_a_state_of_another_browser_or_target_is_refused(
    small: SmallProvider, cookie: str | None, change: str
) -> None:
    async def finish() -> None:
        provider, back = Provider(small.options(), lambda: datetime.now(UTC)), "http://127.0.0.1/"
        given = small.come_back(await provider.begin("c" * 43, "/submit", back))
        try:
            await provider.finish(cookie, {**given, "state": given["state"] + change}, back)
        finally:
            await provider.close()

    with pytest.raises(SignInRefusedError, match="not begun in this browser"):
        asyncio.run(finish())
    assert "/token" not in small.asked


def test_claims_that_the_id_token_lacks_are_asked_for(small: SmallProvider) -> None:
    (ana,) = signing_in(small)
    assert (ana.owner, ana.subject, ana.groups) == ("ana", "1", None)
    small.asked.clear()
    small.claims = {"preferred_username": "eve", "groups": ["hpc", "hpc", "no name"]}
    (eve,) = signing_in(small)
    assert (eve.owner, eve.groups, eve.groups_left_out) == ("eve", {"hpc"}, 1)
    assert "/userinfo" not in small.asked


@pytest.mark.parametrize("keys", [None, 7, {"a": 1}, [7], [{"kty": "RSA", "kid": "a"}]])
def test_odd_keys_sign_nobody_in(small: SmallProvider, keys: Any) -> None:
    small.documents["/keys"] = lambda: {"keys": keys}
    with pytest.raises(SignInRefusedError, match="ID token is not accepted"):
        signing_in(small)


def test_keys_and_description_are_kept_and_new_keys_read_once(small: SmallProvider) -> None:
    signing_in(small, 3)
    assert small.asked.count("/keys") == 1
    assert small.asked.count("/.well-known/openid-configuration") == 1
    small.documents["/keys"] = lambda: {"keys": [OTHER.as_dict(private=False)]}
    small.asked.clear()
    with pytest.raises(SignInRefusedError, match="No key for kid"):
        signing_in(small)
    assert small.asked.count("/keys") == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"sub": "2", "preferred_username": "ana"}, "claims of somebody else"),
        ({"sub": "1"}, "states no preferred_username"),
        ({"sub": "1", "email": "a@b.example"}, "states no preferred_username"),
        ({"sub": "1", "preferred_username": ["ana"]}, "states no preferred_username"),
        ({"sub": "1", "preferred_username": "ana", "groups": "hpc"}, "is no list of names"),
        ({"sub": "1", "preferred_username": "ana", "groups": [1]}, "is no list of names"),
    ],
)
def test_odd_claims_are_refused_with_a_sentence(
    small: SmallProvider, more: dict[str, Any], words: str
) -> None:
    small.documents["/userinfo"] = lambda: more
    with pytest.raises(SignInRefusedError, match=words):
        signing_in(small)


def test_a_claim_of_choice_names_the_owner(small: SmallProvider) -> None:
    small.documents["/userinfo"] = lambda: {"sub": "1", "email": "a@b.example", "uid": "u7"}
    assert signing_in(small, owner_claim="email")[0].owner == "a@b.example"
    assert signing_in(small, owner_claim="uid")[0].owner == "u7"


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/.well-known/openid-configuration", {"issuer": "https://evil.example"}),
        ("/.well-known/openid-configuration", {"authorization_endpoint": "http://sso.example/"}),
        ("/.well-known/openid-configuration", 500),
        ("/.well-known/openid-configuration", []),
        ("/token", 502),
        ("/token", {"status": 500}),
        ("/keys", 503),
        ("/userinfo", 500),
    ],
)
def test_a_provider_that_answers_wrongly_is_away(
    small: SmallProvider, path: str, document: Any
) -> None:
    right = small.documents[path]
    merged = (lambda: right() | document) if isinstance(document, dict) else (lambda: document)
    small.documents[path] = merged
    with pytest.raises(ProviderUnavailableError, match="does not answer as it should"):
        signing_in(small)


def test_a_refused_code_is_told_with_the_providers_words(small: SmallProvider) -> None:
    small.documents["/token"] = lambda: {"error": "invalid_grant", "error_description": "used"}
    with pytest.raises(SignInRefusedError, match=r"works once: invalid_grant \(used\)"):
        signing_in(small)
