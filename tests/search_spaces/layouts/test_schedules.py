"""The ranks of a job by axis and node, and their schedules as tables, without processes."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import asdict
from typing import Any

import pytest

from layout_tuner.predictions.estimates.step_shape import idle_slots
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.layouts.rank_mesh import (
    coordinates,
    expert_coordinates,
    expert_rank,
    global_rank,
    ranks_per_node,
)
from layout_tuner.search_spaces.layouts.schedules import (
    Action,
    Backward,
    Forward,
    Transfer,
    VirtualMicrobatch,
    WeightGradients,
    pipeline_schedule,
)
from tests.workers.trainer.simulated_ranks import (
    Message,
    SimulatedRanks,
    received_by,
    sent_by,
    tables,
)

PLAIN = [(pp, 1, num) for pp, num in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 7, 8, 16))]
INTERLEAVED = [
    (pp, vpp, pp * groups)
    for pp, vpp, groups in itertools.product((2, 3, 5, 8), (2, 3, 4), (1, 2, 5))
]
GRID = pytest.mark.parametrize(("pp", "vpp", "num_microbatches"), PLAIN + INTERLEAVED)


def passes(actions: list[Action], kind: type[Forward] | type[Backward]) -> list[VirtualMicrobatch]:
    return [action.of for action in actions if isinstance(action, kind)]


def most_in_flight(actions: list[Action]) -> int:
    in_flight = most = 0
    for action in actions:
        in_flight += {Forward: 1, Backward: -1, Transfer: 0}[type(action)]
        most = max(most, in_flight)
    return most


def test_one_forward_one_backward_in_full() -> None:
    first, second = VirtualMicrobatch(0, 0), VirtualMicrobatch(0, 1)
    assert pipeline_schedule(0, pp=2, vpp=1, num_microbatches=2) == [
        Forward(of=first),
        Transfer(send_activation=first),
        Forward(of=second),
        Transfer(send_activation=second, receive_gradient=first),
        Backward(of=first),
        Transfer(receive_gradient=second),
        Backward(of=second),
    ]
    assert pipeline_schedule(1, pp=2, vpp=1, num_microbatches=2) == [
        Transfer(receive_activation=first),
        Forward(of=first),
        Backward(of=first),
        Transfer(send_gradient=first, receive_activation=second),
        Forward(of=second),
        Backward(of=second),
        Transfer(send_gradient=second),
    ]


def test_an_interleaved_schedule_in_full() -> None:
    """Rank 1 of 2, two chunks: the last rank's first chunk feeds the first rank's second one."""
    a0, a1, b0, b1 = itertools.starmap(VirtualMicrobatch, [(0, 0), (0, 1), (1, 0), (1, 1)])
    assert pipeline_schedule(1, pp=2, vpp=2, num_microbatches=2) == [
        Transfer(receive_activation=a0),
        Forward(of=a0),
        Transfer(send_activation=a0, receive_activation=a1),
        Forward(of=a1),
        Transfer(send_activation=a1, receive_activation=b0),
        Forward(of=b0),
        Transfer(receive_activation=b1),
        Backward(of=b0),
        Transfer(send_gradient=b0),
        Forward(of=b1),
        Backward(of=b1),
        Transfer(send_gradient=b1, receive_gradient=a0),
        Backward(of=a0),
        Transfer(send_gradient=a0, receive_gradient=a1),
        Backward(of=a1),
        Transfer(send_gradient=a1),
    ]


@GRID
def test_every_chunk_takes_every_microbatch_in_order_and_each_forward_before_its_backward(
    pp: int, vpp: int, num_microbatches: int
) -> None:
    """Sums of gradients keep their order, so that a pipeline is bitwise equal to one process."""
    for actions in tables(pp, vpp, num_microbatches):
        place = {action: at for at, action in enumerate(actions)}
        for chunk in range(vpp):
            for kind in (Forward, Backward):
                indices = [v.microbatch for v in passes(actions, kind) if v.chunk == chunk]
                assert indices == list(range(num_microbatches))
            for virtual in (VirtualMicrobatch(chunk, index) for index in indices):
                assert place[Forward(of=virtual)] < place[Backward(of=virtual)]
        assert len(passes(actions, Forward)) == vpp * num_microbatches


@GRID
def test_the_published_number_of_microbatches_is_in_flight(
    pp: int, vpp: int, num_microbatches: int
) -> None:
    """As many as stages follow; interleaved, on the first rank 1 + (p - 1) / (p v) times p
    (arXiv:2205.05198, 4.2.3).
    """
    for rank, actions in enumerate(tables(pp, vpp, num_microbatches)):
        wanted = pp - rank if vpp == 1 else 2 * (pp - 1 - rank) + (vpp - 1) * pp + 1
        assert most_in_flight(actions) == min(wanted, vpp * num_microbatches)
        if vpp > 1 and rank == 0 and num_microbatches >= 2 * pp:
            assert most_in_flight(actions) / vpp == pytest.approx(pp * (1 + (pp - 1) / (pp * vpp)))


@GRID
def test_ranks_that_block_in_every_transfer_get_through_with_the_published_bubble(
    pp: int, vpp: int, num_microbatches: int
) -> None:
    """A bubble of (p - 1) / v forward and backward passes of a rank's layers (arXiv:2104.04473).

    NCCL matches what a rank sends to another by its order alone, activation or gradient.
    """
    for blocking in (True, False):
        ranks = SimulatedRanks(pp, vpp, num_microbatches, blocking)
        both = ranks.forward_time + ranks.backward_time
        assert ranks.run() == (num_microbatches * vpp + pp - 1) * both
    sent: dict[tuple[int, int], list[Message]] = {}
    received: dict[tuple[int, int], list[Message]] = {}
    for rank, actions in enumerate(tables(pp, vpp, num_microbatches)):
        for transfer in (action for action in actions if isinstance(action, Transfer)):
            for messages, found in ((sent_by, sent), (received_by, received)):
                for message in messages(transfer, rank, pp):
                    ends = (message.from_stage % pp, message.to_stage % pp)
                    found.setdefault(ends, []).append(message)
    assert sent == received
    num_edges = (pp * vpp - 1) * 2 * num_microbatches
    assert sum(len(messages) for messages in sent.values()) == num_edges


OTHERS = pytest.mark.parametrize(("pp", "num_microbatches"), [(pp, num) for pp, _, num in PLAIN])


@OTHERS
def test_late_weight_gradients_fill_the_bubble_and_hold_no_more_than_the_first_stage(
    pp: int, num_microbatches: int
) -> None:
    """A bubble of (pp - 1) (F + B - W) (arXiv:2401.10241, table 2), or more."""
    sizes: dict[str, Any] = {"pp": pp, "vpp": 1, "num_microbatches": num_microbatches}
    sizes["schedule"] = "zero_bubble"
    late = min(num_microbatches, pp) - 1
    for weight_time in (0.5, 1.0):
        ranks = SimulatedRanks(**sizes, blocking=False, weight_time=weight_time)
        passes_s = ranks.forward_time + ranks.backward_time
        bubble = ranks.run() - num_microbatches * passes_s
        assert bubble == pytest.approx((pp - 1) * (passes_s - weight_time) - late * weight_time)
    layout = Layout(pp=pp, num_microbatches=num_microbatches, schedule="zero_bubble")
    assert bubble == pytest.approx(float(idle_slots(LayoutColumns.of(layout))) * passes_s)
    assert SimulatedRanks(**sizes).run() > 0, "ranks that block get through"
    changes = {Forward: 1, Backward: 0, WeightGradients: -1, Transfer: 0}
    for actions in tables(pp, 1, num_microbatches, "zero_bubble"):
        held = itertools.accumulate(changes[type(action)] for action in actions)
        assert max(held) == min(num_microbatches, pp)


@OTHERS
def test_gpipe_has_the_bubble_of_1f1b_and_all_micro_batches_in_flight(
    pp: int, num_microbatches: int
) -> None:
    for blocking in (True, False):
        ranks = SimulatedRanks(pp, 1, num_microbatches, blocking, schedule="gpipe")
        both = ranks.forward_time + ranks.backward_time
        assert ranks.run() == (num_microbatches + pp - 1) * both
    for actions in tables(pp, 1, num_microbatches, "gpipe"):
        assert most_in_flight(actions) == num_microbatches


@pytest.mark.parametrize(("pp", "vpp"), [(2, 4), (4, 2)])
def test_interleaved_transfers_hide_behind_passes(pp: int, vpp: int) -> None:
    """Those of the fill and the drain alone take time, however many micro-batches there are."""

    def added(num_microbatches: int) -> float:
        quick = SimulatedRanks(pp, vpp, num_microbatches)
        slow = SimulatedRanks(pp, vpp, num_microbatches, blocking=False, transfer_time=0.5)
        return slow.run() - quick.run()

    assert added(4 * pp) == added(8 * pp) == added(16 * pp)


def test_the_simulation_sees_ranks_that_wait_in_a_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receives that are posted alone, as by an eager schedule, block both neighbours for ever."""
    a, b = VirtualMicrobatch(0, 0), VirtualMicrobatch(1, 0)
    stuck = [
        [Forward(of=a), Transfer(receive_gradient=a), Transfer(send_activation=a)],
        [Transfer(receive_activation=a), Forward(of=a), Transfer(send_gradient=b)],
    ]
    monkeypatch.setattr("tests.workers.trainer.simulated_ranks.tables", lambda *_: stuck)
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] wait for each other"):
        SimulatedRanks(2, 1, 1).run()


