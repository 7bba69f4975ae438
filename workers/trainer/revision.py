"""Which revision of this project runs."""

from __future__ import annotations

import subprocess
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
"""Of the code that this process has loaded: read with it, since a checkout moves on under a process
that lives long, and since a rank that is forked later shall start nothing while its peers wait."""
