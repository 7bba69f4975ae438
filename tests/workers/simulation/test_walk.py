"""The walk through a step's events, against hand-made timelines and the trainer's tables."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest

from search_spaces.schedules import Backward, Forward, WeightGradients, pipeline_schedule
from workers.simulation.walk import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Schedule,
    Timeline,
    TracedSpan,
    held_passes,
    walk,
)

SCHEDULES = [
    Schedule(pp=1, vpp=1, num_microbatches=3),
    Schedule(pp=2, vpp=1, num_microbatches=1),
    Schedule(pp=4, vpp=1, num_microbatches=13),
    Schedule(pp=3, vpp=1, num_microbatches=5, name="gpipe"),
    Schedule(pp=4, vpp=1, num_microbatches=9, name="zero_bubble"),
    Schedule(pp=4, vpp=2, num_microbatches=8),
    Schedule(pp=3, vpp=4, num_microbatches=9),
    # Long ones, whose tables repeat a block.
    Schedule(pp=3, vpp=1, num_microbatches=40),
    Schedule(pp=1, vpp=1, num_microbatches=11),
    Schedule(pp=3, vpp=1, num_microbatches=40, name="zero_bubble"),
    Schedule(pp=3, vpp=2, num_microbatches=45),
    Schedule(pp=2, vpp=3, num_microbatches=60),
]


def walk_equal(
    schedule: Schedule,
    seconds: tuple[float, float, float] = (1.0, 2.0, 0.0),
    *,
    hop_s: float = 0.0,
    spans: list[TracedSpan] | None = None,
) -> Timeline:
    """Equal stages, whose passes together take these seconds a rank and micro-batch."""
    each = [[part / schedule.vpp] * schedule.num_stages for part in seconds]
    return walk(schedule, each, [hop_s] * schedule.pp, spans=spans)


def test_two_stages_and_two_microbatches_end_as_counted_by_hand() -> None:
    # Rank 0: F0 at 0, F1 at 1, waits from 2; rank 1: F0 at 1, B0 at 2..4, F1 at 4, B1 at 5..7.
    # Rank 0 goes on with B0 at 4..6 and B1 at 7..9.
    timeline = walk_equal(Schedule(pp=2, vpp=1, num_microbatches=2))
    assert timeline.rank_end_s == [9.0, 7.0]
    assert timeline.last_start_s == [7.0, 5.0]
    # Each message takes 0.5 s. Rank 1: F0 at 1.5..2.5, B0 to 4.5, whose transfer ends at 5, F1 to
    # 6, B1 to 8, sent by 8.5. Rank 0: B0 at 5..7, B1 at 8.5..10.5.
    timeline = walk_equal(Schedule(pp=2, vpp=1, num_microbatches=2), hop_s=0.5)
    assert timeline.rank_end_s == [10.5, 8.5]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_stages_idle_for_the_bubble_of_the_schedule(schedule: Schedule) -> None:
    """1F1B: (p - 1)(F + B)/v (arXiv:2104.04473); ZB-H1: (p - 1)(F + B - W) (arXiv:2401.10241)."""
    is_zero_bubble = schedule.name == "zero_bubble"
    seconds = (1.0, 1.0, 1.0) if is_zero_bubble else (1.0, 2.0, 0.0)
    timeline = walk_equal(schedule, seconds)
    bubble_s = max(timeline.rank_end_s) - 3.0 * schedule.num_microbatches
    wanted = (schedule.pp - 1) * (1.0 if is_zero_bubble else 3.0 / schedule.vpp)
    assert bubble_s == pytest.approx(wanted)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_runs_the_trainers_actions_in_order_and_one_at_a_time(schedule: Schedule) -> None:
    spans: list[TracedSpan] = []
    walk_equal(schedule, (1.0, 1.5, 0.5), hop_s=0.3, spans=spans)
    of_rank: dict[int, list[TracedSpan]] = defaultdict(list)
    for span in spans:
        if span.kind in (FORWARD, BACKWARD, WEIGHTS):
            of_rank[span.rank].append(span)
    kinds = {Forward: FORWARD, Backward: BACKWARD, WeightGradients: WEIGHTS}
    for rank in range(schedule.pp):
        actions = pipeline_schedule(
            rank,
            pp=schedule.pp,
            vpp=schedule.vpp,
            num_microbatches=schedule.num_microbatches,
            schedule=schedule.name,
        )
        wanted = [
            (kinds[type(each)], each.of.chunk * schedule.pp + rank, each.of.microbatch)
            for each in actions
            if isinstance(each, Forward | Backward | WeightGradients)
        ]
        assert [(s.kind, s.stage, s.microbatch) for s in of_rank[rank]] == wanted
        assert all(a.end_s <= b.start_s for a, b in pairwise(of_rank[rank]))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_pass_begins_before_its_message_has_come(schedule: Schedule) -> None:
    spans: list[TracedSpan] = []
    walk_equal(schedule, (1.0, 1.5, 0.5), hop_s=0.3, spans=spans)
    found = {(s.kind, s.stage, s.microbatch): s for s in spans if s.kind != WEIGHTS}
    last = schedule.num_stages - 1
    for (kind, stage, microbatch), span in found.items():
        before = stage - 1 if kind == FORWARD else stage + 1
        if kind in (FORWARD, BACKWARD) and 0 <= before <= last:
            assert span.start_s >= found[kind, before, microbatch].end_s + 0.3 - 1e-9


def test_the_slowest_stage_sets_the_pace() -> None:
    schedule = Schedule(pp=3, vpp=1, num_microbatches=20)
    timeline = walk(schedule, [[1.0, 1.5, 1.0], [2.0, 3.0, 2.0], [0.0] * 3], [0.0] * 3)
    # The slow rank begins at 1, has F0 and F1 done at 4 and waits for B0 until 5.5, is then busy to
    # the end with what is left of 20 times 4.5, and one backward pass follows on rank 0.
    assert max(timeline.rank_end_s) == pytest.approx(5.5 + (20 * 4.5 - 3) + 2)


@pytest.mark.parametrize("microbatches", [1, 3, 16, 1000])
def test_plain_1f1b_holds_as_many_microbatches_as_stages_follow(microbatches: int) -> None:
    schedule = Schedule(pp=4, vpp=1, num_microbatches=microbatches)
    assert held_passes(schedule) == tuple(((min(microbatches, 4 - r), 0),) for r in range(4))


def test_other_schedules_hold_what_their_papers_say() -> None:
    # arXiv:2205.05198, section 4.2.3: 1 + (p - 1) / (p v) times the whole pipeline's, on rank 0.
    interleaved = held_passes(Schedule(pp=4, vpp=2, num_microbatches=32))
    assert interleaved[0][0][0] / 2 == pytest.approx(4 * (1 + 3 / (4 * 2)))
    gpipe = held_passes(Schedule(pp=4, vpp=1, num_microbatches=9, name="gpipe"))
    assert gpipe == (((9, 0),),) * 4
    late = held_passes(Schedule(pp=4, vpp=1, num_microbatches=16, name="zero_bubble"))
    assert [max(sum(pair) for pair in pairs) for pairs in late] == [5, 5, 5, 5]
