"""Sign-in by OpenID Connect: the authorization code flow with PKCE, against one provider.

The browser that begins a sign-in gets a cookie with a random secret. State, nonce and the verifier
of PKCE are HMACs of it: a state or a code is worth nothing in another browser, and the service
stores nothing until somebody has signed in. It is imported only where a provider is set.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from http import HTTPStatus
from time import monotonic
from typing import Any, Final
from urllib.parse import quote, urlencode

import httpx
from joserfc import jws, jwt
from joserfc.errors import ExpiredTokenError, JoseError
from joserfc.jwk import import_key

from layout_tuner.api.errors import ProviderUnavailableError, SignInOwnerError, SignInRefusedError
from layout_tuner.api.http.rate_limit import Throttle
from layout_tuner.api.security.sign_in_options import Admission, SignInOptions, is_private
from layout_tuner.protocol.connection.outage_log import OutageLog

LEEWAY_S: Final = 60
"""Seconds that the clocks of the provider and the service may differ."""
MAX_AGE_S: Final = 600
"""Seconds since the provider issued an ID token."""
ANSWER_WITHIN_S: Final = 10.0
LOOK_EVERY_S: Final = 30.0
"""Age of the provider's description at which a sign-in that begins reads it again."""
NEW_KEYS_PER_S: Final = 0.1

KEY_TYPES: Final = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
ALGORITHMS: Final = (*(f"{k}{n}" for k in ("RS", "PS", "ES") for n in (256, 384, 512)), "EdDSA")
"""Of ID tokens: signatures, and none by a secret that both sides have."""

_CLOCKS: Final = f", or the clocks of provider and service differ by more than {LEEWAY_S} s"
_EARLY: Final = re.compile("in the future|not yet valid")

_log = logging.getLogger(__name__)


