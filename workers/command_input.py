"""What subcommands share: reading what a user described, and ending with a sentence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final, NoReturn

import click

_REFUSED: Final = 2


def described(name: str) -> Any:
    """A preset's name, or what the JSON or YAML file of that name holds."""
    path = Path(name)
    if path.suffix not in (".json", ".yaml", ".yml"):
        return name
    import yaml

    try:
        return yaml.safe_load(path.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())  # of YAML over several lines
        refuse(f"{path} is not a readable JSON or YAML file: {said}")


def read_token(path: Path) -> str:
    """The service's token in a file; ends the command where there is none."""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"the token file can't be read: {error}")
    if not token:
        fail(f"the token file {path} is empty")
    if not is_token(token):
        fail(f"the token file {path} holds no token (one word of ASCII)")
    return token


def is_token(text: str) -> bool:
    """Whether it can stand in a request's header, into which nothing else fits."""
    return text.isascii() and text.isprintable() and " " not in text and bool(text)


def refuse(*sentences: str) -> NoReturn:
    """Ends the command with these sentences and exit code 2."""
    for sentence in sentences:
        click.echo(f"error: {sentence}", err=True)
    sys.exit(_REFUSED)


def fail(sentence: str) -> NoReturn:
    """Ends the command with one sentence and exit code 1."""
    click.echo(f"error: {sentence}", err=True)
    sys.exit(1)
