"""Progress in a terminal: a block of lines that is redrawn in place, a line of work, a sparkline.

Nothing of it is written to a file or a pipe.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, TextIO

from layout_tuner.terminal.console import clipped, escaped_line, terminal_width, text_width

REDRAW_S: Final = 0.1
"""Seconds between two updates of a line of progress."""

SHOWN_AFTER_S: Final = 0.2
"""Seconds before a line of progress appears: quick work needs none."""

COUNTED_AFTER_S: Final = 2.0
"""Seconds after which the line says how long the present step has taken."""

_DEFAULT_ROWS: Final = 24
_BARS: Final = "▁▂▃▄▅▆▇█"
_PLAIN_BARS: Final = "_.-=*#"

_UP: Final = "\x1b[{}A"
_ERASE_LINE: Final = "\x1b[K"
_ERASE_BELOW: Final = "\x1b[J"


class LiveBlock:
    """Lines that are redrawn in place at the end of a terminal's output."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown: tuple[str, ...] = ()
        self._width = 0

    def show(self, lines: Sequence[str]) -> None:
        """Replaces the block; lines that are too long are cut, and those that are too many."""
        width = terminal_width(self._stream)
        if width is None:
            return
        # One column stays free: some terminals wrap when the last column is written. One row stays
        # free, since the cursor cannot move to rows that have scrolled out of the terminal.
        fitting = tuple(
            clipped(escaped_line(line), width - 1)
            for line in lines[: max(_rows(self._stream) - 1, 1)]
        )
        if fitting == self._shown and width == self._width:
            return
        self._write(self._to_start(width) + f"{_ERASE_LINE}\n".join(fitting) + _ERASE_BELOW)
        self._shown, self._width = fitting, width

    def clear(self) -> None:
        """Removes the block, so that other output can take its place."""
        width = terminal_width(self._stream)
        if width is not None and self._shown:
            self._write(self._to_start(width) + _ERASE_BELOW)
            self._shown = ()

    def _to_start(self, width: int) -> str:
        """Moves the cursor to the block's first column; lines wrap if the terminal got narrower."""
        rows = sum(max(-(-text_width(line) // width), 1) for line in self._shown)
        return "\r" + (_UP.format(rows - 1) if rows > 1 else "")

    def _write(self, text: str) -> None:
        stream = getattr(self._stream, "unescaped", self._stream)
        stream.write(text)
        stream.flush()


def _rows(stream: TextIO) -> int:
    with suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).lines or _DEFAULT_ROWS
    return _DEFAULT_ROWS


class WorkLine:
    """A line that says what a command is doing, and for how long."""

    def __init__(self, stream: TextIO) -> None:
        self._line = LiveBlock(stream)
        self._is_shown = terminal_width(stream) is not None
        self._text = ""
        self._since_s = self._due_s = time.monotonic()
        self._due_s += SHOWN_AFTER_S
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        """Says what is being done; shown at once, or with one of the next calls or ticks."""
        if not self._is_shown:
            return
        if text != self._text:
            self._text, self._since_s = text, time.monotonic()
        self.tick()

    def tick(self) -> None:
        """Shows the newest text, unless the line was updated just now."""
        now_s = time.monotonic()
        if self._text and now_s >= self._due_s:
            with self._lock:
                self._due_s = now_s + REDRAW_S
                taken_s = now_s - self._since_s
                counted = f", {taken_s:.0f} s" if taken_s >= COUNTED_AFTER_S else ""
                self._line.show([f"{self._text}{counted}"])

    def clear(self) -> None:
        """Removes the line."""
        with self._lock:
            self._line.clear()


@contextmanager
def work_line(stream: TextIO, *, ticks: bool = False) -> Iterator[WorkLine]:
    """A line of progress for the time of the block.

    Nothing is written unless the stream is a terminal. With `ticks` a thread updates it during long
    steps; not for commands that fork.
    """
    line = WorkLine(stream)
    over = threading.Event()
    ticking = None
    if ticks and terminal_width(stream) is not None:

        def tick() -> None:
            while not over.wait(REDRAW_S):
                line.tick()

        ticking = threading.Thread(target=tick, name="progress", daemon=True)
        ticking.start()
    try:
        yield line
    finally:
        over.set()
        if ticking is not None:
            ticking.join()
        line.clear()


def sparkline(values: Sequence[float], width: int, *, encoding: str | None = "utf-8") -> str:
    """The values as bars of one row, the smallest as the lowest bar.

    Of more than `width` values it shows evenly spaced ones with the first and the last. Where the
    terminal's encoding has no bars, plain characters replace them.
    """
    if not values or width < 1:
        return ""
    bars = _BARS
    try:
        bars.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        bars = _PLAIN_BARS
    if len(values) > width:
        step = (len(values) - 1) / max(width - 1, 1)
        values = [values[len(values) - 1 - round(at * step)] for at in range(width)][::-1]
    low, high = min(values), max(values)
    if low == high:
        return bars[len(bars) // 2] * len(values)
    top = len(bars) - 1
    return "".join(bars[round((value - low) / (high - low) * top)] for value in values)
