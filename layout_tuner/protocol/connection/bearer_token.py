"""Reads the bearer token of a service from a file."""

from __future__ import annotations

from pathlib import Path

from layout_tuner.documents.reading import why_unreadable
from layout_tuner.errors import TokenFileUnusableError


def token_in(path: Path) -> str:
    """The token in a file; TokenFileUnusableError if it cannot be read, or holds none."""
    try:
        token = path.read_bytes().decode("ascii").strip()
    except OSError as error:
        raise TokenFileUnusableError(
            f"the token file {path} cannot be read ({why_unreadable(error)})"
        ) from error
    except UnicodeDecodeError:
        token = ""
    # It becomes a header of requests, which must not contain other characters.
    if not token or not token.isprintable() or " " in token:
        raise TokenFileUnusableError(f"the token file {path} holds no token (one word of ASCII)")
    return token
