"""Tables are whole in every terminal."""

from __future__ import annotations

import pytest

from search_spaces.terminal.console import text_width
from search_spaces.terminal.plurals import counted
from search_spaces.terminal.text_table import print_table, table_lines

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


@pytest.mark.parametrize("width", [10, 24, 40, 50, 60, 80, 120, 240])
def test_no_terminal_cuts_a_value_or_wraps_a_line(width: int) -> None:
    shown = lines(width)
    text = "\n".join(shown)
    # The longest value that cannot be broken at a space is "rank 1, trial 20" in a block.
    assert width < 16 or all(text_width(line) <= width for line in shown), shown
    for row in ROWS:
        for cell in row:
            assert all(word in text for word in cell.split())
    assert "…" not in text


@pytest.mark.parametrize("width", [24, 40, 60, 80, 240])
def test_every_row_has_its_identifying_values_together(width: int) -> None:
    words = [line.replace(",", "").split() for line in lines(width)]
    for rank, trial, *_ in ROWS:
        assert any(
            line[:2] == [rank, trial] or line[:4] == ["rank", rank, "trial", trial]
            for line in words
        )


def test_columns_that_are_equal_in_all_rows_are_folded_in_a_terminal() -> None:
    shown = lines(120)
    assert shown[1] == "all: nodes 1, pp 2, mbs 4, zero 1, step 0.12 s"
    assert shown[2].split() == ["rank", "trial", "tp", "also", "tokens/s"]


def test_what_identifies_a_row_is_not_folded_and_a_single_row_neither() -> None:
    same = [("a", "x", "y"), ("a", "x", "z")]
    assert lines(80, ("name", "what", "of"), same, keys=1)[2].split() == ["name", "of"]
    assert lines(80, ("name", "what", "of"), same[:1], keys=1)[1].split() == ["name", "what", "of"]


def test_a_column_that_is_empty_in_all_rows_is_left_out_in_a_terminal() -> None:
    shown = lines(80, ("name", "also", "why"), [("a", "", "-"), ("b", "", "-")], keys=1)
    assert [line.split() for line in shown[1:2]] == [["name"]]


def test_a_file_gets_all_columns_and_a_line_a_row() -> None:
    long = [("name " * 100, "x"), ("other", "x")]
    shown = lines(None, ("name", "what"), long, keys=1)
    assert len(shown) == 1 + 2 + 2
    assert shown[1].split() == ["name", "what"]
    assert lines(None)[1].split() == [column.removeprefix(">") for column in COLUMNS]


def test_words_are_wrapped_in_their_column_before_rows_become_blocks() -> None:
    rows = [("trial 1", "the ranks ended before they said anything at all", "3"), ("b", "no", "4")]
    shown = lines(40, ("name", "why", ">count"), rows, keys=1)
    assert shown[1].split() == ["name", "why", "count"]
    at = shown[1].index("why")
    column = [line[at : at + 22].strip() for line in shown[3:-1]]
    assert " ".join(column) == rows[0][1]


def test_a_row_that_would_be_tall_becomes_a_block() -> None:
    rows = [("a", "word " * 40, "3"), ("b", "no", "4")]
    shown = lines(40, ("name", "why", ">count"), rows, keys=1)
    assert "name a" in shown
    assert len(shown) < 12


def test_a_name_that_is_longer_than_the_terminal_stays_whole() -> None:
    name = "a name with spaces " * 6 + "end"
    shown = lines(40, ("name", ">count"), [(name, "1"), ("b", "2")], keys=1)
    assert f"name {name}" in shown


def test_wide_and_combining_characters_are_counted_as_a_terminal_shows_them() -> None:
    shown = lines(80, ("name", ">n"), [("日本", "1"), ("e\u0301a", "2"), ("abcd", "3")], keys=1)
    assert {text_width(line) for line in shown[1:]} == {7}


def test_line_ends_and_escapes_in_a_cell_forge_no_row() -> None:
    shown = lines(80, ("name", ">n"), [("a\nb 9", "1"), ("\x1b[2J\r", "2")], keys=1)
    assert len(shown) == 1 + 2 + 2
    assert "a\\u000ab 9" in shown[3]
    assert "\\u001b[2J\\u000d" in shown[4]


def test_a_table_without_rows_has_its_headings() -> None:
    assert lines(80, rows=[])[1].split()[:2] == ["rank", "trial"]
    assert len(lines(None, rows=[])) == 3
    assert lines(10, ("name", "why not", "what else"), rows=[], keys=1)


@pytest.mark.parametrize("text", ["[/dev/shm full]", "[ecc] errors", "[/x]", "[bold]b", ":smile:"])
def test_brackets_are_no_markup(capsys: pytest.CaptureFixture[str], text: str) -> None:
    print_table(["name", ">number"], [[text, "1"]], title=f"of {text}")
    said = capsys.readouterr().out
    assert said.count(text) == 2


@pytest.mark.parametrize(("number", "words"), [(0, "0 trials"), (1, "1 trial"), (21, "21 trials")])
def test_a_count_of_one_is_singular(number: int, words: str) -> None:
    assert counted(number, "trial") == words
