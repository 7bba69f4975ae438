"""Interleaved stages train the same model, and hold what they should."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
from torch import Tensor

from tests.workers.trainer.cases import make_layout, make_shape, on_layout
from workers.trainer.model.model import Stage
from workers.trainer.model.parameters import ModelParameter
from workers.trainer.training import Training

pytestmark = pytest.mark.ranks


def on_two_ranks(work: Any) -> list[Any]:
    """What `work(training)` returns on both ranks of a pipeline of two chunks each."""
    return on_layout(make_layout(pp=2, vpp=2), work, make_shape("gpt", num_layers=4))


def test_ranks_take_turns_over_the_layers() -> None:
    def layers(training: Training) -> list[str]:
        names = [slot.parameter.parts[0].name for slot in training.flat.slots]
        return [name for name in names if name.endswith("feed_forward.down.weight")]

    def named(*layers: int) -> list[str]:
        return [f"layers.{i}.feed_forward.down.weight" for i in layers]

    assert on_two_ranks(layers) == [named(2, 0), named(3, 1)]


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
