"""The message of a command whose packages are not installed."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec


def missing_packages(subject: str, packages: Iterable[str], *, extra: str) -> str | None:
    """A line about packages that a command or an option lacks; None: nothing is missing.

    Args:
        subject: the command or option, as the user typed it.
        packages: import names; none is imported.
        extra: the extra of layout-tuner that installs them.
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
