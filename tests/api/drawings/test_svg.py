from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from api.plots.svg import join, tag
from tests.kit.page import Page


@given(st.text())
def test_whatever_is_written_is_read_as_text_and_nothing_else(written: str) -> None:
    page = Page(tag("p", written, title=written))
    assert [name for name, _attributes in page.elements] == ["p"]
    assert set(page.elements[0][1]) == {"title"}
    assert page.text == page.elements[0][1]["title"]
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
