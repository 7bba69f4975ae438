"""The knobs of a trial, as pages and the report list them."""

from __future__ import annotations

from layout_tuner.api.html.trial_facts import knob_pairs
from layout_tuner.search_spaces.layouts.layout import Layout


def test_knobs_of_every_layout_are_listed_at_their_defaults_too() -> None:
    pairs = dict(knob_pairs(Layout(), {}))
    assert pairs["tensor parallel, tp"] == "1"
    assert pairs["ZeRO stage"] == "0"
    assert pairs["sequence parallel"] == "no"
    assert pairs["global batch"] == "1"


def test_newer_knobs_are_listed_where_they_are_set() -> None:
    assert "tensor columns" not in dict(knob_pairs(Layout(), {}))
    assert dict(knob_pairs(Layout(tp=2, tp_columns=2), {}))["tensor columns"] == "2"
