"""The commands: where each is defined, how it is imported when called, and the extra it needs."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from layout_tuner.version import missing_packages

COMMANDS: Final[Mapping[str, str]] = {
    "up": "layout_tuner.cli.processes.up:up",
    "serve": "layout_tuner.cli.processes.serve:serve",
    "campaign": "layout_tuner.cli.command_table:campaign",
    "report": "layout_tuner.cli.service.report:report",
    "model": "layout_tuner.cli.command_table:model",
    "cluster": "layout_tuner.cli.command_table:cluster",
    "trainer": "layout_tuner.cli.command_table:trainer",
    "trial": "layout_tuner.cli.command_table:trial",
    "leaderboard": "layout_tuner.cli.service.leaderboard:leaderboard",
    "verify": "layout_tuner.cli.service.verify:verify",
    "export": "layout_tuner.cli.service.export:export",
    "db": "layout_tuner.cli.processes.database:db",
    "token": "layout_tuner.cli.command_table:token",
    "owner": "layout_tuner.cli.command_table:owner",
    "group": "layout_tuner.cli.command_table:group",
    "webhook": "layout_tuner.cli.command_table:webhook",
    "login": "layout_tuner.cli.service.login:login",
    "logout": "layout_tuner.cli.service.login:logout",
    "whoami": "layout_tuner.cli.service.token:whoami",
    "audit": "layout_tuner.cli.service.token:audit",
    "usage": "layout_tuner.cli.service.usage:usage",
    "shares": "layout_tuner.cli.service.shares:shares",
    "quota": "layout_tuner.cli.command_table:quota",
    "driver": "layout_tuner.cli.processes.driver:driver",
    "estimate": "layout_tuner.cli.predictions.estimate:estimate",
    "plan": "layout_tuner.cli.predictions.plan:plan",
    "replay": "layout_tuner.cli.predictions.replay:replay",
    "scenario": "layout_tuner.cli.predictions.scenario:scenario",
    "worker": "layout_tuner.cli.processes.worker:worker",
    "probe": "layout_tuner.cli.processes.worker:probe",
    "train": "layout_tuner.cli.processes.worker:train",
    "calibrate": "layout_tuner.cli.predictions.calibrate:calibrate",
    "allocation": "layout_tuner.cli.processes.allocation:allocation",
}
"""Module and function of each command. Each package owns its commands, and `cli.main` imports one
only when it is called."""


class CommandNeed(NamedTuple):
    """The needs of a command beyond the base install."""

    extra: str
    """The extra of pyproject.toml that installs the packages."""
    packages: tuple[str, ...]


_SERVICE: Final = ("fastapi", "sqlalchemy", "uvicorn")
_DRIVER: Final = ("optuna", "scipy", "sqlalchemy")

NEEDS: Final[Mapping[str, CommandNeed]] = {
    "calibrate": CommandNeed("worker", ("torch",)),
    "db": CommandNeed("service", ("alembic", "sqlalchemy")),
    "driver": CommandNeed("driver", _DRIVER),
    "probe": CommandNeed("worker", ("torch",)),
    "replay": CommandNeed("driver", ("deephyper", "scipy")),
    "serve": CommandNeed("service", _SERVICE),
    "train": CommandNeed("worker", ("torch",)),
    "up": CommandNeed("all", tuple(dict.fromkeys((*_SERVICE, *_DRIVER, "torch")))),
    "worker": CommandNeed("worker", ("torch",)),
}
"""By command; all other commands run with the base install. What only a launcher, a strategy or a
format needs is refused where it is chosen."""


def missing_packages_of(command: str) -> str | None:
    """A line about packages that a command lacks; None: nothing is missing."""
    need = NEEDS.get(command)
    if need is None:
        return None
    return missing_packages(f"layout-tuner {command}", need.packages, extra=need.extra)


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they are called.

    `sources`: module and function of each subcommand, as "package.module:function".
    """

    def __init__(
        self, *arguments: Any, sources: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.sources = dict(sources or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.sources})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        source = self.sources.get(cmd_name)
        if source is None:
            return super().get_command(ctx, cmd_name)
        module, _, function = source.partition(":")
        with imports_kept():
            command = getattr(import_module(module), function)
        if not isinstance(command, click.Command):
            raise click.ClickException(f"the command {cmd_name!r} is not one: {source}")
        return command

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002 - the signature is click's
        formatter: click.HelpFormatter,
    ) -> None:
        """Lists the subcommands with their first sentences, read from their sources."""
        rows = [(name, short_help(source)) for name, source in sorted(self.sources.items())]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@contextmanager
