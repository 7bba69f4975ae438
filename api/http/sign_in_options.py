"""How people sign in without a token: by a provider, or by the header of a proxy; and as what."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from layout_tuner.api.errors import ServiceStartError, SignInOwnerError
from layout_tuner.documents.hosts import is_loopback_host
from layout_tuner.errors import TokenFileUnusableError
from layout_tuner.protocol.connection.bearer_token import token_in

_ROLES: Final = ("viewer", "submitter", "admin")


def _option(default: Any, words: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": words, "choices": choices})


@dataclass(frozen=True, kw_only=True, slots=True)
class SignInOptions:
    """The provider, the proxy's headers, and the roles; each is an option of `serve` and `up`."""

    oidc_issuer: str = _option("", "Address of an OpenID Connect provider to sign in with.")
    oidc_client_id: str = _option("", "The client that the provider knows this service as.")
    oidc_client_secret_file: str = _option("", "File of the client's secret.")
    oidc_scopes: str = _option("profile email", "Scopes to ask the provider for, beside openid.")
    owner_claim: str = _option("preferred_username", "Claim that names a new owner.")
    groups_claim: str = _option("groups", "Claim that lists the owner's groups.")
    owner_header: str = _option("", "Header in which the proxy (--proxy) names the owner.")
    groups_header: str = _option("", "Header in which the proxy lists the owner's groups.")
    default_role: str = _option(
        "viewer",
        "Role of owners whom no --group-role gives one; none: they may not sign in.",
        ("none", "viewer", "submitter"),
    )
    group_role: tuple[str, ...] = _option(
        (), f"GROUP={'|'.join(_ROLES)}: the role of a group's members; may be repeated."
    )

    @property
    def arguments(self) -> list[str]:
        """The same as options of the command line."""
        given = [(each.name.replace("_", "-"), getattr(self, each.name)) for each in fields(self)]
        flat = [(n, v) for n, all_ in given for v in (all_ if isinstance(all_, tuple) else [all_])]
        return [word for name, value in flat if value for word in (f"--{name}", str(value))]

    @property
    def provider_name(self) -> str:
        return urlsplit(self.oidc_issuer).hostname or ""

    def client_secret(self) -> str | None:
        """The secret of the client; ServiceStartError if its file cannot be read."""
        file = self.oidc_client_secret_file
        try:
            return token_in(Path(file)) if file else None
        except TokenFileUnusableError as error:
            raise ServiceStartError(f"--oidc-client-secret-file: {error}") from error

    def refuse_unusable(self, *, is_behind_proxy: bool) -> None:
        """Raises ServiceStartError for options that do not fit together."""
        why, issuer, header = "", self.oidc_issuer, self.owner_header
        if bool(issuer) != bool(self.oidc_client_id):
            why = "--oidc-issuer and --oidc-client-id go together: give both"
        elif issuer and not is_private(issuer):
            why = (
                f"--oidc-issuer {issuer!r} is not an address with https://: over plain HTTP anybody on "
                "the way could sign in as anybody"
            )
        elif header and not is_behind_proxy:
            why = "--owner-header takes a proxy that sets it in every request: give --behind-proxy too"
        elif self.groups_header and not header:
            why = "--groups-header goes together with --owner-header: give both"
        for group, _, role in self._pairs:
            if not group or role not in _ROLES:
                why = f"--group-role '{group}={role}' is not GROUP={'|'.join(_ROLES)}"
        if why:
            raise ServiceStartError(why)
        self.client_secret()

    @property
    def _pairs(self) -> list[tuple[str, str, str]]:
        return [pair.rpartition("=") for pair in self.group_role]

    def admitted_by_claims(self, claims: Mapping[str, Any], id_token: str) -> Admission:
        """As what a subject signs in; SignInOwnerError where its claims do not say so."""
        owner, groups = claims.get(self.owner_claim), claims.get(self.groups_claim)
        if not isinstance(owner, str) or not owner:
            raise SignInOwnerError(
                f"{self.provider_name} states no {self.owner_claim}, which names the owner here: ask an "
                "admin to let it send that claim, or to set --owner-claim"
            )
        if groups is not None and not (
            isinstance(groups, list) and all(isinstance(each, str) for each in groups)
        ):
            raise SignInOwnerError(
                f"{self.groups_claim} of {self.provider_name} is no list of names: ask an admin"
            )
        subject = f"{self.oidc_issuer}#{claims['sub']}"
        return self.admitted(owner, groups, self.oidc_issuer, subject=subject, id_token=id_token)

    def admitted(
        self, owner: str, groups: Collection[str] | None, source: str, **others: str
    ) -> Admission:
        """As what an owner signs in; groups that are None are not stated.

        Raises:
            TokenInvalidError: the name is not one of an owner.
            SignInOwnerError: the owner has no role here.
        """
        from layout_tuner.results_db.access.tokens import is_name, refuse_taken_name

        refuse_taken_name(owner, "owner")
        if groups is None and self.group_role:
            raise SignInOwnerError(
                f"nothing states the groups of {owner!r}, which have the roles here: ask an admin to let "
                "the provider or the proxy send them"
            )
        stated = set(groups or ())
        roles = [_ROLES.index(role) for group, _, role in self._pairs if group in stated]
        role = _ROLES[max(roles)] if roles else self.default_role
        if role == "none":
            raise SignInOwnerError(
                f"{owner!r} is in no group with a role here: ask an admin for one"
            )
        named = None if groups is None else frozenset(filter(is_name, stated))
        session = {"role": role, "groups_left_out": len(stated - (named or stated)), **others}
        return Admission(owner=owner, groups=named, session={"source": source, **session})


NO_SIGN_IN_OPTIONS: Final = SignInOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """As what an owner signs in, and who says so."""

    owner: str
    groups: frozenset[str] | None
    """None: they are not stated, and memberships stay as they are."""
    session: Mapping[str, Any]
    """The further arguments of `SignIns.create_owner_session`."""


def is_private(url: object) -> bool:
    """Whether nobody on the way can read what is sent to an address, or change it."""
    try:
        parts = urlsplit(str(url))
    except ValueError:
        return False
    is_local = parts.scheme == "http" and is_loopback_host(parts.hostname or "")
    return is_local or (parts.scheme == "https" and bool(parts.hostname))