@pytest.mark.parametrize(
    ("layout", "order"),
    [
        (Layout(tp=2, pp=3, dp=4), {"tp": 1, "dp": 2, "pp": 8}),
        (Layout(tp=2, tp_columns=3, cp=2, dp=2, pp=2), {"column": 1, "tp": 3, "cp": 6, "dp": 12}),
        # RankGenerator(tp=2, cp=1, dp=3, pp=2, order="tp-cp-ep-pp-dp") of its parallel_state.
        (Layout(tp=2, dp=3, pp=2, rank_order="tp_cp_pp_dp"), {"tp": 1, "pp": 2, "dp": 4}),
    ],
    ids=lambda value: value.key if isinstance(value, Layout) else "",
)
def test_ranks_and_coordinates_are_one_to_one_and_vary_in_their_order(
    layout: Layout, order: dict[str, int]
) -> None:
    """Of each axis, how many ranks share a coordinate before the next one."""
    places = [coordinates(rank, layout) for rank in range(layout.num_devices)]
    assert [global_rank(place, layout) for place in places] == list(range(layout.num_devices))
    for axis, ranks in order.items():
        size = layout.tp_columns if axis == "column" else getattr(layout, axis)
        found = [getattr(place, f"{axis}_rank") for place in places]
        assert found == [rank // ranks % size for rank in range(layout.num_devices)], axis


@pytest.mark.parametrize(
    ("axis", "groups"),
    [
        ("etp_rank", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("ep_rank", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("edp_rank", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_groups_of_experts_are_those_of_megatron_lm(axis: str, groups: list[list[int]]) -> None:
    """RankGenerator(tp=2, ep=2, dp=2, pp=2, cp=1, order="tp-cp-ep-dp-pp") of its parallel_state."""
    layout = Layout(tp=2, cp=2, dp=2, pp=2, ep=2, etp=2)
    found = defaultdict(list)
    for rank in range(layout.num_devices):
        place = asdict(expert_coordinates(rank, layout))
        del place[axis]
        found[coordinates(rank, layout).pp_rank, *place.values()].append(rank)
    assert sorted(found.values()) == groups + [[8 + rank for rank in group] for group in groups]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=4, dp=3, ep=6),
        Layout(cp=2, dp=4, pp=3, ep=2, etp=2),
        Layout(pp=2),
        Layout(tp=2, cp=2, dp=3, pp=2, ep=2, etp=2, rank_order="tp_cp_pp_dp"),
    ],
)
def test_ranks_and_coordinates_of_experts_are_one_to_one(layout: Layout) -> None:
    places = [
        (expert_coordinates(rank, layout), coordinates(rank, layout).pp_rank)
        for rank in range(layout.num_devices)
    ]
    assert len(set(places)) == layout.num_devices
    assert [expert_rank(*place, layout) for place in places] == list(range(layout.num_devices))


def test_ranks_fill_one_node_after_the_other() -> None:
    assert ranks_per_node(32, 4) == 8
    assert ranks_per_node(10, 4) == 3
