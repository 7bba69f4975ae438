"""V-shaped schedules: valid on every rank, with the memory of arXiv:2405.15362."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout_tuner.search_spaces.layouts.schedules import (
    V_SLOTS,
    Schedule,
    Transfer,
    pipeline_schedule,
    stage_of,
)
from layout_tuner.search_spaces.layouts.timed_schedule import held_layers, timed_schedule

NAMES = tuple(V_SLOTS)
SIZES = {"pp": st.integers(2, 17), "m": st.integers(1, 40), "schedule": st.sampled_from(NAMES)}


@given(**SIZES)
def test_every_pass_runs_once_and_after_those_it_needs(pp: int, m: int, schedule: Schedule) -> None:
    # An order with a deadlock, or an unmet need, would not end.
    timed = timed_schedule(pp=pp, vpp=2, num_microbatches=m, backward_units=2.0, schedule=schedule)
    ends = {}
    for rank, passes in enumerate(timed.ranks):
        counts = Counter((each.kind, each.chunk, each.microbatch) for each in passes)
        assert set(counts.values()) == {1}
        assert len(counts) == 6 * m
        for each in passes:
            ends[each.kind, stage_of(each.chunk, rank, pp, schedule), each.microbatch] = each
    last = 2 * pp - 1
    for (kind, stage, microbatch), each in ends.items():
        if kind == "forward" and stage:
            assert each.start >= ends["forward", stage - 1, microbatch].end
        if kind == "backward":
            assert each.start >= ends["forward", stage, microbatch].end
            assert stage == last or each.start >= ends["backward", stage + 1, microbatch].end
        if kind == "weights":
            assert each.start >= ends["backward", stage, microbatch].end


@given(pp=SIZES["pp"], m=SIZES["m"])
def test_the_first_rank_has_both_ends_of_the_v(pp: int, m: int) -> None:
    for schedule in NAMES:
        stages = [[stage_of(chunk, rank, pp, schedule) for chunk in (0, 1)] for rank in range(pp)]
        assert stages[0] == [0, 2 * pp - 1]
        assert stages[-1] == [pp - 1, pp]
        assert sorted(each for pair in stages for each in pair) == list(range(2 * pp))
        actions = pipeline_schedule(0, pp=pp, vpp=2, num_microbatches=m, schedule=schedule)
        assert not any(isinstance(each, Transfer) for each in actions)


@pytest.mark.parametrize(
    ("schedule", "most"), [("zbv", 6 / 3), ("v_half", 3 / 3), ("v_min", 2 / 3)]
)
def test_a_rank_holds_the_passes_of_the_paper(schedule: Schedule, most: float) -> None:
    """Section 3: all of 1F1B's 2 p passes of a chunk, a half and a third, and up to two more."""
    for pp in range(2, 18):
        held = held_layers((1,) * 2 * pp, pp, 2, 6 * pp, schedule)
        for each in held:
            assert each.in_flight + 0.5 * each.late <= most * pp + 2
        assert max(each.in_flight for each in held) >= most * pp - 1


def test_bubbles_are_in_the_order_of_the_memory() -> None:
    """With equal passes: less than a third of 1F1B's, about 0.6 and about 0.65 of it."""
    for pp in (4, 8, 16):
        idle = []
        for schedule in NAMES:
            timed = timed_schedule(
                pp=pp, vpp=2, num_microbatches=4 * pp, backward_units=2.0, schedule=schedule
            )
            idle.append((timed.length - 24 * pp) / (6 * (pp - 1)))
        assert idle == sorted(idle)
        assert idle[0] < 1 / 3
        assert 0.5 < idle[1] < 0.65
        assert 0.55 < idle[2] < 0.75


def test_unequal_stages_take_and_hold_their_share() -> None:
    layers = (1, 3, 2, 2)
    timed = timed_schedule(
        pp=4, vpp=1, num_microbatches=8, backward_units=2.0, stage_units=(0.5, 1.5, 1.0, 1.0)
    )
    assert [each[0].end - each[0].start for each in timed.ranks] == [0.5, 1.5, 1.0, 1.0]
    # Stage 1 is busy for all micro-batches, after stage 0's first pass and before its last one.
    assert timed.length >= 8 * 1.5 * 3 + 0.5 + 0.5 * 2
    slowest = timed_schedule(
        pp=4, vpp=1, num_microbatches=8, backward_units=2.0, stage_units=(1.5,) * 4
    )
    assert timed.length < slowest.length
    held = held_layers(layers, 4, 1, 8, "1f1b")
    assert [each.in_flight for each in held] == [4, 9, 4, 2]
    # Interleaved: rank 0 has stages 0 and 2. At its fullest, rank 1 has three passes of stage 1.
    both = held_layers(layers, 2, 2, 8, "1f1b")
    assert [each.in_flight for each in both] == [1 * 3 + 2 * 2, 3 * 3]
