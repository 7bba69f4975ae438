"""Whether two probes trained the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results_db.trials.loss_comparison import MAX_TOLERANCE, first_difference, loss_tolerance
from search_spaces.protocol.measurement import Iteration
from search_spaces.spec.layout import PRECISIONS, Precision


def iterations(losses: Sequence[float], *, skipped: Sequence[int] = ()) -> list[Iteration]:
    return [
        Iteration(
            index=index,
            kind="timed",
            step_time_s=1.0,
            loss=loss,
            grad_norm=None if index in skipped else 1.0,
        )
        for index, loss in enumerate(losses)
    ]


LOSSES = st.lists(st.floats(0, 1e4), min_size=1, max_size=20)


@given(losses=LOSSES, precision=st.sampled_from(PRECISIONS), data=st.data())
def test_losses_agree_just_as_far_as_the_precision_allows(
    losses: list[float], precision: Precision, data: st.DataObject
) -> None:
    allowed = [loss_tolerance(precision, i) * max(loss, 1.0) for i, loss in enumerate(losses)]
    shares = data.draw(st.lists(st.floats(-0.99, 0.99), min_size=len(losses), max_size=len(losses)))
    # A share of what is allowed, downwards as far as there is loss.
    moved = [
        max(loss + share * more, 0.0)
        for loss, share, more in zip(losses, shares, allowed, strict=True)
    ]
    own, other = iterations(losses), iterations(moved)
    assert first_difference(own, other, precision) is None
    place = data.draw(st.integers(0, len(losses) - 1))
    other[place] = replace(other[place], loss=losses[place] + 1.6 * allowed[place])
    found = first_difference(own, other, precision)
    assert found is not None
    assert (found.index, found.loss, found.other_loss) == (
        place,
        losses[place],
        other[place].loss,
    )


@given(one=LOSSES, other=LOSSES, precision=st.sampled_from(PRECISIONS))
def test_it_does_not_matter_which_of_the_two_is_asked(
    one: list[float], other: list[float], precision: Precision
) -> None:
    here = first_difference(iterations(one), iterations(other), precision)
    there = first_difference(iterations(other), iterations(one), precision)
    assert (here and here.index) == (there and there.index)


def test_fp32_is_held_to_more_than_bf16() -> None:
    own, other = iterations([6.9, 6.5]), iterations([6.9, 6.51])
    found = first_difference(own, other, "fp32")
    assert found is not None
    assert (found.index, found.loss, found.other_loss, found.tolerance) == (1, 6.5, 6.51, 1e-4)
    assert first_difference(own, other, "bf16") is None
    assert first_difference(own, other, "fp16") is None


def test_what_only_one_of_the_two_has_is_not_compared() -> None:
    assert first_difference(iterations([6.9]), iterations([6.9, 1.0]), "fp32") is None


@pytest.mark.parametrize(("both", "is_found"), [(True, True), (False, False)])
def test_after_a_step_that_only_one_skipped_nothing_is_compared(both: bool, is_found: bool) -> None:
    own = iterations([6.9, 6.5, 6.1], skipped=[0])
    other = iterations([6.9, 6.9, 6.5], skipped=[0] if both else [])
    assert (first_difference(own, other, "fp16") is not None) == is_found
    # The loss of the skipped step itself was computed before it.
    other[0] = replace(other[0], loss=9.0)
    assert first_difference(own, other, "fp16") is not None


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_tolerance_is_steady_at_first_then_grows_as_far_as_its_cap(
    precision: Precision,
) -> None:
    tolerances = [loss_tolerance(precision, index) for index in range(40)]
    assert len(set(tolerances[:4])) == 1
    assert tolerances[4] == 2 * tolerances[3]
    assert tolerances == sorted(tolerances)
    assert tolerances[-1] == MAX_TOLERANCE == loss_tolerance(precision, 10_000)
