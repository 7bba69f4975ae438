"""Where this machine's data directory is, for rooms that know nothing of what lies in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

DATA_DIR_VARIABLE: Final = "LAYOUT_TUNER_DATA_DIR"


def default_data_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """`$LAYOUT_TUNER_DATA_DIR`, else `$XDG_DATA_HOME/layout-tuner`, else `~/.local/share/layout-tuner`."""
    if chosen := environ.get(DATA_DIR_VARIABLE):
        return Path(chosen).expanduser()
    base = environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "layout-tuner"
