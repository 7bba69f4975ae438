"""Settings of a job: keys, documents, and layouts that have them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout_tuner.errors import LayoutInvalidError
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True)
WORDS = st.from_regex(r"[A-Za-z][A-Za-z0-9_+-]{0,12}", fullmatch=True).filter(
    lambda word: word not in ("true", "false")
)
VALUES = st.booleans() | st.integers(0, 1 << 31) | WORDS
SETTINGS = st.dictionaries(NAMES, VALUES, max_size=6)


@given(SETTINGS)
def test_key_and_document_have_the_settings_and_no_others(settings: dict[str, Any]) -> None:
    layout = Layout(tp=2, num_microbatches=8, job=JobSettings(settings))
    again = Layout.of_key(layout.key)
    assert again == layout
    assert again.job.to_mapping() == settings
    assert {name: type(value) for name, value in again.job.items()} == {
        name: type(value) for name, value in settings.items()
    }
    assert Layout.from_mapping(layout.to_mapping()) == layout
    assert pickle.loads(pickle.dumps(layout)) == copy.deepcopy(layout) == layout
    assert hash(again) == hash(layout)


def test_a_layout_without_settings_has_the_key_and_document_that_it_always_had() -> None:
    layout = Layout(tp=2, num_microbatches=8)
    assert layout.key == "n1-tp2-pp1-dp1-vpp1-mbs1-mb8-z0-rc_none-sp0-fp32"
    assert "job" not in layout.to_mapping(every_knob=True)
    with_job = Layout(tp=2, num_microbatches=8, job=JobSettings({"compile": True, "bucket": 4}))
    assert with_job.key == f"{layout.key}~bucket.4~compile.true"
    assert with_job.without_job == layout != with_job
    assert with_job.job.words == "bucket 4, compile"


def test_equal_settings_are_of_equal_types() -> None:
    assert JobSettings({"a": 1}) != JobSettings({"a": True})
    assert JobSettings({"b": 1, "a": 2}) == JobSettings({"a": 2, "b": 1})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"a": 1.5}, "job.a"),
        ({"a": -1}, "job.a"),
        ({"a": "two words"}, "job.a"),
        ({"a": "true"}, "job.a"),
        ({"a": None}, "job.a"),
        ({"a": "12"}, "job.a"),
        ({"A": 1}, "small letters"),
        ({"a~b": 1}, "small letters"),
        ({"x" * 41 + str(at): "y" * 40 for at in range(9)}, "small letters"),
        ({"x" * 36 + str(at): "y" * 40 for at in range(9)}, "characters"),
        ({f"x{at}": 1 for at in range(17)}, "more than 16"),
        ([1], "mapping"),
    ],
)
def test_what_no_knob_can_have_is_refused_by_name(settings: Any, words: str) -> None:
    with pytest.raises(LayoutInvalidError, match=words):
        Layout.from_mapping({"num_microbatches": 1, "job": settings})


@pytest.mark.parametrize("part", ["~", "~a", "~a.", "~a.1~", "~b.1~a.2", "~a.01", "~a.1~a.2", "x"])
def test_a_part_of_a_key_that_no_settings_have_is_refused(part: str) -> None:
    with pytest.raises(LayoutInvalidError):
        Layout.of_key(Layout().key + part)


def test_columns_keep_the_settings_of_each_layout() -> None:
    jobs = [JobSettings(), JobSettings({"a": 1}), JobSettings({"b": True}), JobSettings({"a": 1})]
    layouts = [Layout(tp=1 << at, job=job) for at, job in enumerate(jobs)]
    columns = LayoutColumns.of_each(layouts)
    assert [columns.jobs[at] for at in columns.job] == jobs
    both = LayoutColumns.joined([columns.rows(slice(2, 4)), LayoutColumns.of_each(layouts[:2])])
    assert [both.jobs[at] for at in both.job] == jobs[2:] + jobs[:2]
    one = LayoutColumns.of(layouts[1]).flattened()
    assert [one.jobs[at] for at in one.job] == [jobs[1]]
