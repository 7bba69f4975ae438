"""The commands: where each is defined, and the extra that it needs beyond the base install."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Final, NamedTuple

COMMANDS: Final[Mapping[str, str]] = {
    "up": "api.commands.up:up",
    "serve": "api.commands.serve:serve",
    "campaign": "api.commands.groups:campaign",
    "report": "api.commands.report:report",
    "model": "api.commands.groups:model",
    "cluster": "api.commands.groups:cluster",
    "trial": "api.commands.groups:trial",
    "leaderboard": "api.commands.leaderboard:leaderboard",
    "verify": "api.commands.verify:verify",
    "export": "api.commands.export:export",
    "db": "results_db.admin.commands:db",
    "token": "api.commands.groups:token",
    "login": "api.commands.login:login",
    "whoami": "api.commands.token:whoami",
    "audit": "api.commands.token:audit",
    "driver": "tuner.driver.commands:driver",
    "estimate": "tuner.estimate.commands:estimate",
    "plan": "tuner.estimate.plan_command:plan",
    "replay": "tuner.replay.commands:replay",
    "simulate": "tuner.replay.simulate_command:simulate",
    "worker": "workers.commands.commands:worker",
    "probe": "workers.commands.commands:probe",
    "train": "workers.commands.commands:train",
    "calibrate": "workers.calibrate.command:calibrate",
    "allocation": "workers.slurm.commands:allocation",
}
"""Module and function of each command. Each package owns its commands, and `api.cli` imports one
only when it is called."""


class CommandNeed(NamedTuple):
    """The needs of a command beyond the base install."""

    extra: str
    """The extra of pyproject.toml that installs the packages."""
    packages: tuple[str, ...]


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


def missing_packages(subject: str, packages: Iterable[str], *, extra: str) -> str | None:
    """A line about packages that a command or an option lacks; None: nothing is missing.

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
