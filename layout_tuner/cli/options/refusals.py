"""How commands end that refuse or fail: one line an error, and one rule for the exit code.

Exit code 2: what the user wrote is wrong, whether this machine or a service refuses it. 1: the
command failed for another reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, NoReturn

import click

from layout_tuner.errors import (
    MAX_PARTS,
    CertificateUnreadableError,
    LayoutTunerError,
    SearchSpaceError,
    ServiceNotFoundError,
    TokenFileUnusableError,
)

_OF_WHAT_WAS_WRITTEN: Final = (413, 422)
"""Statuses of a service that refuses the document or the query itself."""
_NO_CONNECTION: Final = (ServiceNotFoundError, CertificateUnreadableError, TokenFileUnusableError)


class Refusal(click.ClickException):
    """What the user wrote is refused; each sentence is a line of its own."""

    exit_code = 2

    def __init__(self, *sentences: str) -> None:
        super().__init__("\n".join(sentences))
        self.sentences = sentences

    def show(self, file: IO[Any] | None = None) -> None:
        for sentence in self.sentences:
            click.echo(f"Error: {sentence}", file=file, err=True)


def refuse(*sentences: str) -> NoReturn:
    """Ends the command with these sentences and exit code 2."""
    raise Refusal(*sentences)


def fail(sentence: str) -> NoReturn:
    """Ends the command with one sentence and exit code 1."""
    raise click.ClickException(sentence)


@contextmanager
def writing(path: Path, how: str = "written") -> Iterator[None]:
    """Ends the command where a file, or a folder, that the block writes to cannot be written."""
    try:
        yield
    except OSError as error:
        fail(f"{path} cannot be {how}: {error.strerror}")


@contextmanager
def refusals() -> Iterator[None]:
    """Errors of the product end the command; of a document's wrong fields each has a line."""
    try:
        yield
    except _NO_CONNECTION as error:
        fail(str(error))
    except SearchSpaceError as error:
        refuse(*_lines([(part.field, part.problem) for part in error.parts], str(error)))
    except LayoutTunerError as error:
        # A ServiceError has a problem. It is not imported: its module imports HTTP and pydantic.
        problem = getattr(error, "problem", None)
        if problem is None or problem.status not in _OF_WHAT_WAS_WRITTEN:
            fail(str(error))
        fields = [(each.field.removeprefix("body."), each.message) for each in problem.errors or []]
        refuse(
            *_lines([("" if name == "body" else name, said) for name, said in fields], str(error))
        )


def _lines(parts: list[tuple[str, str]], whole: str) -> list[str]:
    """A line for each wrong field; one error alone is said as a whole."""
    if len(parts) < 2:
        return [whole]
    lines = [f"{field}: {problem}" if field else problem for field, problem in parts[:MAX_PARTS]]
    return lines if len(parts) < MAX_PARTS else [*lines, "and more"]
