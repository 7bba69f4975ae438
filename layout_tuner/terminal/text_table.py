"""Tables of text for all commands, which fit every terminal.

In a file or a pipe a table has all of its columns in full width. In a terminal, columns that are
equal in all rows become one line above the table. If the rest is too wide, the gaps between columns
shrink, then columns of words are wrapped, and finally each row is written as a block of lines. No
value is cut.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Final

from layout_tuner.terminal.console import escaped_line, terminal_width, text_width

_GAPS: Final = (2, 1)
"""Spaces between columns, in order of preference."""
_TALLEST: Final = 3
"""Most lines of a row with wrapped columns; beyond it, blocks are easier to read."""
_NARROWEST: Final = 8
"""Smallest width of a wrapped column."""
_BLOCK_INDENT: Final = "    "
_CONTINUED: Final = "  "
_RIGHT: Final = ">"


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    *,
    keys: int = 1,
    indent: str = "",
) -> None:
    """Prints a table to the standard output, to the width of its terminal.

    Args:
        columns: their headings; one that begins with ">" is right-aligned and never wrapped.
        rows: the texts of their cells.
        title: a line above it.
        keys: how many of the first columns identify a row; they are never folded or wrapped.
        indent: the beginning of every line.
    """
    width = terminal_width(sys.stdout)
    for line in table_lines(columns, rows, title, keys=keys, indent=indent, width=width):
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def table_lines(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    *,
    keys: int = 1,
    indent: str = "",
    width: int | None = None,
) -> Iterator[str]:
    """The lines of `print_table` for a terminal of this width; None: for a file."""
    headings = [escaped_line(column) for column in columns]
    cells = [[escaped_line(cell) for cell in row] for row in rows]
    if width is None:
        if title:
            yield f"{indent}{escaped_line(title)}"
        body = _in_columns(headings, cells, _widths(headings, cells), _GAPS[0])
    else:
        left = width - text_width(indent)
        if title:
            yield from (
                f"{indent}{line}" for line in _lines_of([escaped_line(title)], left, broken=True)
            )
        headings, cells, same = folded(headings, cells, keys=keys)
        if same:
            yield from (
                f"{indent}{line}"
                for line in _lines_of([f"all: {same[0]}", *same[1:]], left, broken=True)
            )
        body = _fitted(headings, cells, keys, left)
    yield from (f"{indent}{line}".rstrip() for line in body)


def folded(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, keys: int = 0
) -> tuple[list[str], list[list[str]], list[str]]:
    """Headings and rows without columns that are equal in all rows, and texts of these columns.

    With one row nothing is folded. A column that is empty in all rows has no text.
    """
    kept, same = [], []
    for place, heading in enumerate(headings):
        values = {row[place] for row in rows}
        if place < keys or len(rows) < 2 or len(values) > 1:
            kept.append(place)
        elif (value := values.pop()) not in ("", "-"):
            same.append(f"{heading.removeprefix(_RIGHT)} {value}")
    return [headings[place] for place in kept], [[row[p] for p in kept] for row in rows], same


def _fitted(
    headings: Sequence[str], rows: Sequence[Sequence[str]], keys: int, width: int
) -> Iterator[str]:
    """The table in the first form that fits."""
    natural = _widths(headings, rows)
    for gap in _GAPS:
        if _total(natural, gap) <= width:
            return _in_columns(headings, rows, natural, gap)
    for gap in _GAPS:
        wrapped = _wrapped_widths(headings, rows, natural, keys, width, gap)
        if wrapped is not None and _tallest(rows, wrapped) <= _TALLEST:
            return _in_columns(headings, rows, wrapped, gap)
    return _in_blocks(headings, rows, keys, width)


def _widths(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [
        max(text_width(heading.removeprefix(_RIGHT)), *(text_width(row[at]) for row in rows), 0)
        for at, heading in enumerate(headings)
    ]


def _total(widths: Sequence[int], gap: int) -> int:
    return sum(widths) + gap * (len(widths) - 1)


def _wrapped_widths(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    natural: Sequence[int],
    keys: int,
    width: int,
    gap: int,
) -> list[int] | None:
    """Widths at which the table with wrapped columns fits; None: it does not fit."""
    widths = list(natural)
    least = {
        at: min(natural[at], max(_NARROWEST, _longest_word(heading, (row[at] for row in rows))))
        for at, heading in enumerate(headings)
        if at >= keys and not heading.startswith(_RIGHT)
    }
    while (excess := _total(widths, gap) - width) > 0:
        widest = max(least, key=lambda at: widths[at] - least[at], default=None)
        if widest is None or widths[widest] == least[widest]:
            return None
        widths[widest] -= min(excess, max(1, (widths[widest] - least[widest]) // 2))
    return widths


def _tallest(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> int:
    heights = (
        len(_filled(cell.split(" "), width))
        for row in rows
        for cell, width in zip(row, widths, strict=True)
    )
    return max(heights, default=0)


def _longest_word(heading: str, cells: Iterator[str]) -> int:
    return max(text_width(word) for text in (heading, *cells) for word in text.split(" "))


def _in_columns(
    headings: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int], gap: int
) -> Iterator[str]:
    yield from _row([heading.removeprefix(_RIGHT) for heading in headings], headings, widths, gap)
    yield "─" * _total(widths, gap)
    for row in rows:
        yield from _row(row, headings, widths, gap)


def _row(
    cells: Sequence[str], headings: Sequence[str], widths: Sequence[int], gap: int
) -> Iterator[str]:
    """A row's line, or its lines where cells are wrapped."""
    filled = [
        _filled(cell.split(" "), width) if text_width(cell) > width else [cell]
        for cell, width in zip(cells, widths, strict=True)
    ]
    for at in range(max(map(len, filled), default=0)):
        line = []
        for part, heading, width in zip(filled, headings, widths, strict=True):
            text = part[at] if at < len(part) else ""
            space = " " * (width - text_width(text))
            line.append(f"{space}{text}" if heading.startswith(_RIGHT) else f"{text}{space}")
        yield (" " * gap).join(line).rstrip()


