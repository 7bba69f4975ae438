"""The file of the bearer token: made once, kept for its owner alone, read by service and clients."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from api.errors import TokenFileInvalidError


def load_or_make_token(path: Path) -> str:
    """The service's token; the first start makes it, in a file that only its owner can read.

    Raises:
        TokenFileInvalidError: the file holds no token, or others can read it.
    """
    if path.exists():
        return _load_token(path)
    token = f"lt_{secrets.token_urlsafe(32)}"
    written = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{token}\n")
            file.flush()
            os.fsync(file.fileno())
        # Whole or not at all: another service that starts in the same moment reads this one, or wins.
        os.link(written, path)
    except FileExistsError:
        return _load_token(path)
    except OSError as error:
        raise TokenFileInvalidError(
            f"the token file {path} cannot be made: {error.strerror}"
        ) from error
    finally:
        written.unlink(missing_ok=True)
    return token


def _load_token(path: Path) -> str:
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise TokenFileInvalidError(
            f"the token file {path} can be read by others (mode {mode:o}): chmod 600 it, or "
            "delete it for a new token"
        )
    try:
        return read_token(path)
    except TokenFileInvalidError as error:
        raise TokenFileInvalidError(f"{error}, or delete it for a new token") from error


def read_token(path: Path) -> str:
    """The token in a file.

    Raises:
        TokenFileInvalidError: it cannot be read, or what is in it is no token.
    """
    try:
        token = path.read_bytes().decode("ascii").strip()
    except OSError as error:
        raise TokenFileInvalidError(
            f"the token file {path} cannot be read ({error.strerror}): name another with "
            "--token-file"
        ) from error
    except UnicodeDecodeError:
        token = ""
    # It travels in a header, where nothing else may stand.
    if not token or not token.isprintable() or " " in token:
        raise TokenFileInvalidError(
            f"the token file {path} holds no token (one word of ASCII): name another with "
            "--token-file"
        )
    return token
