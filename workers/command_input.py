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
    except (OSError, ValueError, yaml.YAMLError) as error:
        refuse(f"{path} is not a readable JSON or YAML file: {error}")


def refuse(*sentences: str) -> NoReturn:
    """Ends the command with these sentences and exit code 2."""
    for sentence in sentences:
        click.echo(f"error: {sentence}", err=True)
    sys.exit(_REFUSED)


def fail(sentence: str) -> NoReturn:
    """Ends the command with one sentence and exit code 1."""
    click.echo(f"error: {sentence}", err=True)
    sys.exit(1)
