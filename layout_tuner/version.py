"""What is installed: the version of this package, and the optional packages that are missing."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec


@cache
def version() -> str:
    """The version; "unknown" if the package is not installed."""
    from importlib import metadata  # `--help` does without its modules

    try:
        return metadata.version("layout-tuner")
    except metadata.PackageNotFoundError:
        return "unknown"


def missing_packages(subject: str, packages: Iterable[str], *, extra: str) -> str | None:
    """A line about packages that a command, an option or a value lacks; None: nothing is missing.

    None of the packages is imported; `extra` is the extra of layout-tuner that installs them.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if not missing:
        return None
    *others, last = missing
    names = f"{', '.join(others)} and {last}" if others else last
    verb = "is" if len(missing) == 1 else "are"
    return (
        f"`{subject}` needs {names}, which {verb} not installed; "
        f"run: pip install 'layout-tuner[{extra}]'"
    )
