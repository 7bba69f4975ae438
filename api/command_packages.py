"""Commands that need more than the base install, and the extra that each needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from search_spaces.terminal.missing_packages import missing_packages


class CommandNeed(NamedTuple):
    """The needs of a command beyond the base install."""

    extra: str
    """The extra of pyproject.toml that installs the packages."""
    packages: tuple[str, ...]
    """The import names of the packages."""


_SERVICE: Final = ("fastapi", "sqlalchemy", "uvicorn")
_DRIVER: Final = ("deephyper", "scipy", "sqlalchemy")
_WORKER: Final = ("torch", "ray")

NEEDS: Final[Mapping[str, CommandNeed]] = {
    "calibrate": CommandNeed("worker", ("torch",)),
    "db": CommandNeed("service", ("alembic", "sqlalchemy")),
    "driver": CommandNeed("driver", _DRIVER),
    "probe": CommandNeed("worker", ("torch",)),
    "replay": CommandNeed("driver", ("deephyper", "scipy")),
    "serve": CommandNeed("service", _SERVICE),
    "train": CommandNeed("worker", ("torch",)),
    "up": CommandNeed("all", tuple(dict.fromkeys((*_SERVICE, *_DRIVER, *_WORKER)))),
    "worker": CommandNeed("worker", _WORKER),
}
"""By command; all other commands run with the base install."""


def missing_packages_of(command: str) -> str | None:
    """A line about packages that a command lacks; None: nothing is missing."""
    need = NEEDS.get(command)
    if need is None:
        return None
    return missing_packages(f"layout-tuner {command}", need.packages, extra=need.extra)
