"""The start of a session: exchanges a one-time code or a token for it.

How long codes and sessions live is in `results_db/access/sign_ins.py`.
"""

from __future__ import annotations

import math
import re
from typing import Final

from starlette.concurrency import run_in_threadpool

from api.errors import SignInRefusedError, SignInRoleError, SignInTooOftenError
from api.security.authentication import Authentication
from results_db.access.tokens import hash_of_token
from results_db.actor import Actor
from results_db.errors import DatabaseUnavailableError
from results_db.store import Store

MAX_TARGET: Final = 2000

_LOCAL_PATH: Final = re.compile(r"/(?![/\\])[\x21\x23-\x5b\x5d-\x7e]*")
"""A path of this service: no host (//), and neither spaces, quotes, backslashes nor control
characters, which browsers drop or read as slashes."""

_OF_SIGN_IN: Final = re.compile(r"/sign-(?:in|out)(?:[/?#].*)?")


def local_target(given: str) -> str:
    """The path to go on to after the sign-in: as given if it is one of this service, else /."""
    is_fine = len(given) <= MAX_TARGET and _LOCAL_PATH.fullmatch(given)
    return given if is_fine and not _OF_SIGN_IN.fullmatch(given) else "/"


async def begin_session(
    store: Store,
    authentication: Authentication,
    secret: str,
    *,
    address: str,
    codes_only: bool = False,
) -> str:
    """Exchanges a one-time code, or a token, for a session; returns the session's secret.

    Wrong ones are counted by address. A token is refused if `codes_only`.

    Raises:
        SignInRefusedError: it is neither, or no longer valid.
        SignInRoleError: it is a worker's.
        SignInTooOftenError: the address has to wait.
        DatabaseUnavailableError: the database cannot be asked.
    """
    limit, hashed = authentication.guess_limit, hash_of_token(secret.encode())
    wait_s = limit.begin(address)
    if wait_s > 0:
        raise SignInTooOftenError(
            "too many wrong codes and tokens came from this address; try again in "
            f"{math.ceil(wait_s)} s",
            wait_s=wait_s,
        )
    try:
        session = await _exchanged(store, authentication, hashed, address, codes_only=codes_only)
    except (DatabaseUnavailableError, SignInRoleError):
        limit.was_no_guess(address)
        raise
    if session is None:
        raise SignInRefusedError(
            "this code or token does not sign in: it is wrong, has expired, was revoked, or is a "
            "code that was used before; `layout-tuner login` prints an address with a new code"
        )
    limit.was_no_guess(address)
    return session


async def _exchanged(
    store: Store, authentication: Authentication, hashed: str, address: str, *, codes_only: bool
) -> str | None:
    """The secret of a new session; None: this is neither a code nor a token that is valid."""
    of_code = await run_in_threadpool(store.sign_ins.token_of_code, hashed)
    token_hash = of_code or (None if codes_only else hashed)
    holder = None if token_hash is None else await authentication.book.find(token_hash)
    if token_hash is None or holder is None:
        return None
    if holder.role == "worker":
        raise SignInRoleError(
            f"the token {holder.name!r} is a worker's, and workers have no pages: sign in with the "
            "token of a viewer, a submitter or an admin"
        )
    own = store.by(
        Actor(name=holder.name, role=holder.role, token_id=holder.token_id, address=address[:64])
    )
    if of_code is not None:
        return await run_in_threadpool(own.sign_ins.exchange_code, hashed)
    return await run_in_threadpool(own.sign_ins.create_session, token_hash)
