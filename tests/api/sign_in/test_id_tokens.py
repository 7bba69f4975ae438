"""Which ID tokens are accepted, with keys and a provider that the tests make themselves."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import threading
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from joserfc import jws, jwt
from joserfc.jwk import ECKey, RSAKey

from layout_tuner.api.errors import ProviderUnavailableError, SignInOwnerError, SignInRefusedError
from layout_tuner.api.security.oidc import ALGORITHMS, Provider, find_key, verified
from layout_tuner.api.security.sign_in_options import Admission, SignInOptions

NOW = 1_800_000_000
ISSUER, CLIENT, NONCE, ACCESS = "https://sso.example", "tuner", "n-1", "access"
RSA, OTHER = (RSAKey.generate_key(2048, {"kid": name}) for name in ("a", "b"))
EC = ECKey.generate_key("P-256", {"kid": "e"})
PUBLIC = [key.as_dict(private=False) for key in (RSA, EC)]


def unpadded(content: bytes) -> str:
    return urlsafe_b64encode(content).rstrip(b"=").decode()


def half_hash(text: str) -> str:
    return unpadded(hashlib.sha256(text.encode()).digest()[:16])


CLAIMS: dict[str, Any] = {
    "iss": ISSUER,
    "aud": CLIENT,
    "sub": "1",
    "nonce": NONCE,
    "iat": NOW,
    "exp": NOW + 300,
    "at_hash": half_hash(ACCESS),
}


def signed(key: Any = RSA, header: dict[str, Any] | None = None, **claims: Any) -> str:
    """An ID token; claims that are None are left out."""
    given = {name: value for name, value in (CLAIMS | claims).items() if value is not None}
    head = {"alg": "RS256", "kid": "a"} if header is None else header
    return jwt.encode(head, given, key, algorithms=[*ALGORITHMS, "HS256", "none"])


def accepted(token: str, now: int = NOW) -> dict[str, Any]:
    return verified(token, find_key(PUBLIC, token), ISSUER, CLIENT, NONCE, ACCESS, now)


@pytest.mark.parametrize(
    "claims",
    [
        {},
        {"aud": [CLIENT]},
        {"aud": [CLIENT, "other"], "azp": CLIENT},
        {"at_hash": None},
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
        ({"exp": NOW - 60}, "clocks"),
        ({"exp": None}, "exp"),
        ({"exp": "soon"}, "exp"),
        ({"iat": NOW + 61}, "clocks"),
        ({"iat": NOW - 661}, "too old"),
        ({"iat": None}, "iat"),
        ({"nbf": NOW + 61}, "clocks"),
        ({"nonce": None}, "another sign-in"),
        ({"nonce": [NONCE]}, "another sign-in"),
        ({"nonce": "n-2"}, "another sign-in"),
        ({"at_hash": half_hash("other")}, "another access token"),
        ({"sub": ""}, "sub"),
        ({"sub": 7}, "sub"),
        ({"sub": "x" * 256}, "255"),
    ],
)
def test_a_wrong_claim_is_refused(claims: dict[str, Any], words: str) -> None:
    with pytest.raises(SignInRefusedError) as refused:
        accepted(signed(**claims))
    assert "ID token is not accepted" in str(refused.value)
    assert words in str(refused.value)


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
    with pytest.raises(SignInRefusedError, match="ID token is not accepted"):
        accepted(forged)


def test_a_token_without_a_kid_needs_one_key_that_fits() -> None:
    token = signed(header={"alg": "RS256"})
    assert accepted(token)["sub"] == "1"
    assert find_key([*PUBLIC, OTHER.as_dict(private=False)], token) is None


def test_roles_come_from_groups_and_the_highest_counts() -> None:
    options = SignInOptions(group_role=("a=viewer", "b=admin", "c=submitter"), default_role="none")

    def role(*groups: str) -> str:
        return options.admitted("ana", groups, source="").role

    assert [role("a"), role("c", "a"), role("a", "b", "c")] == ["viewer", "submitter", "admin"]
    for groups, words in ((), "in no group"), (("d",), "in no group"), (None, "nothing states"):
        with pytest.raises(SignInOwnerError, match=words):
            options.admitted("ana", groups, source="")
    many = SignInOptions().admitted("ana", tuple(f"g{n}" for n in range(300)), source="")
    assert (len(many.groups or ()), many.num_left_out, many.role) == (200, 100, "viewer")


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


class SmallProvider:
    """A provider without pages: each path has a document, or a status."""

    def __init__(self, url: str) -> None:
        self.url, self.asked = url, list[str]()
        self.nonce, self.claims, self.key = "", dict[str, Any](), RSA
        self.documents: dict[str, Callable[[], Any]] = {
            "/.well-known/openid-configuration": lambda: {
                "issuer": url,
                "authorization_endpoint": f"{url}/auth?theme=dark",
                **{f"{n}_endpoint": f"{url}/{n}" for n in ("token", "userinfo", "end_session")},
                "jwks_uri": f"{url}/keys",
            },
            "/keys": lambda: {"keys": [self.key.as_dict(private=False)]},
            "/token": self._token,
            "/userinfo": lambda: {"sub": "1", "preferred_username": "ana"},
        }

    def _token(self) -> dict[str, str]:
        now = int(datetime.now(UTC).timestamp())
        own = {"iss": self.url, "nonce": self.nonce, "iat": now, "exp": now + 60}
        header = {"alg": "RS256", "kid": self.key.kid}
        token = signed(self.key, header, **own, **self.claims)
        return {"id_token": token, "access_token": ACCESS}

    async def sign_in(self, provider: Provider) -> Admission:
        url = await provider.begin("c" * 43, "http://127.0.0.1/back")
        asked = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        self.nonce = asked["nonce"]
        given = {"state": asked["state"], "code": "once"}
        return await provider.finish("c" * 43, given, "http://127.0.0.1/back")


@contextmanager
def serving(small: SmallProvider, server: ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def small() -> Iterator[SmallProvider]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            small.asked.append(self.path)
            document = small.documents[self.path]()
            stated = document.get("status", 200) if isinstance(document, dict) else 200
            status = document if isinstance(document, int) else stated
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(document).encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    small = SmallProvider(f"http://127.0.0.1:{server.server_port}")
    with serving(small, server):
        yield small


def signing_in(small: SmallProvider, times: int = 1, **options: Any) -> list[Admission]:
    """Sign-ins one after the other at one service."""

    async def sign_in() -> list[Admission]:
        given = {"oidc_issuer": small.url, "oidc_client_id": CLIENT} | options
        provider = Provider(SignInOptions(**given), lambda: datetime.now(UTC))
        try:
            return [await small.sign_in(provider) for _ in range(times)]
        finally:
            await provider.close()

    return asyncio.run(sign_in())


def test_claims_that_the_id_token_lacks_are_asked_for(small: SmallProvider) -> None:
    (ana,) = signing_in(small)
    assert (ana.owner, ana.subject, ana.groups) == ("ana", "1", None)
    small.asked.clear()
    small.claims = {"preferred_username": "eve", "groups": ["hpc", "hpc", "no name"]}
    (eve,) = signing_in(small)
    assert (eve.owner, eve.groups, eve.num_left_out) == ("eve", ("hpc",), 1)
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
    with pytest.raises(SignInRefusedError, match="no key of the provider"):
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


def test_a_verified_email_names_the_owner_or_a_claim_of_choice(small: SmallProvider) -> None:
    verified_email = {"sub": "1", "email": "a@b.example", "email_verified": True}
    small.documents["/userinfo"] = lambda: verified_email
    assert signing_in(small)[0].owner == "a@b.example"
    assert signing_in(small, owner_claim="email")[0].owner == "a@b.example"
    small.documents["/userinfo"] = lambda: verified_email | {"uid": "u7"}
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
