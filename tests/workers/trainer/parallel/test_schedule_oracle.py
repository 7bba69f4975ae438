"""Passes come in the order of torch's own schedules, which is slow to import: here alone."""

from __future__ import annotations

from typing import Any

import pytest

from search_spaces.schedules import Schedule, Transfer, VirtualMicrobatch, pipeline_schedule

_LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}


def ours(
    rank: int, pp: int, vpp: int, num_microbatches: int, schedule: Schedule = "1f1b"
) -> list[tuple[str, VirtualMicrobatch]]:
    actions = pipeline_schedule(
        rank, pp=pp, vpp=vpp, num_microbatches=num_microbatches, schedule=schedule
    )
    return [
        (type(action).__name__[0], action.of)
        for action in actions
        if not isinstance(action, Transfer)
    ]


def theirs(actions: list[Any], pp: int) -> list[tuple[str, VirtualMicrobatch]]:
    return [
        (
            _LETTERS[action.computation_type.name],
            VirtualMicrobatch(action.stage_index // pp, action.microbatch_index),
        )
        for action in actions
        if action is not None and action.computation_type.name in _LETTERS
    ]


@pytest.mark.parametrize(
    ("pp", "num_microbatches"), [(pp, m) for pp in range(2, 9) for m in range(pp, 20)]
)
def test_plain_passes_come_in_torchs_order(pp: int, num_microbatches: int) -> None:
    """torch numbers the last stage's forward passes from one: there kinds alone are compared.

    Its table is wrong where micro-batches are fewer than stages: it runs ones that are not there.
    """
    from torch.distributed.pipelining.schedules import Schedule1F1B

    oracle = object.__new__(Schedule1F1B)  # the table needs no stage, the constructor does
    oracle._num_stages, oracle._n_microbatches = pp, num_microbatches
    order = oracle._get_pipeline_order()
    for rank in range(pp):
        found, expected = ours(rank, pp, 1, num_microbatches), theirs(order[rank], 1)
        assert [kind for kind, _ in found] == [kind for kind, _ in expected]
        if rank < pp - 1:
            in_rank = [(kind, virtual._replace(chunk=0)) for kind, virtual in expected]
            assert found == in_rank


@pytest.mark.parametrize(
    ("schedule", "vpp"), [("1f1b", 2), ("1f1b", 3), ("1f1b", 4), ("zero_bubble", 1)]
)
@pytest.mark.parametrize("pp", range(2, 9))
@pytest.mark.parametrize("groups", [1, 2, 3, 5])
def test_passes_interleaved_and_without_bubbles_come_in_torchs_order(
    schedule: Schedule, vpp: int, pp: int, groups: int
) -> None:
    from torch.distributed.pipelining import schedules

    kinds = {"1f1b": "ScheduleInterleaved1F1B", "zero_bubble": "ScheduleInterleavedZeroBubble"}
    oracle = object.__new__(getattr(schedules, kinds[schedule]))
    oracle.pp_group_size, oracle.n_local_stages = pp, vpp
    oracle._n_microbatches = pp * groups
    oracle.number_of_rounds, oracle.microbatches_per_round = groups, pp
    for rank in range(pp):
        expected = theirs(oracle._calculate_single_rank_operations(rank), pp)
        assert ours(rank, pp, vpp, pp * groups, schedule) == expected
