from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.plot_data.plot_data import axis_range, hidden_words, left_out_words, round_ticks, safe

NEAR = [90.0, 95.0, 100.0, 105.0, 110.0]


def test_an_axis_leaves_out_values_that_would_flatten_the_others_except_the_winner() -> None:
    ends = axis_range([*NEAR, 5000.0])
    assert ends.hidden == [5000.0]
    assert ends.low < 90
    assert 110 < ends.high < 120
    ends = axis_range([*NEAR, 5000.0], show_all=True)
    assert ends.hidden == []
    assert ends.high > 5000
    ends = axis_range([*NEAR, -4000.0, 5000.0], always=[5000.0])
    assert ends.hidden == [-4000.0]
    assert ends.high > 5000


def test_hidden_and_left_out_values_are_told_with_their_number_and_range() -> None:
    assert hidden_words(axis_range(NEAR), "tokens_per_s") == []
    (sentence,) = hidden_words(axis_range([*NEAR, 5000.0]), "tokens_per_s")
    assert sentence == "One trial, with 5,000 tokens/s, lies beyond the axis."
    (sentence,) = hidden_words(axis_range([*NEAR, *NEAR, 5000.0, 7000.0]), "tokens_per_s")
    assert sentence == "2 trials, with 5,000 to 7,000 tokens/s, lie beyond the axis."
    assert left_out_words(0, "trials", "the best") == []
    (sentence,) = left_out_words(98_000, "layouts", "the best")
    assert sentence.startswith("98,000 layouts are left out: the plot has the best and an even sam")


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 70.0, [0, 10, 20, 30, 40, 50, 60, 70]),
        (0.0, 0.35, [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35]),
        (380.6, 1219.0, [400, 600, 800, 1000, 1200]),
        (-3.0, 3.0, [-3, -2, -1, 0, 1, 2, 3]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert round_ticks(low, high) == ticks


def test_names_from_outside_cannot_contain_markup_of_plots() -> None:
    assert safe("<a href='x'>n</a>\x1b[0m") == "&lt;a href='x'&gt;n&lt;/a&gt;\\u001b[0m"


@given(st.floats(min_value=-1e12, max_value=1e12), st.floats(min_value=1e-6, max_value=1e12))
def test_any_axis_has_ticks_within_it(low: float, length: float) -> None:
    ends = axis_range([low, low + length])
    ticks = round_ticks(ends.low, ends.high)
    assert 1 <= len(ticks) <= 9
    rounding = (ends.high - ends.low) * 1e-6 + abs(low) * 1e-9
    assert all(ends.low - rounding <= tick <= ends.high + rounding for tick in ticks)
