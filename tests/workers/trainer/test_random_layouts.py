"""The same loss under every layout: random legal runs, further from each other than pairs of knobs.

What is legal is what the search space's own rules say, so that a knob whose range is opened there,
which `test_parity.py` wants to see among `KNOBS`, is trained here.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.workers.trainer.cases import assert_same_training, make_layout, train
from tests.workers.trainer.knob_pairs import (
    KNOBS,
    RUNS,
    Values,
    is_legal,
    layout_of,
    num_ranks,
    settings_of,
    shape_of,
    values_of,
)

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

CHANGES = [(knob, value) for knob, values in KNOBS.items() for value in values]


@st.composite
def runs(draw: st.DrawFn) -> Values:
    """A run of the table after as many random changes as leave it legal on at most eight ranks."""
    values = values_of(draw(st.sampled_from(RUNS)))
    for knob, value in draw(st.lists(st.sampled_from(CHANGES), min_size=20, max_size=40)):
        changed = {**values, knob: value}
        if num_ranks(changed) <= 8 and is_legal(changed):
            values = changed
    return values


def assert_trains_as_one_process(values: Values) -> None:
    shape, optimizer, balanced = shape_of(values), settings_of(values), values["balanced"]
    found = train.__wrapped__(shape, layout_of(values), optimizer, 4, balanced_routing=balanced)
    alone = train(shape, make_layout(), optimizer, 4, balanced_routing=balanced)
    assert_same_training(found, alone)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(runs())
def test_random_layouts_train_as_one_process(values: Values) -> None:
    assert_trains_as_one_process(values)


@pytest.mark.nightly
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(runs())
def test_many_random_layouts_train_as_one_process(values: Values) -> None:
    assert_trains_as_one_process(values)
