"""The command line: imports only the subcommand that runs."""

from __future__ import annotations

from typing import Any, Final

import click

from layout_tuner.cli.command_table import COMMANDS, LazyGroup, missing_packages_of
from layout_tuner.documents.numbers import read_number, read_whole
from layout_tuner.terminal.console import escape_output

_types: Any = click.types  # they call Python's int and float, which read 1_0 as 10
_types.IntParamType._number_class = staticmethod(lambda value: read_whole(str(value)))
_types.FloatParamType._number_class = staticmethod(lambda value: read_number(str(value)))

INTERRUPTED: Final = 130
"""Exit code of a command that Ctrl-C ended: 128 and the number of the signal, as in shells."""


class CommandLine(LazyGroup):
    """The group of all commands."""

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


# color: click must not remove escape sequences from output to a file; our streams escape them.
@click.group(
    cls=CommandLine,
    sources=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "color": True},
)
@click.version_option(
    package_name="layout-tuner", prog_name="layout-tuner", message="%(prog)s %(version)s"
)
def main(**_: Any) -> None:
    """Find the fastest parallel layout for training a large model, by measuring.

    Start with `layout-tuner up`, then `layout-tuner campaign submit FILE`.
    """
