from __future__ import annotations

import fcntl
import io
import os
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from search_spaces.terminal import live_output
from search_spaces.terminal.live_output import LiveBlock, sparkline, work_line
from tests.kit.terminal import Screen, Terminal


@contextmanager
def stream_of(terminal: Terminal) -> Iterator[io.TextIOWrapper]:
    with os.fdopen(os.dup(terminal.inner), "w", encoding="utf-8") as stream:
        yield stream


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.mark.parametrize("columns", [20, 300])
def test_a_block_is_redrawn_in_place_at_any_width(columns: int) -> None:
    with Terminal(columns) as terminal, stream_of(terminal) as stream:
        stream.write("before\n")
        block = LiveBlock(stream)
        block.show(["first " + "x" * 400, "second", "third"])
        block.show(["one", "two " + "y" * 400])
        block.show(["only " + "z" * 400, "2"])
    screen = Screen(columns).after(terminal.printed)
    assert screen[0] == "before"
    assert screen[1] == "only " + "z" * (columns - 7) + "…"
    assert screen[2:] == ["2"]


def test_a_cleared_block_leaves_nothing_and_the_next_fits_and_shows_its_escapes() -> None:
    with Terminal(60) as terminal, stream_of(terminal) as stream:
        block = LiveBlock(stream)
        block.show(["one", "two", "three"])
        block.clear()
        block.show(["name \x1b[2J\nof a campaign", *map(str, range(50))])
    shown = Screen(60).after(terminal.printed)
    assert shown == ["name \\u001b[2J\\u000aof a campaign", *map(str, range(22))]


def test_a_block_follows_a_terminal_that_gets_narrower() -> None:
    with Terminal(60) as terminal, stream_of(terminal) as stream:
        stream.write("before\n")
        block = LiveBlock(stream)
        block.show(["x" * 50, "y" * 50])
        fcntl.ioctl(terminal.inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
        terminal.wait_for("y" * 50)
        at = len(terminal.so_far())
        block.show(["new", "lines"])
    # Each of the two lines takes two rows now; the cursor is in the last of them.
    assert terminal.printed[at:].startswith("\r\x1b[3A")


def test_nothing_is_written_to_a_pipe() -> None:
    stream = io.StringIO()
    block = LiveBlock(stream)
    block.show(["line"])
    block.clear()
    with work_line(stream, ticks=True) as work:
        work.say("working")
    assert stream.getvalue() == ""


def test_a_work_line_shows_the_step_counts_its_seconds_and_goes_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_output, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(live_output, "COUNTED_AFTER_S", 0.0)
    with Terminal(60) as terminal, stream_of(terminal) as stream:
        with work_line(stream, ticks=True) as line:
            line.say("checking the copy")
            terminal.wait_for("checking the copy, 0 s")
            terminal.wait_for("checking the copy, 1 s")
        stream.write("done\n")
    assert Screen(60).after(terminal.printed) == ["done", ""]


def test_quick_work_shows_no_line() -> None:
    with Terminal(60) as terminal, stream_of(terminal) as stream, work_line(stream) as line:
        for number in range(100):
            line.say(f"{number} of 100")
    assert terminal.printed == ""


def test_a_sparkline_rises_from_the_lowest_to_the_highest_value_in_its_width() -> None:
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 20) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5, 5], 20) == "▅▅▅"
    assert sparkline([], 20) == sparkline([1.0, 2.0], 0) == ""
    assert sparkline([1, 2], 9, encoding="ascii") == "_#"
    for width in (1, 2, 7, 100):
        drawn = sparkline([float(value) for value in range(1000)], width)
        assert len(drawn) == width
        assert width == 1 or (drawn[0], drawn[-1]) == ("▁", "█")
        assert list(drawn) == sorted(drawn)
