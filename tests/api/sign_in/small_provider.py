"""A provider without pages on loopback, which answers what a test says; and ID tokens."""

from __future__ import annotations

import hashlib
import json
import threading
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
from joserfc import jwt
from joserfc.jwk import RSAKey

from layout_tuner.api.http.sign_in_options import SignInOptions
from layout_tuner.api.security.oidc import ALGORITHMS
from tests.kit.persons import NAVIGATION, Person

NOW: Final = 1_800_000_000
ISSUER, CLIENT, NONCE, ACCESS = "https://sso.example", "tuner", "n-1", "access"
RSA, OTHER = (RSAKey.generate_key(2048, {"kid": name}) for name in ("a", "b"))

CLAIMS: Final[dict[str, Any]] = {
    "iss": ISSUER,
    "aud": CLIENT,
    "sub": "1",
    "nonce": NONCE,
    "iat": NOW,
    "exp": NOW + 300,
}


def unpadded(content: bytes) -> str:
    return urlsafe_b64encode(content).rstrip(b"=").decode()


def signed(key: Any = RSA, header: dict[str, Any] | None = None, **claims: Any) -> str:
    """An ID token; claims that are None are left out."""
    given = {name: value for name, value in (CLAIMS | claims).items() if value is not None}
    head = {"alg": "RS256", "kid": "a"} if header is None else header
    return jwt.encode(head, given, key, algorithms=[*ALGORITHMS, "HS256", "none"])


class SmallProvider:
    """Each path has a document, or a status. The code of a sign-in works with its verifier."""

    def __init__(self, url: str) -> None:
        self.url, self.asked = url, list[str]()
        self.sent: dict[str, str] = {}
        """The parameters with which a browser was sent here."""
        self.claims, self.key = dict[str, Any](), RSA
        self.clock: Callable[[], datetime] = lambda: datetime.now(UTC)
        self.form: dict[str, str] = {}
        """The last request for a token."""
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

    def options(self, **others: Any) -> SignInOptions:
        return SignInOptions(**{"oidc_issuer": self.url, "oidc_client_id": CLIENT, **others})

    def _token(self) -> dict[str, str]:
        digest = hashlib.sha256(self.form["code_verifier"].encode()).digest()
        is_right = unpadded(digest) == self.sent["code_challenge"]
        if not is_right or self.form["redirect_uri"] != self.sent["redirect_uri"]:
            return {"error": "invalid_grant"}
        now = int(self.clock().timestamp())
        own = {"iss": self.url, "nonce": self.sent["nonce"], "iat": now, "exp": now + 60}
        header = {"alg": "RS256", "kid": self.key.kid}
        token = signed(self.key, header, **{**own, **self.claims})
        return {"id_token": token, "access_token": ACCESS}

    def come_back(self, url: str) -> dict[str, str]:
        """What it sends a browser back with that was sent to an address of it."""
        self.sent = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        return {"state": self.sent["state"], "code": "once"}

    def sign_in(self, person: Person, **claims: Any) -> httpx.Response:
        """The service's answer to a browser that signs in with these claims."""
        self.claims = {"groups": [], **claims}
        begun = person.open("/sign-in/with-provider")
        given = self.come_back(begun.headers["Location"])
        headers = {**NAVIGATION, "Sec-Fetch-Site": "cross-site"}
        return person.http.get(f"/sign-in/from-provider?{urlencode(given)}", headers=headers)


@contextmanager
def small_provider() -> Iterator[SmallProvider]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            if self.path == "/token":
                small.form = {name: values[0] for name, values in parse_qs(body).items()}
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
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield small
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
