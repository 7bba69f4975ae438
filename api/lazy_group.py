"""A group of commands that imports only the one that is called."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, util
from pathlib import Path
from typing import Any

import click


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
    """Spares what is imported meanwhile from garbage collection, also from that at exit.

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
