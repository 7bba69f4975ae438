"""The git revision of the running code, and versions of the software here. Needs no torch."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Final


def git_revision(root: Path) -> str:
    """The revision of the checkout at `root`; "unknown" where there is none."""
    if not (root / ".git").exists():
        return "unknown"
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() if found.returncode == 0 else "unknown"


GIT_REVISION: Final = git_revision(Path(__file__).resolve().parents[2])
"""The revision of the code that this process has loaded. It is read at import: the checkout of a
long-running process may change, and a rank that is forked later must not start a process while its
peers wait."""


def software_versions() -> dict[str, str]:
    """Versions of Python, of the libraries that probes depend on, and of this project.

    Ray may be missing, and is then left out: only one of the launchers needs it.
    """
    versions = {"python": platform.python_version()}
    for package in ("torch", "ray", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {**versions, "git_revision": GIT_REVISION}
