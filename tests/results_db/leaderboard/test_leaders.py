"""The leader after each end of a run, against a ranking of all layouts at each end."""

from __future__ import annotations

from random import Random
from statistics import median
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout_tuner.results_db.leaderboard.rank_layouts import Leaderboard, MeasuredLayout, leaders

PRODUCT = 480.0
"""Of a value and its step time. All medians divide it, so that equal ones are equal in floats."""

# Few different step times and values, so that many are equal.
TIMES = st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=1, max_size=3)


@given(
    layouts=st.lists(st.tuples(TIMES, st.booleans()), min_size=1, max_size=8),
    random=st.randoms(use_true_random=False),
)
def test_the_leaders_are_the_best_of_all_layouts_at_each_end(
    layouts: list[tuple[list[float], bool]], random: Random
) -> None:
    ends = list(range(sum(len(times) for times, _ in layouts)))
    random.shuffle(ends)
    numbers = iter(ends)
    board = []
    for times, shortened in layouts:
        seqs = [next(numbers) for _ in times]
        runs = [
            SimpleNamespace(id=seq, ended_seq=seq, step_time_s=time, shortened=shortened)
            for seq, time in zip(seqs, times, strict=True)
        ]
        step_time_s = median(times)
        board.append(MeasuredLayout(runs, step_time_s, PRODUCT / step_time_s))
    board.sort(key=lambda each: (-each.value, each.trial_id))
    found = leaders(Leaderboard(layouts=board, front={}, num_constrained=0))

    expected: list[tuple[int, MeasuredLayout, float]] = []
    for seq in range(len(ends)):
        ranked = []
        for each in board:
            ended = [run.step_time_s for run in each.runs if run.ended_seq <= seq]
            if ended and not each.shortened:
                ranked.append((-each.value * each.step_time_s / median(ended), each.trial_id, each))
        if ranked:
            value, _, best = min(ranked, key=lambda each: each[:2])
            if not expected or (best, -value) != expected[-1][1:]:
                expected.append((seq, best, -value))
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    assert [each.value for each in found] == pytest.approx([each[2] for each in expected])
