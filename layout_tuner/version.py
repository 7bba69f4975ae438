"""The version of the installed package."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def version() -> str:
    """The version; "unknown" if the package is not installed."""
    try:
        return metadata.version("layout-tuner")
    except metadata.PackageNotFoundError:
        return "unknown"
