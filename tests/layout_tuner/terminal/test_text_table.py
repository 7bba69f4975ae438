"""Tables and live blocks are whole in every terminal; printed text does nothing to it but show."""

from __future__ import annotations

import fcntl
import io
import json
import os
import struct
import sys
import termios
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from layout_tuner.cli import live_output
from layout_tuner.cli.live_output import LiveBlock, sparkline, work_line
from layout_tuner.terminal.console import clipped, escape_output, escaped, escaped_line, text_width
from layout_tuner.terminal.plurals import counted
from layout_tuner.terminal.text_table import print_table, table_lines
from tests.kit.terminal import Screen, Terminal

COLUMNS = (">rank", ">trial", ">nodes", ">tp", ">pp", ">mbs", ">zero", "also", ">tokens/s", ">step")
ROWS = [
    (str(at + 1), str(20 + at), "1", str(1 << at), "2", "4", "1", also, f"{9000 - at:,}", "0.12 s")
    for at, also in enumerate(("", "recompute full", "vpp 2, sequence parallel", ""))
]


def lines(
    width: int | None,
    columns: tuple[str, ...] = COLUMNS,
    rows: list[tuple[str, ...]] = ROWS,
    keys: int = 2,
) -> list[str]:
    return list(table_lines(columns, rows, "a title", keys=keys, width=width))


@pytest.mark.parametrize("width", [10, 24, 50, 80, 240])
def test_in_every_width_each_value_is_whole_and_beside_what_identifies_its_row(width: int) -> None:
    shown = lines(width)
    text = "\n".join(shown)
    # The longest value that cannot be broken at a space is "rank 1, trial 20" in a block.
    assert width < 16 or all(text_width(line) <= width for line in shown), shown
    assert "…" not in text
    words = [line.replace(",", "").split() for line in shown]
    for rank, trial, *cells in ROWS:
        assert all(word in text for cell in cells for word in cell.split())
        heads = [[rank, trial], ["rank", rank, "trial", trial]]
        assert width < 16 or any(line[: len(head)] == head for head in heads for line in words)


def test_columns_that_are_equal_in_all_rows_are_folded_in_a_terminal_alone() -> None:
    shown = lines(120)
    assert shown[1] == "all: nodes 1, pp 2, mbs 4, zero 1, step 0.12 s"
    assert shown[2].split() == ["rank", "trial", "tp", "also", "tokens/s"]
    # Not what identifies a row, nor a single row's; empty columns are left out.
    same, names = [("a", "x", "y"), ("a", "x", "z")], ("name", "what", "of")
    assert lines(80, names, same, keys=1)[2].split() == ["name", "of"]
    assert lines(80, names, same[:1], keys=1)[1].split() == [*names]
    assert lines(80, names, [("a", "", "-"), ("b", "", "-")], keys=1)[1].split() == ["name"]
    # A file gets all columns, and a line a row.
    shown = lines(None, ("name", "what"), [("name " * 100, "x"), ("other", "x")], keys=1)
    assert len(shown) == 1 + 2 + 2
    assert shown[1].split() == ["name", "what"]
    assert lines(None)[1].split() == [column.removeprefix(">") for column in COLUMNS]


def test_words_are_wrapped_in_their_column_and_a_row_that_would_be_tall_becomes_a_block() -> None:
    names = ("name", "why", ">count")
    rows = [("trial 1", "the ranks ended before they said anything at all", "3"), ("b", "no", "4")]
    shown = lines(40, names, rows, keys=1)
    assert shown[1].split() == ["name", "why", "count"]
    at = shown[1].index("why")
    assert " ".join(line[at : at + 22].strip() for line in shown[3:-1]) == rows[0][1]

    shown = lines(40, names, [("a", "word " * 40, "3"), ("b", "no", "4")], keys=1)
    assert "name a" in shown
    assert len(shown) < 12

    name = "a name with spaces " * 6 + "end"
    shown = lines(40, ("name", ">count"), [(name, "1"), ("b", "2")], keys=1)
    assert f"name {name}" in shown, "a name that is longer than the terminal stays whole"


def test_characters_of_cells_are_counted_as_shown_and_forge_no_row() -> None:
    shown = lines(80, ("name", ">n"), [("日本", "1"), ("e\u0301a", "2"), ("abcd", "3")], keys=1)
    assert {text_width(line) for line in shown[1:]} == {7}
    shown = lines(80, ("name", ">n"), [("a\nb 9", "1"), ("\x1b[2J\r", "2")], keys=1)
    assert len(shown) == 1 + 2 + 2
    assert "a\\u000ab 9" in shown[3]
    assert "\\u001b[2J\\u000d" in shown[4]


def test_a_table_without_rows_has_its_headings() -> None:
    assert lines(80, rows=[])[1].split()[:2] == ["rank", "trial"]
    assert len(lines(None, rows=[])) == 3
    assert lines(10, ("name", "why not", "what else"), rows=[], keys=1)


def test_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("[/dev/shm full]", "[ecc] errors", "[/x]", "[bold]b", ":smile:"):
        print_table(["name", ">number"], [[text, "1"]], title=f"of {text}")
        assert capsys.readouterr().out.count(text) == 2


def test_a_count_of_one_is_singular() -> None:
    said = [counted(number, "trial") for number in (0, 1, 21)]
    assert said == ["0 trials", "1 trial", "21 trials"]


EVERY_KIND = [
    *map(chr, (*range(0x20), *range(0x7F, 0xA0))),
    *"\u061c\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069\ufeff\ud800\udfff\U000e0001",
]


def test_what_a_terminal_acts_on_is_spelled_out_and_other_text_stays_as_it_is() -> None:
    for character in EVERY_KIND:
        text = f"a{character}b"
        assert escaped_line(text).isprintable(), repr(text)
        if character in "\n\t":
            assert escaped(text) == text
        else:
            assert escaped(text).isprintable(), repr(text)
            assert json.loads(f'"{escaped(text)}"') == text
    text = "naïve 日本語 café ±4.7% … ─ \u00a0\u202f\u3000 \\x1b"
    assert escaped(text) == escaped_line(text) == text


def test_no_character_of_a_dangerous_category_passes() -> None:
    categories = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    passed = [
        code
        for code in (*range(0x20000), *range(0xE0000, 0xE0200))
        if escaped_line(chr(code)) == chr(code) and unicodedata.category(chr(code)) in categories
    ]
    assert passed == []


def test_streams_of_other_encodings_spell_out_what_they_lack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for encoding, printed in (
        ("ascii", "─".encode()),
        ("latin-1", b"\\u2500"),
        ("utf-8", "─".encode()),
    ):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
        escape_output()
        escape_output()
        sys.stdout.write("\x1b[2J─")
        sys.stdout.flush()
        assert written.getvalue() == b"\\u001b[2J" + printed


def test_a_line_is_cut_to_the_columns_that_it_takes() -> None:
    assert clipped("abcdef", 6) == "abcdef"
    assert clipped("abcdefg", 6) == "abcde…"
    assert text_width(clipped("日本語日本語", 6)) <= 6


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
