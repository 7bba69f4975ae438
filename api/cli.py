"""The command line: finds every room's subcommands, and imports only the one that is asked for."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final

import click

from api.collection import nothing_collected
from api.version import version

COMMANDS_GROUP: Final = "layout_tuner.commands"
"""Entry points of this group are subcommands."""


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they are invoked, and not before."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_entry_points()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _entry_points().get(cmd_name)
        if entry is None:
            return super().get_command(ctx, cmd_name)
        try:
            with nothing_collected():
                command = entry.load()
        except Exception as error:
            raise click.ClickException(
                f"the command {cmd_name!r} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(command, click.Command):
            raise click.ClickException(f"the command {cmd_name!r} is not one: {entry.value}")
        return command

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002 - the signature is click's
        formatter: click.HelpFormatter,
    ) -> None:
        """Lists the subcommands with their first sentences, read from their sources."""
        rows = [(name, short_help(entry.value)) for name, entry in sorted(_entry_points().items())]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _entry_points() -> Mapping[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=COMMANDS_GROUP)}


def short_help(entry: str) -> str:
    """The first line of a command's docstring, without importing its module.

    Importing every subcommand would cost seconds (torch, ray), and one that is broken would take the
    others' help with it.

    Args:
        entry: as an entry point writes it, "package.module:function".
    """
    module, _, function = entry.partition(":")
    try:
        found = util.find_spec(module)
        if found is None or found.origin is None:
            return ""
        tree = ast.parse(Path(found.origin).read_bytes())
    except (ImportError, OSError, SyntaxError, ValueError):
        return ""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version(), prog_name="layout-tuner", message="%(prog)s %(version)s")
def main(**_: Any) -> None:
    """Find the fastest parallel layout for training a large model, by measuring.

    Start with `layout-tuner up`, then `layout-tuner campaign submit FILE`.
    """


if __name__ == "__main__":
    sys.exit(main(prog_name="layout-tuner"))
