"""What is written into drawings, and the bars of a step."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from api.plots.bars import keys, stacked, step_parts
from api.plots.svg import join, tag
from search_spaces.protocol.measurement import Breakdown
from tests.kit.page import Page


@given(st.text())
def test_whatever_is_written_is_read_as_text_and_nothing_else(written: str) -> None:
    page = Page(tag("p", written, title=written))
    assert page.elements == [("p", {"title": page.text})]
    shown = "".join(character for character in written if character.isprintable())
    assert all(character in page.text for character in shown)
    page.text.encode()  # half of a surrogate pair could not be sent


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("<script>alert('x')</script> & \"", "<script>alert('x')</script> & \""),
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\0b\x07", "a\\u0000b\\u0007"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\ud800", "\\ud800"),
        ("two\r\nlines\tand a tab", "two\nlines\tand a tab"),
        ("größer 更快", "größer 更快"),
    ],
)
def test_what_cannot_be_shown_is_spelled_out(written: str, read: str) -> None:
    assert Page(tag("p", written)).text == read


def test_markup_stays_and_all_else_is_escaped() -> None:
    assert join("<", None, Markup("<b>x</b>"), 3) == "&lt;<b>x</b>3"


def test_the_parts_of_a_step_keep_their_colours_and_add_up() -> None:
    def breakdown(unexplained_s: float) -> Breakdown:
        times = {"compute_s": 0.5, "tp_s": 0.2, "pp_s": 0.0, "dp_s": 0.1, "optimizer_s": 0.1}
        return Breakdown(**times, unexplained_s=unexplained_s)

    def width(svg: str) -> float:
        found = re.findall(r'<rect [^>]*width="([\d.]+)"[^>]*class="(?:part )?part\d"', svg)
        return sum(map(float, found))

    parts = step_parts(breakdown(0.1), 1.0)
    assert [(part.name, part.says, part.kind) for part in parts] == [
        ("compute", "50.0%", "part1"),
        ("tensor parallel", "20.0%", "part2"),
        ("data parallel", "10.0%", "part4"),
        ("optimizer", "10.0%", "part5"),
        ("unexplained", "10.0%", "part6"),
    ]
    bar = stacked(parts)
    assert width(bar) == pytest.approx(860.0, abs=0.1)
    assert 'class="hatching"' in bar
    assert "unexplained 10.0%" in Page(keys(parts)).text
    parts = step_parts(breakdown(-0.05), 0.85)
    assert parts[-1].says == "-5.9%"
    assert width(stacked(parts, whole=1.8)) == pytest.approx(860.0 * 0.9 / 1.8, abs=0.1)
