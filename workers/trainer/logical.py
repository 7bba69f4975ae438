"""Which part of which logical parameter a stretch of the flat buffers is.

A stretch of a rank's flat buffer cuts through parameters, each of which is a slice of a logical
one: of a matrix it takes up to three rectangles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from workers.trainer.flat import Slot, Span
from workers.trainer.parameters import ModelParameter, Part


@dataclass(frozen=True, kw_only=True, slots=True)
class Rectangle:
    """A box of a logical parameter, whose elements lie one after the other in the flat buffers."""

    part: Part
    """The logical parameter."""
    parameter: ModelParameter
    """The rank's parameter that holds it."""
    offsets: tuple[int, ...]
    """Where it begins in the logical parameter."""
    sizes: tuple[int, ...]
    start: int
    """Where it begins in the flat buffers."""

    @property
    def end(self) -> int:
        """Where it ends in the flat buffers."""
        return self.start + prod(self.sizes)


def rectangles(slots: Iterable[Slot], span: Span, *, tp: int, tp_rank: int) -> Iterator[Rectangle]:
    """All of a stretch of the flat buffers but its padding, in boxes."""
    for slot in slots:
        part_start = slot.start
        for part in slot.parameter.parts:
            shape = part.local_shape(tp)
            part_end = part_start + prod(shape)
            first, last = max(span.start, part_start), min(span.end, part_end)
            if first < last:
                corner = tuple(
                    tp_rank * size if dim == part.shard_dim else 0 for dim, size in enumerate(shape)
                )
                for offsets, sizes in _boxes(shape, first - part_start, last - part_start):
                    yield Rectangle(
                        part=part,
                        parameter=slot.parameter,
                        offsets=tuple(map(sum, zip(corner, offsets, strict=True))),
                        sizes=sizes,
                        start=part_start + _position(shape, offsets),
                    )
            part_start = part_end


def _boxes(
    shape: tuple[int, ...], first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the boxes that elements first to last - 1, row by row, fall into."""
    if len(shape) == 1:
        yield (first,), (last - first,)
        return
    row_size = prod(shape[1:])
    row, column = divmod(first, row_size)
    if column:
        stop = min(last, (row + 1) * row_size)
        yield from _within_row(shape, row, column, column + stop - first)
        first, row = stop, row + 1
    whole_rows = (last - first) // row_size
    if whole_rows:
        yield (row, *(0 for _ in shape[1:])), (whole_rows, *shape[1:])
        first += whole_rows * row_size
    if first < last:
        yield from _within_row(shape, row + whole_rows, 0, last - first)


def _within_row(
    shape: tuple[int, ...], row: int, first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in _boxes(shape[1:], first, last):
        yield (row, *offsets), (1, *sizes)


def _position(shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    position = 0
    for size, offset in zip(shape, offsets, strict=True):
        position = position * size + offset
    return position