class Provider:
    """The provider. Not thread-safe: the event loop uses it."""

    def __init__(self, options: SignInOptions, clock: Callable[[], datetime]) -> None:
        self._options, self._clock, self._secret = options, clock, options.client_secret()
        self._name, self._issuer = options.provider_name, options.oidc_issuer
        self._http = httpx.AsyncClient(timeout=ANSWER_WITHIN_S)
        self._about: Mapping[str, Any] = {}
        self._read_at = 0.0
        self._keys: Sequence[Mapping[str, Any]] = ()
        self._new_keys = Throttle(per_s=NEW_KEYS_PER_S, burst=10)
        self._outage = OutageLog(_log, f"the provider {self._issuer}")
        self.close = self._http.aclose

    async def begin(self, cookie: str, redirect_uri: str) -> str:
        """The address at which the person signs in; ProviderUnavailableError if it is away."""
        about = await self._described(LOOK_EVERY_S)
        challenge = hashlib.sha256(_derived(cookie, "verifier").encode()).digest()
        return _with_query(
            about["authorization_endpoint"],
            response_type="code",
            client_id=self._options.oidc_client_id,
            redirect_uri=redirect_uri,
            scope=self._options.oidc_scopes,
            state=_derived(cookie, "state"),
            nonce=_derived(cookie, "nonce"),
            code_challenge=_base64(challenge),
            code_challenge_method="S256",
        )

    async def finish(
        self, cookie: str | None, given: Mapping[str, str], redirect_uri: str
    ) -> Admission:
        """Whom the provider signs in, when it sends a browser back with these parameters.

        Raises:
            SignInRefusedError: the sign-in is not this browser's, the provider refuses it, its ID
                token is not valid, or the owner has no role here.
            ProviderUnavailableError: the provider does not answer.
        """
        state = given.get("state", "").encode()
        if not cookie or not hmac.compare_digest(state, _derived(cookie, "state").encode()):
            raise SignInRefusedError(
                "this sign-in was not begun in this browser, or too long ago: begin again here"
            )
        about = await self._described(None)
        if "error" in given or "code" not in given:
            raise SignInRefusedError(f"{self._name} does not sign you in: {_words(given)}")
        form = {"grant_type": "authorization_code", "code": given["code"]}
        form |= {"redirect_uri": redirect_uri, "code_verifier": _derived(cookie, "verifier")}
        client, basic = self._options.oidc_client_id, None
        if self._secret is None:
            form["client_id"] = client
        else:  # RFC 6749, section 2.3.1: both are encoded as in forms
            basic = httpx.BasicAuth(quote(client, safe=""), quote(self._secret, safe=""))
        got = await self._asked("POST", about["token_endpoint"], data=form, auth=basic)
        token, access = got.get("id_token"), got.get("access_token")
        if not isinstance(token, str) or not isinstance(access, str):
            raise SignInRefusedError(
                f"{self._name} does not accept the code of this sign-in, which works once: "
                f"{_words(got)}; begin again here"
            )
        if find_key(self._keys, token) is None and self._new_keys.take("keys") == 0:
            keys = (await self._asked("GET", about["jwks_uri"])).get("keys")
            listed = keys if isinstance(keys, list) else ()
            self._keys = [key for key in listed if isinstance(key, dict)]
        key, nonce, now = find_key(self._keys, token), _derived(cookie, "nonce"), self._clock()
        claims = verified(token, key, self._issuer, client, nonce, access, int(now.timestamp()))
        wanted = {self._options.owner_claim or "preferred_username", self._options.groups_claim}
        if not wanted <= claims.keys() and is_private(address := about.get("userinfo_endpoint")):
            bearer = {"Authorization": f"Bearer {access}"}
            more = await self._asked("GET", str(address), headers=bearer)
            if more.get("sub") != claims["sub"]:
                raise SignInRefusedError(f"{self._name} states claims of somebody else")
            claims = {**more, **claims}
        return self._options.admitted(
            self._owner_of(claims),
            self._groups_of(claims),
            source=self._issuer,
            subject=claims["sub"],
            id_token=token,
        )

    def sign_out_address(self, id_token: str, back: str) -> str | None:
        """Where a browser ends its session at the provider; None: it is not known."""
        address, client = self._about.get("end_session_endpoint"), self._options.oidc_client_id
        if not is_private(address):
            return None
        hint = {"id_token_hint": id_token, "post_logout_redirect_uri": back}
        return _with_query(str(address), client_id=client, **hint)

    async def _described(self, max_age_s: float | None) -> Mapping[str, Any]:
        """The provider's description, not older than so many seconds; None: of any age."""
        if self._about and (max_age_s is None or monotonic() - self._read_at < max_age_s):
            return self._about
        url = f"{self._issuer.rstrip('/')}/.well-known/openid-configuration"
        read = await self._asked("GET", url)
        needed = ("authorization_endpoint", "token_endpoint", "jwks_uri")
        if read.get("issuer") != self._issuer or not all(is_private(read.get(n)) for n in needed):
            raise self._away(f"{url} describes the issuer {read.get('issuer')!r}, or lacks https")
        self._about, self._read_at = read, monotonic()
        self._outage.worked()
        return read

    def _owner_of(self, claims: Mapping[str, Any]) -> str:
        claim = self._options.owner_claim or "preferred_username"
        name = claims.get(claim)
        if not self._options.owner_claim and not name and claims.get("email_verified") is True:
            name = claims.get("email")
        if not isinstance(name, str) or not name:
            raise SignInOwnerError(
                f"{self._name} states no {claim}, which names the owner here: ask an admin to let it "
                "send that claim, or to set --owner-claim"
            )
        return name

    def _groups_of(self, claims: Mapping[str, Any]) -> tuple[str, ...] | None:
        claim = self._options.groups_claim
        stated = claims.get(claim)
        if stated is None:
            return None
        if not isinstance(stated, list) or not all(isinstance(each, str) for each in stated):
            raise SignInOwnerError(f"{claim} of {self._name} is no list of names: ask an admin")
        return tuple(stated)

    async def _asked(self, method: str, url: str, **request: Any) -> dict[str, Any]:
        """The document with which the provider answers."""
        try:
            answer = await self._http.request(method, url, **request)
            document = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise self._away(f"{url}: {str(error) or type(error).__name__}") from error
        if answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR or not isinstance(document, dict):
            raise self._away(f"{url} answers {answer.status_code}")
        return document

    def _away(self, why: str) -> ProviderUnavailableError:
        self._outage.failed(f"nobody can sign in with {self._issuer}: {why}")
        return ProviderUnavailableError(
            f"{self._name} does not answer as it should, so nobody can sign in with it now; whoever is "
            "signed in stays so, and codes and tokens sign in as always"
        )


