"""Stretches of the flat buffers as boxes of logical parameters."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.spec.layout import Layout
from tests.workers.trainer.cases import lone_mesh, make_shape, make_training
from workers.trainer.model.parameters import Cut, ParameterPart, declare
from workers.trainer.parallel.flat_buffers import Slot, Span, rectangles


def a_slot(*parts: ParameterPart, cut: Cut, start: int = 64) -> Slot:
    parameter = declare(*parts, cut=cut)
    return Slot(
        parameter=parameter,
        shape=parameter.shape,
        uses=1,
        bucket=0,
        start=start,
        end=start + parameter.numel(),
    )


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


def test_padding_is_no_parameter_s() -> None:
    slot = a_slot(a_part((3,), None), cut=Cut(0, 1))
    assert not list(rectangles([slot], Span(start=67, end=128)))


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_the_whole_buffer_is_the_whole_model(family: str) -> None:
    shape = make_shape(family)
    training = make_training(shape, mesh=lone_mesh(Layout()))
    span = Span(start=0, end=training.flat.plan.num_elements)
    boxes = list(rectangles(training.flat.slots, span))
    assert sum(box.end - box.start for box in boxes) == shape.num_parameters
    assert all(box.sizes == box.part.shape for box in boxes)
