from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest

from search_spaces.spec.knobs import Knob
from search_spaces.spec.layout import DEGREES, KNOBS, Layout
from search_spaces.spec.layout_columns import LayoutColumns
from search_spaces.spec.space import SearchSpace
from search_spaces.tables.columns import COLUMNS, EXTRA_COLUMNS


def test_columns_and_search_spaces_have_the_knobs_of_a_layout() -> None:
    assert tuple(field.name for field in fields(LayoutColumns)) == tuple(KNOBS)
    assert set(KNOBS) < {field.name for field in fields(SearchSpace)}
    headings = [knob.heading for knob in KNOBS.values() if knob.heading]
    assert len(set(headings)) == len(headings)


@pytest.mark.parametrize("knob", KNOBS.values(), ids=lambda each: each.name)
def test_a_knob_has_its_default_its_codes_and_its_column(knob: Knob) -> None:
    assert knob.problem(knob.default) is None
    assert getattr(Layout(), knob.name) == knob.default
    for of_another_type in (None, 1.5, "other", [], True if knob.is_number else 1):
        assert knob.problem(of_another_type) is not None
    codes = [knob.code(choice) for choice in knob.choices]
    assert codes == list(range(len(knob.choices)))
    assert knob.is_count == (not codes)
    # A measurement table has a column for what does not follow from others.
    has_column = knob.name in (*COLUMNS, *EXTRA_COLUMNS)
    assert has_column == (knob.table_column != "derived")


def test_the_number_of_devices_is_the_product_of_the_degrees() -> None:
    layout = replace(Layout(), **{name: place for place, name in enumerate(DEGREES, start=2)})
    product = math.prod(getattr(layout, name) for name in DEGREES)
    assert layout.num_devices == LayoutColumns.of(layout).num_devices == product
