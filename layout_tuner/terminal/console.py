"""Output of commands to a terminal: escaping, widths, and what Ctrl-C says.

Names, messages and logs come from other users, nodes and ranks. An escape sequence in them could
clear the screen, forge lines, or set the terminal's title. `escape_output` replaces the standard
streams of a command, so that all output (of click, logging and tracebacks) is escaped.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, Final, TextIO, cast

_LINE_BREAKS: Final = frozenset("\n\t")
_SPACES: Final = "Zs"
_WIDE: Final = frozenset("WF")
_WITHOUT_WIDTH: Final = frozenset(("Mn", "Me"))
_ELLIPSIS: Final = "…"
_DEFAULT_WIDTH: Final = 80
"""Columns of a terminal whose size is unknown."""


def escaped(text: str) -> str:
    r"""The text with escapes for characters that affect a terminal; line ends and tabs are kept.

    These are control characters (C0, DEL, C1), lone surrogates, and invisible or direction-changing
    characters. They are written as in JSON (\u001b), so that a JSON document stays valid and keeps
    its value. A backslash of the text is not doubled.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in _LINE_BREAKS else escaped_line(c) for c in text)


def escaped_line(text: str) -> str:
    """The same for a text on one line: line ends and tabs are escaped too."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or unicodedata.category(c) == _SPACES else _spelled(c) for c in text
    )


def _spelled(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


class EscapedStream:
    """A text stream that escapes what is written to it; everything else is passed to the stream."""

    def __init__(self, stream: TextIO) -> None:
        self.unescaped = stream
        """The stream itself, for our own control sequences."""

    def write(self, text: str) -> int:
        self.unescaped.write(escaped(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __iter__(self) -> Iterator[str]:
        return iter(self.unescaped)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)


def escape_output() -> None:
    """Escapes all output of this process from now on, including a final traceback."""
    sys.stdout = _escaping(sys.stdout)
    sys.stderr = _escaping(sys.stderr)


def _escaping(stream: TextIO) -> TextIO:
    if isinstance(stream, EscapedStream):
        return stream
    if isinstance(stream, io.TextIOWrapper):
        # Click bypasses a stream of ASCII and writes bytes. In other encodings, an unsupported
        # character would end the command with a traceback.
        is_ascii = codecs.lookup(stream.encoding).name == "ascii"
        stream.reconfigure(
            encoding="utf-8" if is_ascii else stream.encoding, errors="backslashreplace"
        )
    return cast("TextIO", EscapedStream(stream))


def write_bytes(content: bytes) -> None:
    """Writes bytes to the standard output as they are."""
    sys.stdout.flush()
    buffer: IO[bytes] = sys.stdout.buffer
    buffer.write(content)
    buffer.flush()


def terminal_width(stream: TextIO) -> int | None:
    """Columns of the terminal of a stream; None: the stream is a file or a pipe.

    It is the smaller of the variable COLUMNS and the terminal's size: the variable may be of
    another terminal, and a line that is longer than the terminal cannot be rewritten in place.
    """
    if not stream.isatty():
        return None
    widths = [_DEFAULT_WIDTH]
    with suppress(OSError, ValueError):
        widths = [os.get_terminal_size(stream.fileno()).columns or _DEFAULT_WIDTH]
    stated = os.environ.get("COLUMNS", "")
    if stated.isascii() and stated.isdigit() and int(stated):
        widths.append(int(stated))
    return min(widths)


def text_width(text: str) -> int:
    """Columns of a text in a terminal: two for a wide character, none for a combining one."""
    if text.isascii():
        return len(text)
    return sum(_character_width(character) for character in text)


def _character_width(character: str) -> int:
    if unicodedata.category(character) in _WITHOUT_WIDTH:
        return 0
    return 2 if unicodedata.east_asian_width(character) in _WIDE else 1


def clipped(text: str, width: int) -> str:
    """A line that is cut to a width; an ellipsis marks the cut."""
    if text_width(text) <= width:
        return text
    kept, used = "", 0
    for character in text:
        used += _character_width(character)
        if used > width - 1:
            break
        kept += character
    return f"{kept}{_ELLIPSIS}"[: max(width, 0)]


@contextmanager
def on_interrupt(sentence: str | Callable[[], str]) -> Iterator[None]:
    """Ctrl-C in the block ends the command with this message, which says what continues.

    `layout-tuner` prints the message of a KeyboardInterrupt and exits with code 130.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        said = sentence if isinstance(sentence, str) else sentence()
        raise KeyboardInterrupt(said) from interrupt
