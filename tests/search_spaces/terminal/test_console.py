"""Whatever is printed does nothing to a terminal but show text."""

from __future__ import annotations

import io
import json
import sys
import unicodedata

import pytest

from search_spaces.terminal.console import clipped, escape_output, escaped, escaped_line, text_width

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
