"""Sign-in by OpenID Connect: the authorization code flow with PKCE, against one provider.

The browser that begins a sign-in gets a cookie with a random secret. State, nonce and the verifier
of PKCE are HMACs of it: a state or a code is worth nothing in another browser, and the service
stores nothing until somebody has signed in. The state ends with the path to go on to. The module is
imported only where a provider is set.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from http import HTTPStatus
from time import monotonic
from typing import Any, Final
from urllib.parse import quote

import httpx
from joserfc import jwt
from joserfc.errors import InvalidClaimError, InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet

from layout_tuner.api.errors import ProviderUnavailableError, SignInRefusedError
from layout_tuner.api.http.sign_in_options import Admission, SignInOptions, is_private
from layout_tuner.protocol.connection.outage_log import OutageLog

LEEWAY_S: Final = 60
"""Seconds that the clocks of the provider and the service may differ."""
ANSWER_WITHIN_S: Final = 10.0
LOOK_EVERY_S: Final = 30.0
"""Age at which the provider's description is read again."""

ALGORITHMS: Final = (*(f"{k}{n}" for k in ("RS", "PS", "ES") for n in (256, 384, 512)), "EdDSA")
"""Of ID tokens: signatures, and none by a secret that both sides have."""

_log = logging.getLogger(__name__)


class Provider:
    """The provider. Not thread-safe: the event loop uses it."""

    def __init__(self, options: SignInOptions, clock: Callable[[], datetime]) -> None:
        self._options, self._clock, secret = options, clock, options.client_secret()
        self._name, self._issuer = options.provider_name, options.oidc_issuer
        # RFC 6749, section 2.3.1: both are encoded as in forms.
        names = (quote(each or "", safe="") for each in (options.oidc_client_id, secret))
        self._basic = httpx.BasicAuth(*names) if secret else None
        self._http = httpx.AsyncClient(timeout=ANSWER_WITHIN_S)
        self._about: Mapping[str, Any] = {}
        self._read_at = -LOOK_EVERY_S
        self._keys = KeySet([])
        self._outage = OutageLog(_log, f"the provider {self._issuer}")
        self.close = self._http.aclose

    async def begin(self, cookie: str, target: str, redirect_uri: str) -> str:
        """The address at which the person signs in; ProviderUnavailableError if it is away."""
        challenge = hashlib.sha256(_derived(cookie, "verifier").encode()).digest()
        asked = {
            "response_type": "code",
            "client_id": self._options.oidc_client_id,
            "redirect_uri": redirect_uri,
            "scope": f"openid {self._options.oidc_scopes}",
            "state": _state(cookie, target),
            "nonce": _derived(cookie, "nonce"),
            "code_challenge": _base64(challenge),
            "code_challenge_method": "S256",
        }
        address = (await self._described())["authorization_endpoint"]
        return str(httpx.URL(address).copy_merge_params(asked))

    async def finish(
        self, cookie: str | None, given: Mapping[str, str], redirect_uri: str
    ) -> Admission:
        """Whom the provider signs in, when it sends a browser back with these parameters.

        Raises:
            SignInRefusedError: the sign-in is not this browser's, the provider refuses it, its ID
                token is not valid, or the owner has no role here.
            ProviderUnavailableError: the provider does not answer.
        """
        state = given.get("state", "")
        own = _state(cookie or "", state.partition(".")[2])
        if not cookie or not hmac.compare_digest(state.encode(), own.encode()):
            raise SignInRefusedError(
                "this sign-in was not begun in this browser, or too long ago: begin again here"
            )
        if "error" in given or "code" not in given:
            raise SignInRefusedError(f"{self._name} does not sign you in: {_words(given)}")
        about = await self._described()
        form = {
            "grant_type": "authorization_code",
            "code": given["code"],
            "redirect_uri": redirect_uri,
            "client_id": self._options.oidc_client_id,
            "code_verifier": _derived(cookie, "verifier"),
        }
        got = await self._asked("POST", about["token_endpoint"], data=form, auth=self._basic)
        token, access = got.get("id_token"), got.get("access_token")
        if not isinstance(token, str) or not isinstance(access, str):
            raise SignInRefusedError(
                f"{self._name} does not accept the code of this sign-in, which works once: "
                f"{_words(got)}; begin again here"
            )
        claims = await self._verified(token, _derived(cookie, "nonce"), about["jwks_uri"])
        wanted = {self._options.owner_claim, self._options.groups_claim}
        if not wanted <= claims.keys() and is_private(address := about.get("userinfo_endpoint")):
            bearer = {"Authorization": f"Bearer {access}"}
            more = await self._asked("GET", str(address), headers=bearer)
            if more.get("sub") != claims["sub"]:
                raise SignInRefusedError(f"{self._name} states claims of somebody else")
            claims = {**more, **claims}
        return self._options.admitted_by_claims(claims, token)

    def sign_out_address(self, id_token: str, back: str) -> str | None:
        """Where a browser ends its session at the provider; None: it is not known."""
        address, client = self._about.get("end_session_endpoint"), self._options.oidc_client_id
        if not is_private(address):
            return None
        hint = {"id_token_hint": id_token, "post_logout_redirect_uri": back, "client_id": client}
        return str(httpx.URL(str(address)).copy_merge_params(hint))

    async def _described(self) -> Mapping[str, Any]:
        """The provider's description; ProviderUnavailableError if it cannot be read again."""
        if monotonic() - self._read_at < LOOK_EVERY_S:
            return self._about
        url = f"{self._issuer.rstrip('/')}/.well-known/openid-configuration"
        read = await self._asked("GET", url)
        needed = ("authorization_endpoint", "token_endpoint", "jwks_uri")
        if read.get("issuer") != self._issuer or not all(is_private(read.get(n)) for n in needed):
            raise self._away(f"{url} describes the issuer {read.get('issuer')!r}, or lacks https")
        self._about, self._read_at = read, monotonic()
        self._outage.worked()
        return read

    async def _verified(self, id_token: str, nonce: str, keys_at: str) -> dict[str, Any]:
        """The claims of an ID token; the keys are read again for one that is not known."""
        expected = (self._issuer, self._options.oidc_client_id, nonce, self._clock().timestamp())
        try:
            try:
                return verified(id_token, self._keys, *expected)
            except InvalidKeyIdError:
                self._keys = KeySet.import_key_set(await self._asked("GET", keys_at))  # type: ignore[arg-type]
                return verified(id_token, self._keys, *expected)
        except (JoseError, ValueError, LookupError, TypeError) as error:  # of odd keys, too
            is_of_time = getattr(error, "claim", "") in ("exp", "nbf", "iat")
            clocks = f", or the clocks of provider and service differ by more than {LEEWAY_S} s"
            why = f"{error}{clocks if is_of_time else ''}"
            raise SignInRefusedError(f"the provider's ID token is not accepted: {why}") from error

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


