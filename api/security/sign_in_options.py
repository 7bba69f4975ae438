"""How people sign in without a token: by a provider, or by the header of a proxy; and as what."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args
from urllib.parse import urlsplit

from layout_tuner.api.errors import ServiceStartError, SignInOwnerError
from layout_tuner.documents.hosts import is_loopback_host
from layout_tuner.errors import TokenFileUnusableError
from layout_tuner.protocol.connection.bearer_token import token_in
from layout_tuner.results_db.actor import TokenRole
from layout_tuner.results_db.errors import TokenInvalidError

_PersonRole = Literal["viewer", "submitter", "admin"]
_ROLES: Final = get_args(_PersonRole)
DefaultRole = Literal["none", "viewer", "submitter"]
MAX_GROUPS: Final = 200
"""Groups of a sign-in that are noted at most."""


def _option(default: Any, words: str) -> Any:
    return field(default=default, metadata={"help": words})


@dataclass(frozen=True, kw_only=True, slots=True)
class SignInOptions:
    """The provider, the proxy's headers, and the roles; each is an option of `serve` and `up`."""

    oidc_issuer: str = _option("", "Address of an OpenID Connect provider to sign in with.")
    oidc_client_id: str = _option("", "The client that the provider knows this service as.")
    oidc_client_secret_file: Path | None = _option(None, "File of its secret.")  # noqa: RUF009
    oidc_scopes: str = _option("openid profile email", "Scopes that the provider is asked for.")
    owner_claim: str = _option(
        "", "Claim that names the owner.  [default: preferred_username, else a verified email]"
    )
    groups_claim: str = _option("groups", "Claim that lists the owner's groups.")
    owner_header: str = _option("", "Header in which the proxy (--proxy) names the owner.")
    groups_header: str = _option("", "Header in which the proxy lists the owner's groups.")
    default_role: DefaultRole = _option(  # noqa: RUF009
        "viewer", "Role of owners whom no --group-role gives one; none: they may not sign in."
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
            return None if file is None else token_in(file)
        except TokenFileUnusableError as error:
            raise ServiceStartError(f"--oidc-client-secret-file: {error}") from error

    def refuse_unusable(self, *, is_behind_proxy: bool) -> None:
        """Raises ServiceStartError for options that do not fit together."""
        why = ""
        if bool(self.oidc_issuer) != bool(self.oidc_client_id):
            why = "--oidc-issuer and --oidc-client-id go together: give both"
        elif self.oidc_issuer and not is_private(self.oidc_issuer):
            why = (
                f"--oidc-issuer {self.oidc_issuer!r} is not an address with https://: over plain HTTP "
                "anybody on the way could sign in as anybody"
            )
        elif self.oidc_issuer and "openid" not in self.oidc_scopes.split():
            why = f"--oidc-scopes {self.oidc_scopes!r} lacks openid: add it"
        elif self.owner_header and not is_behind_proxy:
            why = "--owner-header takes a proxy that sets it in every request: give --behind-proxy too"
        elif self.groups_header and not self.owner_header:
            why = "--groups-header goes together with --owner-header: give both"
        for pair in self.group_role:
            group, _, role = pair.rpartition("=")
            if not group or role not in _ROLES:
                why = f"--group-role {pair!r} is not GROUP={'|'.join(_ROLES)}"
        if why:
            raise ServiceStartError(why)
        self.client_secret()

    def admitted(self, owner: str, groups: tuple[str, ...] | None, **others: str) -> Admission:
        """As what an owner signs in; groups that are None are not stated.

        Raises:
            SignInOwnerError: the name is not one of an owner, or has no role here.
        """
        from layout_tuner.results_db.access.tokens import is_name, refuse_taken_name

        try:
            refuse_taken_name(owner, "owner")
        except TokenInvalidError as error:
            raise SignInOwnerError(str(error)) from error
        if groups is None and self.group_role:
            raise SignInOwnerError(
                f"nothing states the groups of {owner!r}, which have the roles here: ask an admin to let "
                "the provider or the proxy send them"
            )
        pairs = [pair.rpartition("=") for pair in self.group_role]
        roles = [_ROLES.index(role) for group, _, role in pairs if group in (groups or ())]
        role = _ROLES[max(roles)] if roles else self.default_role
        if role == "none":
            raise SignInOwnerError(
                f"{owner!r} is in no group with a role here: ask an admin for one"
            )
        named = tuple(sorted(set(filter(is_name, groups or ()))))[:MAX_GROUPS]
        return Admission(
            owner=owner,
            role=cast("TokenRole", role),
            groups=None if groups is None else named,
            num_left_out=len(set(groups or ())) - len(named),
            **others,
        )


NO_SIGN_IN_OPTIONS: Final = SignInOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """As what an owner signs in, and who says so."""

    owner: str
    role: TokenRole
    groups: tuple[str, ...] | None
    """None: they are not stated, and memberships stay as they are."""
    num_left_out: int
    """Groups that are not noted: their names are not ones of groups here, or they are too many."""
    source: str
    """The issuer, or the header."""
    subject: str = ""
    id_token: str | None = None


def is_private(url: object) -> bool:
    """Whether nobody on the way can read what is sent to an address, or change it."""
    try:
        parts = urlsplit(str(url))
    except ValueError:
        return False
    is_local = parts.scheme == "http" and is_loopback_host(parts.hostname or "")
    return is_local or (parts.scheme == "https" and bool(parts.hostname))
