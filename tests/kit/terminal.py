"""A real pseudo-terminal, and what somebody who sits at it would see."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

import pytest

from layout_tuner.cli.main import main
from tests.kit.waiting import wait_until

_LAST = b"\x03the last that is written\x03"
"""What stands at the end of all that was written."""


class Terminal:
    """A terminal of a width; after the context has ended, `printed` holds all that was written."""

    def __init__(self, columns: int = 80) -> None:
        self.columns = columns
        self.printed = ""
        self._pieces: list[bytes] = []
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._outer, self.inner = os.openpty()
        fcntl.ioctl(self.inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, self.columns, 0, 0))
        modes = termios.tcgetattr(self.inner)
        modes[1] &= ~termios.OPOST  # a line end stays one byte
        termios.tcsetattr(self.inner, termios.TCSANOW, modes)
        self.path = os.ttyname(self.inner)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.wait()
        # What is still unread when the last writer closes a terminal may never be read.
        os.write(self.inner, _LAST)
        wait_until("all is read", lambda: _LAST in b"".join(self._pieces))
        os.close(self.inner)
        self._reader.join(30)
        assert not self._reader.is_alive(), "somebody still has the terminal open"
        os.close(self._outer)
        self.printed = b"".join(self._pieces).replace(_LAST, b"").decode()

    def so_far(self) -> str:
        """What was written until now."""
        return b"".join(self._pieces).decode(errors="replace")

    def wait_for(self, words: str) -> None:
        """Waits until something was written."""
        wait_until(f"{words!r} is written", lambda: words in self.so_far())

    def start(self, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        """Starts a command of the command line in a process of its own, at this terminal."""
        kept = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        process = subprocess.Popen(
            [sys.executable, "-m", "layout_tuner", *command],
            stdin=self.inner,
            stdout=self.inner,
            stderr=self.inner,
            env={**kept, **environment},
        )
        self._started.append(process)
        return process

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._outer, 65536)
            except OSError:  # the last one has closed it
                return
            if not piece:
                return
            self._pieces.append(piece)


def run_in_terminal(
    columns: int, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, str]:
    """Runs a command in this process at a terminal; its exit code, and what it wrote."""
    code: Any = None
    with Terminal(columns) as terminal, ExitStack() as opened, monkeypatch.context() as patched:
        stream = opened.enter_context(os.fdopen(os.dup(terminal.inner), "w", encoding="utf-8"))
        patched.delenv("COLUMNS", raising=False)
        patched.setattr(sys, "stdout", stream)
        patched.setattr(sys, "stderr", stream)
        try:
            main(list(arguments), prog_name="layout-tuner")
        except SystemExit as ended:
            code = ended.code
    return code, terminal.printed


class Screen:
    """What a terminal of a width shows, with the control sequences that commands write."""

    _SEQUENCE = re.compile(r"\x1b\[(\d*)([AKJ])")

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._rows = [""]
        self._row = self._at = 0

    def after(self, printed: str) -> list[str]:
        """The rows after what was written, without blanks at their ends."""
        place = 0
        while place < len(printed):
            if found := self._SEQUENCE.match(printed, place):
                self._act(found[2], int(found[1] or 1))
                place = found.end()
            else:
                self._write(printed[place])
                place += 1
        return [row.rstrip() for row in self._rows]

    def _act(self, action: str, number: int) -> None:
        if action == "A":
            assert number <= self._row, "the cursor would leave what the command has written"
            self._row -= number
        else:
            self._rows[self._row] = self._rows[self._row][: self._at]
            if action == "J":
                del self._rows[self._row + 1 :]

    def _write(self, character: str) -> None:
        assert character in "\r\n" or character.isprintable(), repr(character)
        if character == "\r":
            self._at = 0
        elif character == "\n":
            self._new_row()
        else:
            if self._at == self._columns:
                self._new_row()
            row = self._rows[self._row]
            self._rows[self._row] = (
                row[: self._at].ljust(self._at) + character + row[self._at + 1 :]
            )
            self._at += 1

    def _new_row(self) -> None:
        self._row, self._at = self._row + 1, 0
        if self._row == len(self._rows):
            self._rows.append("")
