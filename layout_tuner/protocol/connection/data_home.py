"""The data directory of this machine, and the names of files in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

PRIVATE_UMASK: Final = 0o077
"""Umask of processes that write tokens, outcomes and logs: only their user can read the files."""

DATA_DIR_VARIABLE: Final = "LAYOUT_TUNER_DATA_DIR"

TOKEN_FILE: Final = "token"  # noqa: S105 - the name of a file
"""In the data directory: the admin token of the service."""
WORKER_TOKEN_FILE: Final = "worker-token"  # noqa: S105 - the name of a file
"""In the data directory: the token of the workers on this machine."""


def default_data_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The data directory of the environment, or `layout-tuner` in the user's XDG data directory."""
    if chosen := environ.get(DATA_DIR_VARIABLE):
        return Path(chosen).expanduser()
    base = environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "layout-tuner"
