"""Which software runs here."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path


def software_versions() -> dict[str, str]:
    """Versions of Python, of the libraries that probes depend on, and of this project."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "ray", "numpy"):
        versions[package] = metadata.version(package)
    return {**versions, "git_revision": git_revision()}


def git_revision() -> str:
    """The checkout's revision, or "unknown" for an installed package."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return "unknown"
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.strip()
