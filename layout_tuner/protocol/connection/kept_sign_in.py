"""Sign-ins of `login --device` in files of the configuration directory, one for each service."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layout_tuner.errors import ServiceUnansweredError, TokenFileUnusableError

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeptSignIn:
    """A short token, and the secret that replaces it. Threads and processes share the file.

    Methods raise TokenFileUnusableError where it cannot be read or written.
    """

    url: str
    file: Path

    def read(self) -> Document:
        """The service's `DeviceToken`, and `kept_at`, the time when it came."""
        try:
            with self.file.open("rb") as file:
                is_shared = os.fstat(file.fileno()).st_mode & 0o077
                kept: Document = json.load(file)
                kept["token"], kept["secret"], kept["lives_s"] + kept["kept_at"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise TokenFileUnusableError(
                f"the sign-in at {self.url} in {self.file} cannot be read ({error}): sign in again"
            ) from error
        if is_shared:
            raise TokenFileUnusableError(f"{self.file} can be read by others: chmod 600 it")
        return kept

    def write(self, issued: Document) -> None:
        """Replaces the file with a token that has just come, at once and for the user alone."""
        new = self.file.with_suffix(f".{os.getpid()}")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump({"url": self.url, "kept_at": time.time(), **issued}, file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.file)
        except OSError as error:
            raise TokenFileUnusableError(f"{self.file} cannot be written: {error}") from error

    def token(self, renew: Callable[[str], Document], refused: str = "") -> str:
        """The token, replaced in time; `refused` is one that the service does not accept.

        `renew` exchanges the secret for another document, or raises ServiceUnansweredError.
        """
        kept = self.read()
        age_s = time.time() - kept["kept_at"]  # below 0 after the clock was set back
        is_valid = kept["token"] != refused and 0 <= age_s < kept["lives_s"]
        if is_valid and age_s < 0.75 * kept["lives_s"]:
            return str(kept["token"])
        with self.file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before, kept = kept, self.read()
            if kept["token"] == before["token"]:  # no other process has replaced it
                self.write(kept)  # so that no secret is spent where the disk is full
                try:
                    kept = renew(kept["secret"])
                    self.write(kept)
                except ServiceUnansweredError as error:
                    if not (is_valid and error.may_be_down):
                        raise
        return str(kept["token"])


def kept_sign_in(url: str, environ: Mapping[str, str] = os.environ) -> KeptSignIn:
    """The place of the sign-in at a service, in the user's XDG configuration directory."""
    base = Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    scheme, _, rest = url.rstrip("/").partition("://")
    host, slash, path = rest.partition("/")
    address = f"{scheme.lower()}://{host.lower()}{slash}{path}"
    name = hashlib.sha256(address.encode()).hexdigest()[:32]
    return KeptSignIn(address, base / "layout-tuner" / "sign-ins" / f"{name}.json")