def _in_blocks(
    headings: Sequence[str], rows: Sequence[Sequence[str]], keys: int, width: int
) -> Iterator[str]:
    """Each row as several lines: its key columns, and below them all columns with a value."""
    names = [heading.removeprefix(_RIGHT) for heading in headings]
    inner = width - len(_BLOCK_INDENT)
    for row in rows:
        values = [f"{name} {cell}" for name, cell in zip(names, row, strict=True)]
        yield from _lines_of(values[:keys], width)
        rest = [each for each, cell in zip(values[keys:], row[keys:], strict=True) if cell]
        yield from (f"{_BLOCK_INDENT}{line}" for line in _lines_of(rest, inner, broken=True))


def _lines_of(values: Sequence[str], width: int, *, broken: bool = False) -> list[str]:
    """Several values in lines of at most a width, broken between two of them."""
    ended = [*(f"{each}," for each in values[:-1]), *values[-1:]]
    room = width - len(_CONTINUED)
    pieces: list[str] = []
    for each in ended:
        pieces += each.split(" ") if broken and text_width(each) > room else [each]
    return _filled(pieces, width, indent=_CONTINUED)


def _filled(pieces: Sequence[str], width: int, *, indent: str = "") -> list[str]:
    """Lines of at most a width; a piece that is longer stands whole on a line of its own."""
    lines: list[str] = []
    line = ""
    for piece in pieces:
        start = indent if lines else ""
        if line and text_width(f"{start}{line} {piece}") > width:
            lines.append(f"{start}{line}")
            line = piece
        else:
            line = f"{line} {piece}" if line else piece
    return [*lines, f"{indent if lines else ''}{line}"] if line else lines
