"""The document of a campaign as fields of a form, and back."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from api.dashboard.campaign_actions import _number
from api.dashboard.campaign_form import FORM_FIELDS, REST, document_of, form_of, yaml_of
from api.errors import ApiError
from api.http.documents import read_yaml
from search_spaces.errors import SearchSpaceError

DOCUMENT: dict[str, Any] = {
    "name": "mine",
    "model": "tiny",
    "cluster": {"preset": "local-cpu", "num_nodes": 2},
    "objective": ["tokens_per_s", "memory_headroom"],
    "baseline": {"tp": 2, "pp": 1},
    "strategy": "random",
    "budget": {"trials": 5, "wall_time": "10m"},
    "space": {
        "global_batch_size": {"min": 4, "max": 8},
        "tp": [1, 2],
        "pp": {"from": 1, "to": 4, "times": 2},
        "recompute": ["none", "full"],
        "sequence_parallel": [False, True],
        "precision": "bf16",
    },
    "probe": {"iterations": 5},
    "seed": 3,
}


def test_a_document_becomes_a_form_and_the_same_document_again() -> None:
    form = form_of(DOCUMENT)
    assert form["model"] == "tiny"
    assert form["space.tp"] == "1, 2"
    assert form["space.pp"] == "{from: 1, to: 4, times: 2}"
    assert form["objective"] == "tokens_per_s, memory_headroom"
    assert yaml.safe_load(form[REST]) == {
        "cluster": {"preset": "local-cpu", "num_nodes": 2},
        "probe": {"iterations": 5},
        "seed": 3,
    }
    assert document_of(form) == DOCUMENT

    form = form_of({"budget": {"trials": None, "node_hours": None, "wall_time_s": 600.0}})
    assert form["budget.wall_time"] == "600.0"
    assert document_of(form) == {"budget": {"wall_time": 600.0}}

    document = {"budget": {"trials": 5, "euros": 3}, "space": {"tp": 1, "offload": 2}}
    form = form_of(document)
    assert yaml.safe_load(form[REST]) == {"budget": {"euros": 3}, "space": {"offload": 2}}
    assert document_of(form) == document

    assert document_of({"baseline": "tp: 2, dp: 4"}) == {"baseline": {"tp": 2, "dp": 4}}


def test_fields_that_are_no_yaml_are_named_together_and_one_in_two_places_is_refused() -> None:
    with pytest.raises(SearchSpaceError) as caught:
        document_of({"space.tp": "[1, 2", "budget.trials": "1], [2", "rest": "a: b: c"})
    assert {part.field for part in caught.value.parts} == {"space.tp", "budget.trials", "rest"}

    with pytest.raises(SearchSpaceError, match="'model' is here and in a field of its own"):
        document_of({"model": "tiny", "rest": "model: {preset: tiny}"})
    with pytest.raises(SearchSpaceError, match="'tp' is here and in a field of its own"):
        document_of({"space.tp": "1", "rest": "space: {tp: 2}"})


_SCALARS = st.one_of(
    st.integers(-5, 1 << 40),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(min_codepoint=32, max_codepoint=1000), max_size=12),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), inner),
    ),
    max_leaves=6,
)
_NAMES = st.one_of(
    st.sampled_from(sorted({field.split(".")[0] for field in FORM_FIELDS} - {REST})),
    st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
)


@settings(max_examples=20, deadline=None)
@given(st.dictionaries(_NAMES, _VALUES, max_size=6))
def test_no_document_is_changed_on_its_way_through_the_form(document: dict[str, Any]) -> None:
    try:
        expected = read_yaml(yaml_of(document).encode())
    except ApiError:
        return  # no field accepts such a text or number, in YAML neither
    given_back = document_of({name: text.strip() for name, text in form_of(document).items()})
    assert _plain(given_back) == _plain(expected)


def _plain(document: Any) -> Any:
    """A document without what stands for nothing: empty sections and texts, lists of one value."""
    if isinstance(document, dict):
        inner = {name: _plain(value) for name, value in document.items()}
        return {name: value for name, value in inner.items() if value not in ({}, "", None)}
    if isinstance(document, list):
        return _plain(document[0]) if len(document) == 1 else [_plain(each) for each in document]
    return document


def test_a_number_of_a_form_has_plain_digits() -> None:
    assert [_number(text) for text in ("10", "1.5", "1e3", "")] == [10, 1.5, 1000.0, None]
    for text in ("1_0", " 5", "nan", "\u0665"):
        assert _number(text) == text
