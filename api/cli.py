"""The command line: finds the subcommands of all packages, and imports only the one that runs."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final

import click

from api.command_packages import missing_packages_of
from api.version import version
from search_spaces.documents.numbers import read_number, read_whole
from search_spaces.terminal.console import escape_output

_types: Any = click.types  # they call Python's int and float, which read 1_0 as 10
_types.IntParamType._number_class = staticmethod(lambda value: read_whole(str(value)))
_types.FloatParamType._number_class = staticmethod(lambda value: read_number(str(value)))

COMMANDS_GROUP: Final = "layout_tuner.commands"
"""Entry points of this group are subcommands."""

INTERRUPTED: Final = 130
"""Exit code of a command that Ctrl-C ended: 128 and the number of the signal, as in shells."""


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they are invoked."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Runs a command; all of its output is escaped."""
        escape_output()
        return super().main(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the subcommand; if Ctrl-C ends it, a message says what was interrupted."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            # The first line end closes the line on which the terminal shows ^C.
            said = str(interrupt) or f"{ctx.invoked_subcommand} was interrupted"
            click.echo(f"\n{said}", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from interrupt

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_entry_points()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _entry_points().get(cmd_name)
        if entry is None:
            return super().get_command(ctx, cmd_name)
        command = entry.load()
        if not isinstance(command, click.Command):
            raise click.ClickException(f"the command {cmd_name!r} is not one: {entry.value}")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuses a command that cannot be imported, or whose packages are not installed.

        With `--help`, only a command that cannot be imported is refused.
        """
        name, *rest = args
        missing = missing_packages_of(name)
        if missing is not None and not set(ctx.help_option_names) & set(rest):
            raise click.ClickException(missing)
        try:
            return super().resolve_command(ctx, args)
        except click.ClickException:
            raise
        except Exception as error:
            raise click.ClickException(
                missing or f"the command {name!r} cannot be loaded: {type(error).__name__}: {error}"
            ) from error

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
    """The first line of a command's docstring, read without importing its module.

    Importing all subcommands would take seconds (torch, ray), and a broken one would end the help.
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


def walk_commands(context: click.Context) -> Iterator[click.Context]:
    """The context of a command, then those of the commands below it, in the order of `--help`."""
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            command = context.command.get_command(context, name)
            assert command is not None
            settings = command.context_settings
            yield from walk_commands(
                click.Context(command, info_name=name, parent=context, **settings)
            )


# color: click must not remove escape sequences from output to a file; our streams escape them.
@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "color": True})
@click.version_option(version(), prog_name="layout-tuner", message="%(prog)s %(version)s")
def main(**_: Any) -> None:
    """Find the fastest parallel layout for training a large model, by measuring.

    Start with `layout-tuner up`, then `layout-tuner campaign submit FILE`.
    """


if __name__ == "__main__":
    sys.exit(main(prog_name="layout-tuner"))
