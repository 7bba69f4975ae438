"""Passes come in the order of torch's own schedules, which is slow to import: here alone."""

from __future__ import annotations

import itertools
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
    ("pp", "num_microbatches"),
    [(pp, m) for pp, m in itertools.product(range(2, 9), range(2, 20)) if m >= pp],
)
def test_plain_passes_come_in_torchs_order(pp: int, num_microbatches: int) -> None:
    """torch numbers the last stage's forward passes from one: there kinds alone are compared.

    Its table is wrong where micro-batches are fewer than stages: it runs ones that are not there.
    """
    from torch.distributed.pipelining.schedules import Schedule1F1B

    oracle = object.__new__(Schedule1F1B)  # the table needs no stage, the constructor does
    oracle._num_stages, oracle._n_microbatches = pp, num_microbatches
    order = oracle._get_pipeline_order()
    assert order is not None
    for rank in range(pp):
        found, expected = ours(rank, pp, 1, num_microbatches), theirs(order[rank], 1)
        assert [kind for kind, _ in found] == [kind for kind, _ in expected]
        if rank < pp - 1:
            in_rank = [(kind, virtual._replace(chunk=0)) for kind, virtual in expected]
            assert found == in_rank


@pytest.mark.parametrize(
    ("pp", "vpp", "groups"), list(itertools.product(range(2, 9), range(2, 5), (1, 2, 3, 5)))
)
def test_interleaved_passes_come_in_torchs_order(pp: int, vpp: int, groups: int) -> None:
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    oracle = object.__new__(ScheduleInterleaved1F1B)
    oracle.pp_group_size, oracle.n_local_stages = pp, vpp
    oracle._n_microbatches = pp * groups
    oracle.number_of_rounds, oracle.microbatches_per_round = groups, pp
    for rank in range(pp):
        expected = theirs(oracle._calculate_single_rank_operations(rank), pp)
        assert ours(rank, pp, vpp, pp * groups) == expected


@pytest.mark.parametrize(("pp", "groups"), list(itertools.product(range(2, 9), (1, 2, 3, 5))))
def test_passes_without_bubbles_come_in_torchs_order(pp: int, groups: int) -> None:
    from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

    oracle = object.__new__(ScheduleInterleavedZeroBubble)
    oracle.pp_group_size, oracle.n_local_stages = pp, 1
    oracle._n_microbatches = pp * groups
    oracle.number_of_rounds, oracle.microbatches_per_round = groups, pp
    for rank in range(pp):
        expected = theirs(oracle._calculate_single_rank_operations(rank), pp)
        assert ours(rank, pp, 1, pp * groups, "zero_bubble") == expected
