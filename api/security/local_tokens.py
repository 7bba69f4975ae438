"""Token files: the service makes those of its data directory, and commands read any."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from layout_tuner.api.errors import TokenFileInvalidError
from layout_tuner.errors import TokenFileUnusableError
from layout_tuner.protocol.connection.bearer_token import token_in
from layout_tuner.protocol.connection.service_address import TOKEN_FILE_VARIABLE


def load_or_make_token(path: Path) -> str:
    """The service's token; the first start makes the file, readable by its owner only.

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
        # Atomic: if two services start at once, one writes the file and the other reads it.
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
    """The token in a file; TokenFileInvalidError if the file is unreadable or holds none."""
    try:
        return token_in(path)
    except TokenFileUnusableError as error:
        hint = f"name another with --token-file or ${TOKEN_FILE_VARIABLE}"
        raise TokenFileInvalidError(f"{error}: {hint}") from error