def find_key(keys: Sequence[Mapping[str, Any]], id_token: str) -> Mapping[str, Any] | None:
    """The key that an ID token's header names; None: there is none, or not one alone."""
    try:
        header = jws.extract_compact(id_token.encode()).headers()
    except (JoseError, ValueError) as error:
        raise _refused("it cannot be read") from error
    algorithm, name = header.get("alg"), header.get("kid")
    if algorithm not in ALGORITHMS:
        raise _refused(f"alg={str(algorithm)[:20]!r} is not one of {', '.join(ALGORITHMS)}")
    wanted = {"kty": KEY_TYPES[algorithm[:2]], "use": "sig", "alg": algorithm}
    fitting = [
        key
        for key in keys
        if all(key.get(field, value) == value for field, value in wanted.items())
        and name in (None, key.get("kid"))
    ]
    return fitting[0] if len(fitting) == 1 else None


def verified(
    id_token: str,
    key: Mapping[str, Any] | None,
    issuer: str,
    client: str,
    nonce: str,
    access_token: str,
    now: int,
) -> dict[str, Any]:
    """The claims of an ID token (OpenID Connect Core 1.0, sections 3.1.3.7 and 3.1.3.8).

    Raises SignInRefusedError if the signature or a claim is not right at `now`, in Unix seconds.
    """
    if key is None:
        raise _refused("no key of the provider has signed it")
    asked: dict[str, Any] = {name: {"essential": True} for name in ("sub", "exp", "iat")}
    asked |= {n: {"essential": True, "value": v} for n, v in (("iss", issuer), ("aud", client))}
    try:
        token = jwt.decode(id_token, import_key(dict(key)), algorithms=ALGORITHMS)
        claims = token.claims
        jwt.JWTClaimsRegistry(now=now, leeway=LEEWAY_S, **asked).validate(claims)
    except (JoseError, ValueError) as error:
        is_of_clocks = isinstance(error, ExpiredTokenError) or _EARLY.search(str(error))
        raise _refused(f"{error}{_CLOCKS if is_of_clocks else ''}") from error
    if claims["iat"] < now - MAX_AGE_S - LEEWAY_S:
        raise _refused(f"it is too old{_CLOCKS}")
    is_of_many = isinstance(claims["aud"], list) and len(claims["aud"]) > 1
    if claims.get("azp", None if is_of_many else client) != client:
        raise _refused("it is for another client")
    if claims.get("nonce") != nonce:
        raise _refused("it is of another sign-in")
    bits = token.header["alg"][2:].replace("DSA", "512")
    digest = hashlib.new(f"sha{bits}", access_token.encode()).digest()
    half = _base64(digest[: len(digest) // 2])
    if claims.get("at_hash", half) != half or len(claims["sub"]) > 255:
        raise _refused("it is of another access token, or its subject has over 255 characters")
    return claims


def _refused(why: str) -> SignInRefusedError:
    return SignInRefusedError(f"the provider's ID token is not accepted: {why}")


def _derived(cookie: str, purpose: str) -> str:
    return _base64(hmac.digest(cookie.encode(), purpose.encode(), "sha256"))


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _with_query(address: str, **asked: str) -> str:
    return f"{address}{'&' if '?' in address else '?'}{urlencode(asked)}"


def _words(answer: Mapping[str, Any]) -> str:
    """The error of an answer, as the provider states it."""
    kind, more = answer.get("error", "it sent no code"), answer.get("error_description")
    return str(kind)[:80] + (f" ({str(more)[:200]})" if more else "")
