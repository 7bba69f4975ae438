"""The walk through a pipeline's events, against hand-made timelines, formulas and the trainer."""

from __future__ import annotations

import numpy as np
import pytest

from workers.simulation.pipeline import (
    Pass,
    Schedule,
    Timeline,
    event_order,
    most_in_flight,
    walk,
)


def walk_equal(
    schedule: Schedule, *, forward: float = 1.0, backward: float = 2.0, hop: float = 0.0
) -> Timeline:
    """Equal stages that together take `forward` and `backward` a rank and micro-batch."""
    shape = (schedule.num_stages, 1)
    return walk(
        schedule,
        forward_SN=np.full(shape, forward / schedule.vpp),
        backward_SN=np.full(shape, backward / schedule.vpp),
        hop_RN=np.full((schedule.pp, 1), hop),
    )


def test_two_stages_and_two_microbatches_end_as_counted_by_hand() -> None:
    # Rank 0: F0 at 0, F1 at 1, waits from 2; rank 1: F0 at 1, B0 at 2..4, F1 at 4, B1 at 5..7.
    # Rank 0 goes on with B0 at 4..6 and B1 at 7..9.
    timeline = walk_equal(Schedule(pp=2, vpp=1, num_microbatches=2))
    assert timeline.rank_end_s[:, 0].tolist() == [9.0, 7.0]
    assert timeline.last_backward_start_s[:, 0].tolist() == [7.0, 5.0]
    # Each hop takes 0.5 s. Rank 1: F0 at 1.5..2.5, B0 to 4.5, sent by 5, F1 to 6, B1 to 8, sent by
    # 8.5. Rank 0: B0 at 5..7, B1 at 8.5..10.5.
    timeline = walk_equal(Schedule(pp=2, vpp=1, num_microbatches=2), hop=0.5)
    assert timeline.rank_end_s[:, 0].tolist() == [10.5, 8.5]


@pytest.mark.parametrize(
    ("pp", "vpp", "microbatches"),
    [
        *((1, 1, 3), (2, 1, 2), (4, 1, 4), (4, 1, 13), (8, 1, 32)),
        *((2, 2, 4), (4, 2, 8), (4, 4, 12), (3, 2, 9)),
    ],
)
def test_equal_stages_idle_for_the_formulas_bubble(pp: int, vpp: int, microbatches: int) -> None:
    ideal = 3.0 * microbatches
    timeline = walk_equal(Schedule(pp=pp, vpp=vpp, num_microbatches=microbatches))
    bubble = (timeline.rank_end_s.max() - ideal) / ideal
    assert bubble == pytest.approx((pp - 1) / (vpp * microbatches), abs=1e-12)


def test_the_slowest_stage_sets_the_pace() -> None:
    schedule, slow = Schedule(pp=3, vpp=1, num_microbatches=20), np.array([[1.0], [1.5], [1.0]])
    timeline = walk(schedule, forward_SN=slow, backward_SN=2 * slow, hop_RN=np.zeros((3, 1)))
    # The slow rank begins at 1, has F0 and F1 done at 4 and waits for B0 until 5.5, is then busy to
    # the end with what is left of 20 times 4.5, and one backward pass follows on rank 0.
    assert timeline.rank_end_s.max() == pytest.approx(5.5 + (20 * 4.5 - 3) + 2)


@pytest.mark.parametrize("microbatches", [1, 3, 16])
def test_plain_1f1b_holds_as_many_microbatches_as_stages_follow(microbatches: int) -> None:
    schedule = Schedule(pp=4, vpp=1, num_microbatches=microbatches)
    held = [most_in_flight(schedule, rank) for rank in range(4)]
    assert held == [min(microbatches, 4 - rank) for rank in range(4)]


def test_interleaving_holds_more_by_the_factor_of_the_paper() -> None:
    # arXiv:2205.05198, section 4.2.3: 1 + (p - 1) / (p v) times the whole pipeline's, on rank 0.
    schedule = Schedule(pp=4, vpp=2, num_microbatches=32)
    assert most_in_flight(schedule, 0) / schedule.vpp == pytest.approx(4 * (1 + 3 / (4 * 2)))


def test_the_order_of_events_has_every_pass_once_and_no_input_late() -> None:
    schedule = Schedule(pp=3, vpp=2, num_microbatches=6)
    order = event_order(schedule)
    assert len(set(order)) == len(order) == 2 * schedule.num_stages * 6
    made: set[Pass] = set()
    for each in order:
        if each.is_forward and each.stage:
            assert each._replace(stage=each.stage - 1) in made
        made.add(each)


def test_layouts_walked_together_end_as_if_walked_alone() -> None:
    schedule, rng = Schedule(pp=3, vpp=1, num_microbatches=5), np.random.default_rng(1)
    forward, backward, hops = rng.random((3, 4)), rng.random((3, 4)), rng.random((3, 4))
    together = walk(schedule, forward_SN=forward, backward_SN=backward, hop_RN=hops)
    for n in range(4):
        column = slice(n, n + 1)
        alone = walk(
            schedule,
            forward_SN=forward[:, column],
            backward_SN=backward[:, column],
            hop_RN=hops[:, column],
        )
        assert alone.rank_end_s[:, 0].tolist() == together.rank_end_s[:, n].tolist()
