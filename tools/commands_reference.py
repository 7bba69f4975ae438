"""The reference of the command line: `python -m tools.commands_reference` prints it.

It lists every command with its arguments, options, defaults and environment variables.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from textwrap import fill, wrap
from typing import Any, Final

import click

from layout_tuner.cli.main import main
from layout_tuner.cli.service.service_connection import service_options

WIDTH: Final = 100

_SHORT: Final = 30
"""Longest list of choices, in characters, that stands behind the name of an option."""

_INTRODUCTION: Final = """\
# Commands

This page is generated from the commands: `make reference` writes it, and a test compares it.

`layout-tuner COMMAND --help` (or `-h`) prints the same text. `layout-tuner --version` prints the
version. Commands that print a table or a result also have `--json`.

| exit code | meaning |
|---|---|
| 0 | the command did what was asked |
| 1 | it failed, may not be done, or found what it looks for (such as `db check`) |
| 2 | what was written is wrong: an option, a file or its content, also where a service refuses it |
| 130 | it was interrupted by Ctrl-C |

Errors go to stderr, begin with `Error:`, and say what was wrong and what to do. A mistake in a file
is said in the same words by every command that reads the file.
"""

_CONNECTION: Final = """\
## Options of the connection

Commands that talk to a service have these options:
"""


def commands_text() -> str:
    """The reference as text. The same commands give the same text."""
    context = click.Context(main, info_name="layout-tuner", **main.context_settings)
    commands = [
        (child.command_path, child.command)
        for child in walk_commands(context)
        if child.command is not main and not child.command.hidden
    ]
    contents = [f"- [`{name}`](#{name.replace(' ', '-')})" for name, _ in commands]
    connection = _options(click.command("any")(service_options(lambda: None)))
    sections = ["\n".join(_section(name, command, connection)) for name, command in commands]
    shared = "\n".join([_CONNECTION, *connection])
    return "\n".join([_INTRODUCTION, *contents, "", shared, "", "\n\n".join(sections)]) + "\n"


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


def _section(name: str, command: click.Command, connection: list[str]) -> Iterator[str]:
    options = _options(command)
    yield f"## {name}"
    yield ""
    words = [name, *(["COMMAND"] if isinstance(command, click.Group) else [])]
    words += ["[OPTIONS]"] if options else []
    words += [_argument(each) for each in command.params if isinstance(each, click.Argument)]
    yield from ("```text", " ".join(words), "```")
    for paragraph in _paragraphs(command.help):
        yield ""
        yield from paragraph
    if options:
        yield ""
    is_client = set(connection) <= set(options)
    yield from (each for each in options if not (is_client and each in connection))
    if is_client:
        yield "- the [options of the connection](#options-of-the-connection)"


def _options(command: click.Command) -> list[str]:
    options = [each for each in command.params if isinstance(each, click.Option)]
    return [_item(_option(each)) for each in options if not each.hidden]


def _argument(argument: click.Argument) -> str:
    word = argument.metavar or (argument.name or "").upper() + "..." * (argument.nargs == -1)
    return word if argument.required else f"[{word}]"


def _option(option: click.Option) -> str:
    """An option in one line: its names and values, its help, and what else holds for it."""
    names = ", ".join(option.opts)
    if option.secondary_opts:
        names += f" / {', '.join(option.secondary_opts)}"
    described = option.to_info_dict()
    kind = described["type"]
    choices = [str(choice) for choice in kind.get("choices", ())]
    is_short = len("|".join(choices)) <= _SHORT
    if not (option.is_flag or option.count):
        word = "CHOICE" if choices else str(kind["name"]).upper().replace(" RANGE", "")
        names += f" {'|'.join(choices) if choices and is_short else option.metavar or word}"
    said = _escaped((option.help or "").strip())
    notes = [
        "Required." if option.required else "",
        "May be repeated." if option.multiple and "may be repeated" not in said else "",
        f"One of {', '.join(f'`{choice}`' for choice in choices)}." if not is_short else "",
        _range(kind),
        _default(option, described["default"]),
        f"Environment variable: `{option.envvar}`." if option.show_envvar else "",
    ]
    return " ".join([f"`{names}`:", said, *(note for note in notes if note)])


def _range(kind: dict[str, Any]) -> str:
    low, high = kind.get("min"), kind.get("max")
    words = []
    if low is not None:
        words.append(f"{'more than' if kind.get('min_open') else 'at least'} {low}")
    if high is not None:
        words.append(f"{'less than' if kind.get('max_open') else 'at most'} {high}")
    return f"Value: {', '.join(words)}." if words else ""


def _default(option: click.Option, default: object) -> str:
    says_it = "default" in (option.help or "")
    if says_it or default is None or default is False or default in ((), []):
        return ""
    if default is True and option.secondary_opts:
        return f"Default: `{option.opts[0]}`."
    return f"Default: `{default}`."


def _paragraphs(text: str | None) -> Iterator[list[str]]:
    r"""The wrapped paragraphs of a docstring; one that begins with \b keeps its lines."""
    cleaned = inspect.cleandoc(text or "").partition("\f")[0]
    for paragraph in re.split(r"\n\s*\n", cleaned):
        if paragraph.startswith("\b"):
            lines = paragraph.split("\n")[1:]
            yield ["```text", *lines, "```"]
        elif paragraph.strip():
            yield wrap(_escaped(" ".join(paragraph.split())), WIDTH, break_on_hyphens=False)


def _item(text: str) -> str:
    return fill(
        "- " + " ".join(text.split()),
        WIDTH,
        subsequent_indent="  ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _escaped(text: str) -> str:
    """Escapes `<` and `*` outside of code, where Markdown reads them as tags and emphasis."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([<*])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    sys.stdout.write(commands_text())
