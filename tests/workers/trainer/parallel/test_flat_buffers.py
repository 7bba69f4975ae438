"""Flat buffers: every weight and gradient is a view of them, and their stretches are boxes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.workers.trainer.model.parameters import Cut, ParameterPart, declare, initialise
from layout_tuner.workers.trainer.parallel import flat_buffers
from layout_tuner.workers.trainer.parallel.flat_buffers import (
    ALIGNMENT,
    MAX_BUCKETS,
    Slot,
    Span,
    plan_flat,
    rectangles,
)
from layout_tuner.workers.trainer.training import Training
from tests.workers.trainer.cases import (
    DP,
    REPLICAS,
    VPP,
    ZERO,
    initial_weights,
    make_layout,
    make_shape,
    make_training,
    on_layout,
    over_axes,
)

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("tied", [False, True])
def test_each_parameter_has_one_slot_in_reverse_order_and_counts_its_uses(tied: bool) -> None:
    training = make_training(make_shape("gpt", tied_embeddings=tied))
    slots = training.flat.slots
    assert {id(p) for p in training.model.parameters()} == {id(slot.parameter) for slot in slots}
    assert all(a.end <= b.start for a, b in itertools.pairwise(slots))
    uses = {slot.parameter.parts[0].name: slot.uses for slot in slots}
    assert next(reversed(uses)) == "embedding.weight"
    assert uses.pop("embedding.weight") == 1 + tied, "gradients a micro-batch"
    assert set(uses.values()) == {1}


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
@pytest.mark.parametrize("bucket_elements", [1, 1000, 1 << 20])
def test_buckets_cover_the_buffer_and_divide_over_dp(dp: int, bucket_elements: int) -> None:
    sizes = [1, 64, 65, 1000, 7, 4096, 13]
    plan = plan_flat(sizes, dp=dp, bucket_elements=bucket_elements)
    assert plan.buckets[0].start == 0
    for before, after in itertools.pairwise(plan.buckets):
        assert before.end == after.start
    for bucket in plan.buckets:
        shares = [bucket.share(dp, rank) for rank in range(dp)]
        assert shares[0].start == bucket.start
        assert shares[-1].end == bucket.end
        assert all((share.end - share.start) % ALIGNMENT == 0 for share in shares)
    for start, size in zip(plan.offsets, sizes, strict=True):
        assert start % ALIGNMENT == 0
        assert any(b.start <= start and start + size <= b.end for b in plan.buckets)
    assert len(plan.buckets) == {1: 7, 1000: 3, 1 << 20: 1}[bucket_elements]


@over_axes(DP, ZERO, VPP | ZERO, slow=[REPLICAS, VPP | REPLICAS])
def test_buckets_change_no_training(monkeypatch: pytest.MonkeyPatch, axes: dict[str, Any]) -> None:
    """Nor do many of them block each other, wherever a rank waits in its backward pass."""
    layout = Layout(micro_batch_size=2, num_microbatches=4, **axes)
    shape = make_shape(num_layers=4, tied_embeddings=True)

    def work(training: Training) -> Any:
        stats = [training.step(training.batch(i)).loss for i in range(4)]
        return len(training.flat.plan.buckets), stats

    def losses(bucket_elements: int) -> Any:
        monkeypatch.setattr(flat_buffers, "BUCKET_ELEMENTS", bucket_elements)
        return on_layout(layout, work, shape)[0]

    many, one = losses(2000), losses(1 << 30)
    assert many[0] > 3
    assert one[0] <= 2, "but for the tied embedding's own"
    assert many[1] == one[1]


@pytest.mark.parametrize("shard_dim", [0, 1])
def test_slices_of_a_parameter_are_drawn_as_parts_of_the_whole(shard_dim: int) -> None:
    """Larger than one block of the generator, so that slices start in the middle of blocks."""
    part = ParameterPart(name="w", shape=(600, 500), shard_dim=shard_dim, init="normal")
    whole = torch.empty(part.shape)
    initialise(whole, part, seed=7)
    slices = []
    for rank in range(3):
        size = [600, 500]
        size[shard_dim] = -(-size[shard_dim] // 3) if shard_dim == 0 else 500 // 4
        value = torch.empty(size)
        initialise(value, part, seed=7, cut=Cut(rank, 3 if shard_dim == 0 else 4))
        slices.append(value)
    joined = torch.cat(slices, dim=shard_dim)
    assert torch.equal(joined, whole.narrow(shard_dim, 0, joined.shape[shard_dim]))
    assert float(whole.std()) == pytest.approx(0.02, rel=0.02)


def test_seeds_and_names_give_different_weights() -> None:
    zero, one = initial_weights(make_shape(), 0), initial_weights(make_shape(), 1)
    assert not torch.equal(zero["head.weight"], one["head.weight"])
    gate, up = "layers.0.feed_forward.gate.weight", "layers.0.feed_forward.up.weight"
    assert not torch.equal(zero[gate], zero[up])


@pytest.mark.parametrize(
    ("family", "tied", "precision"), [("gpt", True, "fp32"), ("llama", False, "bf16")]
)
def test_a_step_takes_nothing_from_the_last_one(family: str, tied: bool, precision: str) -> None:
    """They are written over, not cleared: not even one that is no number may be left."""
    shape, layout = make_shape(family, tied_embeddings=tied), make_layout(precision=precision)
    poisoned, clean = make_training(shape, layout), make_training(shape, layout)
    for step in range(2):
        for slot in poisoned.flat.slots:
            slot.parameter.main_grad.fill_(math.nan)
        clean.flat.gradients.zero_()
        assert poisoned.step(poisoned.batch(step)) == clean.step(clean.batch(step))
    assert torch.equal(poisoned.flat.weights, clean.flat.weights)
    assert torch.equal(poisoned.flat.gradients, clean.flat.gradients)


def test_a_parameter_without_a_gradient_is_a_bug_that_is_told() -> None:
    training = make_training(make_shape())
    training.flat.expect_gradients(1)
    assert not training.flat.has_all_gradients
    for slot in training.flat.slots[1:]:
        slot.parameter.add_gradient(torch.zeros_like(slot.parameter))
    assert not training.flat.has_all_gradients
    first = training.flat.slots[0].parameter
    first.add_gradient(torch.zeros_like(first))
    assert training.flat.has_all_gradients
    first.add_gradient(torch.zeros_like(first))
    assert not training.flat.has_all_gradients, "one too many may come after the reduction"


def test_a_weight_that_two_stages_hold_has_a_bucket_for_itself() -> None:
    sizes = [10, 200, 30, 40]
    for shared in range(4):
        plan = plan_flat(sizes, dp=2, shared=shared, bucket_elements=1 << 20)
        own = plan.buckets[plan.shared_bucket]
        inside = [i for i, at in enumerate(plan.offsets) if own.start <= at < own.end]
        assert inside == [shared]
        assert plan.num_elements == plan.buckets[-1].end
    assert plan_flat(sizes, dp=2).shared_bucket is None


def test_a_large_model_has_larger_buckets_instead_of_thousands() -> None:
    sizes = [1 << 22] * 1000
    assert MAX_BUCKETS // 2 < len(plan_flat(sizes, dp=2).buckets) <= MAX_BUCKETS


def a_slot(*parts: ParameterPart, cut: Cut) -> Slot:
    parameter = declare(*parts, cut=cut)
    end = 64 + parameter.numel()
    return Slot(parameter=parameter, shape=parameter.shape, uses=1, bucket=0, start=64, end=end)


def a_part(shape: tuple[int, ...], shard_dim: int | None) -> ParameterPart:
    return ParameterPart(name="weight", shape=shape, shard_dim=shard_dim, init="normal")


@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 6),
    shard_dim=st.sampled_from([None, 0, 1]),
    tp=st.sampled_from([1, 2, 3]),
    cuts=st.lists(st.integers(0, 150), max_size=4),
)
def test_boxes_of_all_ranks_and_spans_are_the_whole_once(
    rows: int, columns: int, shard_dim: int | None, tp: int, cuts: list[int]
) -> None:
    """A logical matrix that is numbered: each box must hold the numbers of its place."""
    shape = tuple(
        size * tp if dim == shard_dim else size for dim, size in enumerate((rows, columns))
    )
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    found = torch.full(shape, -1)
    edges = sorted({0, 200, *(64 + cut for cut in cuts if cut < 130)})
    for tp_rank in range(tp if shard_dim is not None else 1):
        slot = a_slot(a_part(shape, shard_dim), cut=Cut(tp_rank, tp))
        local = whole if shard_dim is None else whole.chunk(tp, shard_dim)[tp_rank]
        flat = torch.full((200,), -2)
        flat[slot.start : slot.end] = local.flatten()
        for first, last in itertools.pairwise(edges):
            boxes = list(rectangles([slot], Span(start=first, end=last)))
            assert len(boxes) <= 3
            for box in boxes:
                place = tuple(
                    slice(offset, offset + size)
                    for offset, size in zip(box.offsets, box.sizes, strict=True)
                )
                assert (found[place] == -1).all(), "a box overlaps another"
                found[place] = flat[box.start : box.end].view(box.sizes)
    assert torch.equal(found, whole)


def test_a_fused_weight_is_stored_as_its_logical_parts() -> None:
    parts = [
        ParameterPart(name=name, shape=(size, 2), shard_dim=0, init="normal")
        for name, size in (("query", 8), ("key", 4))
    ]
    boxes = rectangles([a_slot(*parts, cut=Cut(1, 2))], Span(start=64 + 3, end=64 + 12))
    assert [(box.part.name, box.offsets, box.sizes, box.start) for box in boxes] == [
        ("query", (5, 1), (1, 1), 67),
        ("query", (6, 0), (2, 2), 68),
        ("key", (2, 0), (2, 2), 72),
    ]