def imports_kept() -> Iterator[None]:
    """Freezes the objects that the imports create, so that the garbage collector skips them.

    Modules live as long as the process. Collections during the imports of a command, and the one at
    its end, would look at all of their objects several times, for a sixth of the command's time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def short_help(source: str) -> str:
    """The first line of a command's docstring, read without importing its module.

    Importing all subcommands would take seconds (torch, ray), and a broken one would end the help.

    `source` is where the command is defined, as "package.module:function".
    """
    module, _, function = source.partition(":")
    try:
        found = find_spec(module)
        if found is None or found.origin is None:
            return ""
        tree = ast.parse(Path(found.origin).read_bytes())
    except (ImportError, OSError, SyntaxError, ValueError):
        return ""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


_CAMPAIGN: Final = {
    "campaign": ("analysis", "cancel", "list_campaigns", "pause", "resume", "show", "table"),
    "campaign_changes": ("clone", "delete", "import_table", "submit", "update"),
    "watching": ("watch",),
}
_MODEL: Final = ("delete_model", "list_models", "put_model", "show_model")
_CLUSTER: Final = ("delete_cluster", "list_clusters", "put_cluster", "show_cluster")
_TRAINER: Final = ("list_trainers", "show_trainer")
_TRIAL: Final = ("cancel", "list_trials", "log", "repeat", "requeue", "show")
_TOKEN: Final = ("create", "list_tokens", "revoke")
_OWNER: Final = ("list_owners", "set_owner")
_SIGN_OUT: Final = {"sign-out": "layout_tuner.cli.service.owners:sign_out"}
_GROUP: Final = ("delete", "list_groups", "set_group")
_QUOTA: Final = ("list_quotas", "remove_quota", "set_quota")
_WEBHOOK: Final = ("add", "list_webhooks", "remove", "test")


def _sources(functions: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """By command; the first word of a function's name is that of its command."""
    return {
        function.partition("_")[0]: f"layout_tuner.cli.service.{module}:{function}"
        for module, names in functions.items()
        for function in names
    }


_FROM: Final = {"from": "layout_tuner.cli.predictions.campaign_from:campaign_from"}
"""Of the commands of campaigns, the one that needs no service."""


@click.group(cls=LazyGroup, sources={**_sources(_CAMPAIGN), **_FROM})
def campaign() -> None:
    """Submit, follow and steer campaigns."""


@click.group(cls=LazyGroup, sources=_sources({"models_and_clusters": _MODEL}))
def model() -> None:
    """List, show, put and delete models that campaign files name."""


@click.group(cls=LazyGroup, sources=_sources({"models_and_clusters": _CLUSTER}))
def cluster() -> None:
    """List, show, put and delete clusters that campaign files name."""


@click.group(cls=LazyGroup, sources=_sources({"trainers": _TRAINER}))
def trainer() -> None:
    """List trainers, and show the job knobs that campaigns can search."""


@click.group(cls=LazyGroup, sources=_sources({"trial": _TRIAL}))
def trial() -> None:
    """List, read, repeat and cancel trials."""


@click.group(cls=LazyGroup, sources=_sources({"token": _TOKEN}))
def token() -> None:
    """Make, list and revoke the tokens of people and workers."""


@click.group(cls=LazyGroup, sources={**_sources({"owners": _OWNER}), **_SIGN_OUT})
def owner() -> None:
    """List, set and sign out owners, to whom campaigns belong."""


@click.group(cls=LazyGroup, sources=_sources({"owners": _GROUP}))
def group() -> None:
    """List, set and delete groups of owners."""


@click.group(cls=LazyGroup, sources=_sources({"shares": _QUOTA}))
def quota() -> None:
    """List, set and remove quotas of owners and groups."""


@click.group(cls=LazyGroup, sources=_sources({"webhook": _WEBHOOK}))
def webhook() -> None:
    """List, add, test and remove the addresses that get word of events."""
