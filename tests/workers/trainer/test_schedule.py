"""The 1F1B table, without processes: order, memory, and transfers that pair up."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from workers.trainer.schedule import (
    Action,
    Backward,
    Forward,
    Transfer,
    one_forward_one_backward,
)

GRID = pytest.mark.parametrize(
    ("pp", "num_microbatches"), list(itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 7, 8, 16)))
)


def tables(pp: int, num_microbatches: int) -> list[list[Action]]:
    return [one_forward_one_backward(stage, pp, num_microbatches) for stage in range(pp)]


def computations(actions: list[Action]) -> list[str]:
    return [
        f"{'F' if isinstance(action, Forward) else 'B'}{action.microbatch}"
        for action in actions
        if not isinstance(action, Transfer)
    ]


@GRID
def test_every_microbatch_goes_forward_then_backward_once(pp: int, num_microbatches: int) -> None:
    for actions in tables(pp, num_microbatches):
        order = computations(actions)
        assert len(order) == 2 * num_microbatches
        for i in range(num_microbatches):
            assert order.index(f"F{i}") < order.index(f"B{i}")


@GRID
def test_backward_passes_keep_the_order_of_the_microbatches(pp: int, num_microbatches: int) -> None:
    """Sums of gradients keep their order, so that a pipeline is bitwise equal to one process."""
    for actions in tables(pp, num_microbatches):
        for kind in (Forward, Backward):
            indices = [a.microbatch for a in actions if isinstance(a, kind)]
            assert indices == list(range(num_microbatches))


@GRID
def test_no_more_microbatches_are_in_flight_than_stages_follow(
    pp: int, num_microbatches: int
) -> None:
    for stage, actions in enumerate(tables(pp, num_microbatches)):
        in_flight = most = 0
        for action in actions:
            in_flight += {Forward: 1, Backward: -1, Transfer: 0}[type(action)]
            most = max(most, in_flight)
        assert most == min(num_microbatches, pp - stage)


@GRID
def test_ranks_that_block_in_every_transfer_get_through(pp: int, num_microbatches: int) -> None:
    """Runs the tables in lockstep: a transfer passes when both sides of each of its parts stand
    at it, which is what a blocking, pairwise transport needs. Nobody may get stuck."""
    tables_left = tables(pp, num_microbatches)
    position = [0] * pp
    posted: dict[int, set[tuple[str, int, int]]] = defaultdict(set)
    computed: set[tuple[int, str, int]] = set()
    while any(position[s] < len(tables_left[s]) for s in range(pp)):
        moved = False
        for stage in range(pp):
            if position[stage] == len(tables_left[stage]):
                continue
            action = tables_left[stage][position[stage]]
            if isinstance(action, Transfer):
                posted[stage] |= messages(stage, action)
                if not all(peer_has(posted, m, stage) for m in messages(stage, action)):
                    continue
                for kind, link, index in messages(stage, action):
                    source = link if kind == "activation" else link + 1
                    if source == stage:
                        what = "F" if kind == "activation" else "B"
                        assert (stage, what, index) in computed, "sent before it was computed"
            else:
                computed.add(
                    (stage, "F" if isinstance(action, Forward) else "B", action.microbatch)
                )
            position[stage] += 1
            moved = True
        assert moved, f"stuck at {position}"


def messages(stage: int, action: Transfer) -> set[tuple[str, int, int]]:
    """(what, the link between stage i and i + 1, micro-batch) of each part of a transfer."""
    parts = {
        ("activation", stage, action.send_activation),
        ("activation", stage - 1, action.receive_activation),
        ("gradient", stage - 1, action.send_gradient),
        ("gradient", stage, action.receive_gradient),
    }
    return {(kind, link, index) for kind, link, index in parts if index is not None}


def peer_has(
    posted: dict[int, set[tuple[str, int, int]]], message: tuple[str, int, int], stage: int
) -> bool:
    _, link, _ = message
    return message in posted[link + 1 if link == stage else link]


@GRID
def test_transfers_of_neighbours_come_in_the_same_order(pp: int, num_microbatches: int) -> None:
    """A transport matches messages of one kind by their order alone."""
    all_tables = tables(pp, num_microbatches)
    for left, right in itertools.pairwise(all_tables):
        sent = [a.send_activation for a in left if isinstance(a, Transfer)]
        received = [a.receive_activation for a in right if isinstance(a, Transfer)]
        assert [i for i in sent if i is not None] == [i for i in received if i is not None]
        returned = [a.send_gradient for a in right if isinstance(a, Transfer)]
        taken = [a.receive_gradient for a in left if isinstance(a, Transfer)]
        assert [i for i in returned if i is not None] == [i for i in taken if i is not None]


def test_one_stage_communicates_nothing() -> None:
    assert not any(isinstance(a, Transfer) for a in one_forward_one_backward(0, 1, 8))


@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 2), (2, 8), (3, 5), (4, 4), (4, 9)])
def test_passes_alternate_as_in_torchs_schedule(pp: int, num_microbatches: int) -> None:
    """Kinds alone are compared: torch numbers the last stage's forward passes from one."""
    from torch.distributed.pipelining.schedules import Schedule1F1B

    oracle = object.__new__(Schedule1F1B)  # the table needs no stage, the constructor does
    oracle._num_stages, oracle._n_microbatches = pp, num_microbatches
    order = oracle._get_pipeline_order()
    assert order is not None
    letters = {"FORWARD": "F", "FULL_BACKWARD": "B"}
    for stage in range(pp):
        names = [action.computation_type.name for action in order[stage] if action is not None]
        expected = [letters[name] for name in names if name in letters]
        found = computations(one_forward_one_backward(stage, pp, num_microbatches))
        assert [computation[0] for computation in found] == expected
