"""The version of the installed package."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def version() -> str:
    """The version, or "unknown" when the source tree runs without having been installed."""
    try:
        return metadata.version("layout-tuner")
    except metadata.PackageNotFoundError:
        return "unknown"