def verified(
    id_token: str, keys: KeySet, issuer: str, client: str, nonce: str, now: float
) -> dict[str, Any]:
    """The claims of an ID token (OpenID Connect Core 1.0, section 3.1.3.7).

    Raises JoseError or ValueError if the signature or a claim is not right at `now`, in Unix
    seconds; InvalidKeyIdError if none of the keys has signed it.
    """
    claims = jwt.decode(id_token, keys, algorithms=ALGORITHMS).claims
    asked: dict[str, Any] = {name: {"essential": True} for name in ("sub", "exp", "iat")}
    asked |= {n: {"essential": True, "value": v} for n, v in (("iss", issuer), ("aud", client))}
    jwt.JWTClaimsRegistry(now=int(now), leeway=LEEWAY_S, **asked).validate(claims)
    is_of_many = isinstance(claims["aud"], list) and len(claims["aud"]) > 1
    if claims.get("azp", None if is_of_many else client) != client:
        raise InvalidClaimError("azp", "it is for another client")
    # The registry would accept a list that has the nonce.
    if claims.get("nonce") != nonce:
        raise InvalidClaimError("nonce", "it is of another sign-in")
    return claims


def _state(cookie: str, target: str) -> str:
    return f"{_derived(cookie, f'state {target}')}.{target}"


def _derived(cookie: str, purpose: str) -> str:
    return _base64(hmac.digest(cookie.encode(), purpose.encode(), "sha256"))


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _words(answer: Mapping[str, Any]) -> str:
    """The error of an answer, as the provider states it."""
    kind, more = answer.get("error", "it sent no code"), answer.get("error_description")
    return str(kind)[:80] + (f" ({str(more)[:200]})" if more else "")
