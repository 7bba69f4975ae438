"""Which software runs here."""

from __future__ import annotations

import platform
from importlib import metadata

from workers.trainer.revision import GIT_REVISION


def software_versions() -> dict[str, str]:
    """Versions of Python, of the libraries that probes depend on, and of this project."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "ray", "numpy"):
        versions[package] = metadata.version(package)
    return {**versions, "git_revision": GIT_REVISION}
