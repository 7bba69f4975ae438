"""Which texts are numbers: by one grammar, whoever reads them."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.documents.duration import read_duration_s, read_walltime_s
from search_spaces.documents.numbers import (
    core_loader,
    core_value,
    read_number,
    read_printed,
    read_whole,
)
from search_spaces.errors import SearchSpaceError
from search_spaces.tables.fields import Fields
from search_spaces.trainers.log_patterns import LogPatterns

TEXTS = st.text(alphabet="0123456789+-.eE_,: \t\n\u0663\uff15xonaif", max_size=12)
"""Texts of what Python's own functions accept, and more."""


def is_number(text: str) -> bool:
    """Whether Python reads it, without what people do not write."""
    try:
        return set(text) <= set(string.digits + "+-.eE") and math.isfinite(float(text))
    except ValueError:
        return False


def read(reader: Callable[[str], Any], text: str) -> Any:
    try:
        return reader(text)
    except (ValueError, SearchSpaceError):
        return None


@given(TEXTS)
def test_what_is_outside_of_the_grammar_is_no_number_anywhere(text: str) -> None:
    expected = float(text) if is_number(text) else None
    assert read(read_number, text) == expected
    whole = int(text) if re.fullmatch("[-+]?[0-9]+", text) and text.isascii() else None
    assert read(read_whole, text) == whole
    stated = float(text) if is_number(text.strip()) else 0.0
    assert read(Fields({"figure": text}).figure, "figure") == (stated if stated > 0 else None)
    packed = text.replace(" ", "").replace("\t", "")
    if not is_number(text) and "," not in text and not is_number(packed):
        printed = read(read_printed, packed)
        assert printed is None or not math.isfinite(printed)


@given(TEXTS)
def test_a_plain_scalar_is_a_number_in_yaml_by_the_core_schema_alone(text: str) -> None:
    try:
        value = yaml.load(f"[{text}]", core_loader(yaml.SafeLoader))
    except yaml.YAMLError:
        return
    based = re.search(r"0o[0-7]+|0x[0-9a-fA-F]+|\.(inf|Inf|INF|nan|NaN|NAN)", text)
    is_told = based or any(is_number(part.strip()) for part in re.split("[,\n]", text))
    for each in value:
        if isinstance(each, (int, float)) and not isinstance(each, bool):
            assert is_told or not math.isfinite(each)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("010", 10), ("+5", 5), ("-0", 0), ("0o17", 15), ("0x1F", 31), ("1e3", 1000.0)),
        *((".5", 0.5), ("5.", 5.0), ("-1.5E-3", -0.0015), ("-.inf", -math.inf), (".INF", math.inf)),
        *(("true", True), ("FALSE", False), ("~", None), ("null", None), ("Null", None)),
        *((each, each) for each in ("1:0", "1:30", "1_0", "0b1", "0o8", "0x", "+0x1", "1,5", "1e")),
        *((each, each) for each in ("yes", "No", "on", "OFF", "y", "tRue", "nULL", "nan", "inf")),
        *((each, each) for each in ("2020-01-01", "=", "\u0663", "1.2.3", "+.nan", "--1")),
    ],
)  # fmt: skip
def test_a_plain_scalar_of_yaml_is_what_the_core_schema_says(text: str, value: object) -> None:
    loaded = yaml.load(f"a: {text}", core_loader(yaml.SafeLoader))["a"]
    for read in (loaded, core_value(text)):
        assert read == value
        assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("12,345.6", 12345.6), ("-1,234,567", -1234567.0), ("1,234e2", 123400.0), (" 7 ", 7.0)),
        *(("1234.5", 1234.5), ("1.0E+01", 10.0), ("-inf", -math.inf), ("Infinity", math.inf)),
        *(("nan", math.nan), ("-NaN", math.nan)),
    ],
)
def test_numbers_are_read_as_programs_print_them(text: str, value: float) -> None:
    assert repr(read_printed(text)) == repr(value)
    read = LogPatterns(step="loss (?P<loss>.*)").read(f"loss {text}")
    assert repr(read) == repr({"loss": value})


@pytest.mark.parametrize(
    "text",
    [
        "5,0",
        "5_0.0",
        "1,2345",
        "12,34,567",
        "1234,567",
        ",123",
        "1,234,",
        "\u0665",
        "5 0",
        "N/A",
        "",
    ],
)
def test_a_figure_of_a_log_that_is_no_number_is_refused_by_name(text: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"step_time_ms={text!r} in the program's log")
    ) as said:
        LogPatterns(step="took (?P<step_time_ms>.*) ms").read(f"took {text} ms")
    assert "took (?P<step_time_ms>.*) ms" in str(said.value)


def test_durations_have_ascii_digits() -> None:
    assert read_walltime_s("1:30", field="x") == 90.0
    for text in ("\u0661:30", "1_0:00"):
        with pytest.raises(SearchSpaceError):
            read_walltime_s(text, field="x")
    for text in ("1:30", "1_0s", "\u0661s", "1e3"):
        with pytest.raises(SearchSpaceError, match="is not a duration: give seconds, or a number"):
            read_duration_s(text, field="wall_time")
