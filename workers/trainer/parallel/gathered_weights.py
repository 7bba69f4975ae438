"""Gathered weights (ZeRO-3): a rank keeps its share, and gathers a layer before it is used.

The order in which a step uses its layers follows from the pipeline's schedule. While a layer
computes, forward or backward, the next one's weights arrive in the other part of the window. A
layer that is used twice in a row stays there. Recomputation uses the layer that its backward pass
uses next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from layout_tuner.search_spaces.layouts.schedules import Action, Backward, Forward
from layout_tuner.workers.trainer.comm.collectives import Pending, finish, start_gather_of_shares
from layout_tuner.workers.trainer.model.model import RankModel
from layout_tuner.workers.trainer.model.vocabulary import Embedding
from layout_tuner.workers.trainer.parallel.flat_buffers import FlatBuffers, Slot, Span, Window
from layout_tuner.workers.trainer.stopwatch import part


class GatheredWeights:
    """The whole weights of the layer in use and of the next one.

    Communicates, for each use of a layer: an all-gather of each of its buckets over the shard
    group. Forward and backward are two uses; of the embedding, whose backward pass needs no
    weights, forward alone. Full recomputation adds none.
    """

    def __init__(self, flat: FlatBuffers, model: RankModel, schedule: Sequence[Action]) -> None:
        assert flat.weight_window is not None
        self.flat = flat
        self._window: Window = flat.weight_window
        self._slots: list[list[Slot]] = [
            [slot for slot in flat.slots if slot.bucket in buckets] for buckets in flat.plan.layers
        ]
        self._order = _order_of_use(model, schedule)
        self._nothing = flat.weights.new_empty(0)
        self._spans: dict[int, Span] = {}
        """The place in the window of each layer that is there or on its way."""
        self._works: dict[int, list[Pending | None]] = {}
        self._views: dict[tuple[int, Span], list[Tensor]] = {}
        self._at = -1
        self._looks_ahead = model.mesh.options.overlap_gather
        for number, layer in enumerate(model.layers):
            layer[0].register_forward_pre_hook(partial(self.use, number))
            if not isinstance(layer[0], Embedding):
                layer[-1].register_forward_hook(partial(self._after_forward, number))
            self._release(number)

    def begin(self) -> None:
        """Begins a step: what was gathered before the last update is stale."""
        for layer in list(self._spans):
            self._release(layer)
        self._at = -1
        with part("dp"):
            self._start(self._order[0])

    def use(self, layer: int, *_: Any) -> None:
        """Waits for a layer's weights, and starts to gather those of the next one."""
        order, before = self._order, self._order[self._at] if self._at >= 0 else None
        if layer == before:
            return
        self._at += 1
        assert order[self._at] == layer, "layers are used in another order than planned"
        after = order[self._at + 1] if self._at + 1 < len(order) else None
        with part("dp"):
            if before is not None and layer not in self._spans:
                self._release(before)  # the window had no place beside it
                self._start(layer)
            self._finish(layer)
            if before is not None and before != after:
                self._release(before)
            ahead = after if self._looks_ahead else None
            if ahead is not None and ahead not in self._spans and self._fits(ahead):
                self._start(ahead)

    def _fits(self, layer: int) -> bool:
        return self._window.fits(self.flat.plan.size(*self.flat.plan.layers[layer]))

    def _start(self, layer: int) -> None:
        plan, buckets = self.flat.plan, self.flat.plan.layers[layer]
        span = self._window.take(plan.size(*buckets))
        self._spans[layer], self._works[layer], start = span, [], span.start
        for bucket in buckets:
            whole = self._window.memory[start : start + plan.size(bucket)]
            own, group = (
                self.flat.own_weights(self.flat.owned[bucket]),
                self.flat.copies[bucket].shard_group,
            )
            assert group is not None, "a bucket of one rank is sharded"
            self._works[layer].append(start_gather_of_shares(whole, group, tag=bucket, own=own))
            start += len(whole)

    def _finish(self, layer: int) -> None:
        for work in self._works.pop(layer, []):
            finish(work)
        span = self._spans[layer]
        if (layer, span) not in self._views:
            self._views[layer, span] = self._views_at(layer, span)
        for slot, view in zip(self._slots[layer], self._views[layer, span], strict=True):
            slot.parameter.data = view

    def _views_at(self, layer: int, span: Span) -> list[Tensor]:
        plan, shifts, start = self.flat.plan, dict[int, int](), span.start
        for bucket in plan.layers[layer]:
            shifts[bucket] = start - plan.buckets[bucket].start
            start += plan.size(bucket)
        return [
            self._window.memory[slot.start + shift : slot.end + shift].view(slot.shape)
            for slot in self._slots[layer]
            for shift in (shifts[slot.bucket],)
        ]

    def _release(self, layer: int) -> None:
        """Frees a layer's place. Its weights have no elements until it is gathered again."""
        for slot in self._slots[layer]:
            slot.parameter.data = self._nothing
        if layer in self._spans:
            self._window.give_back(self._spans.pop(layer))

    def _after_forward(
        self, layer: int, _module: nn.Module, _inputs: Any, output: Tensor
    ) -> Tensor:
        return _before_backward(output, partial(self.use, layer))


class _BeforeBackward(Function):
    """The identity; calls a function before the backward pass of what made its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[], None]) -> Tensor:
        ctx.act = act
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.act()
        return gradient, None


_before_backward: Callable[[Tensor, Callable[[], None]], Tensor] = _BeforeBackward.apply


def _order_of_use(model: RankModel, schedule: Sequence[Action]) -> list[int]:
    """The number of each layer in the order of a step's uses, repeats in a row left out."""
    first, uses, layers = 0, list[int](), list[range]()
    for stage in model.stages:
        layers.append(range(first, first + len(stage.layers)))
        first += len(stage.layers)
    for action in schedule:
        if isinstance(action, Forward):
            uses += layers[action.of.chunk]
        elif isinstance(action, Backward):
            has_embedding = model.stages[action.of.chunk].embedding is not None
            uses += reversed(layers[action.of.chunk][has_embedding:])
    return [layer for layer, _ in groupby(uses)]
