"""Interleaved stages train the same model and hold what they should; schedules are torch's own.

torch's schedules are slow to import: each test does it by itself.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
from torch import Tensor

from layout_tuner.search_spaces.layouts.schedules import (
    Schedule,
    Transfer,
    VirtualMicrobatch,
    pipeline_schedule,
)
from layout_tuner.workers.trainer.model.model import Stage
from layout_tuner.workers.trainer.model.parameters import ModelParameter
from layout_tuner.workers.trainer.training import Training
from tests.workers.trainer.cases import make_layout, make_shape, on_layout

pytestmark = pytest.mark.ranks


def on_two_ranks(work: Any) -> list[Any]:
    """What `work(training)` returns on both ranks of a pipeline of two chunks each."""
    return on_layout(make_layout(pp=2, vpp=2), work, make_shape("gpt", num_layers=4))


def test_flat_buffers_have_the_order_of_backward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets close in turn only if a chunk's gradients are final before the one's under it."""
    last_seen: dict[int, int] = {}
    clock = itertools.count()
    for method in ("add_gradient", "add_product", "add_rows"):
        original = getattr(ModelParameter, method)

        def noted(self: ModelParameter, *args: Tensor, _original: Any = original) -> None:
            last_seen[id(self)] = next(clock)
            _original(self, *args)

        monkeypatch.setattr(ModelParameter, method, noted)

    def chunks(training: Training) -> tuple[list[int], list[int]]:
        training.step(training.batch(0))
        chunk_of = {
            id(parameter): chunk
            for chunk, stage in enumerate(training.model.stages)
            for parameter in stage.parameters()
        }
        finished = sorted(chunk_of, key=lambda parameter: last_seen[parameter])
        in_memory = [chunk_of[id(slot.parameter)] for slot in training.flat.slots]
        return in_memory, [chunk_of[parameter] for parameter in finished]

    for in_memory, finished in on_two_ranks(chunks):
        assert in_memory == finished == sorted(in_memory, reverse=True)


def test_outputs_are_freed_once_sent() -> None:
    """Rank 0 holds at most two outputs: the last one that it sent, and the one that it computes."""

    def most_alive(training: Training) -> int:
        outputs: list[weakref.ref[Any]] = []
        alive = []

        def note(stage: Stage, _: Any, output: Tensor) -> None:
            outputs.append(weakref.ref(output.untyped_storage()))
            alive.append(sum(reference() is not None for reference in outputs))

        for stage in training.model.stages:
            stage.register_forward_hook(note)
        training.step(training.batch(0))
        assert len(alive) == 8, "4 micro-batches through 2 chunks"
        return max(alive)

    assert on_two_ranks(most_alive)[0] == 2


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
