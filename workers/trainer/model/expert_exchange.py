"""Exchanges rows of tokens between the ranks that divide the experts of a layer.

Shapes: A experts of all ranks, E = A / N of this rank, N ranks of the ep group, M rows of this
rank's tokens sorted by expert, R rows of this rank's experts.
"""

# ruff: noqa: N803, N806 (tensors carry their shape in the name)

from __future__ import annotations

import torch
from torch import Tensor

from workers.trainer.comm.collectives import (
    Pending,
    finish,
    gather_rows,
    start_all_to_all_rows,
)
from workers.trainer.comm.groups import AxisGroup
from workers.trainer.stopwatch import part


class RowExchange:
    """Where the rows of a micro-batch go in one layer, and where they come from.

    Communicates over ep: an all-gather of the counts; for each `to_experts` and `start_to_tokens`
    an all-to-all of rows. With balanced routing a rank sends (N - 1) / N of its M rows.

    Args:
        counts_A: this rank's rows for each expert.
        group: the ep group.
    """

    def __init__(self, counts_A: Tensor, group: AxisGroup) -> None:
        self._group, size = group, group.size
        with part("ep"):
            self.counts_NA = gather_rows(counts_A[None], group)
        counts_NNE = self.counts_NA.view(size, size, -1)
        rows = counts_NNE.sum(-1).tolist()
        self._sent, self._received = rows[group.rank], [row[group.rank] for row in rows]
        self._largest = max(map(max, rows))
        counts_NE = counts_NNE[:, group.rank]
        self.ends_E = counts_NE.sum(0).cumsum(0).to(torch.int32)
        """The end of each own expert's rows."""
        self._order_R = self._order_by_expert(counts_NE)
        """The received rows by expert; of the same expert in the order of the ranks."""

    def _order_by_expert(self, counts_NE: Tensor) -> Tensor:
        starts_NE = counts_NE.flatten().cumsum(0).view_as(counts_NE) - counts_NE
        sizes, starts = counts_NE.t().flatten(), starts_NE.t().flatten()
        shifts = starts - (sizes.cumsum(0) - sizes)
        num_rows = sum(self._received)
        rows_R = torch.arange(num_rows, device=counts_NE.device)
        return rows_R + shifts.repeat_interleave(sizes, output_size=num_rows)

    def to_experts(self, *every_M: Tensor) -> list[Tensor]:
        """Tensors with a row for each of M as tensors of R, on the ranks of the experts."""
        with part("ep"):
            started = [
                start_all_to_all_rows(
                    each, self._group, self._sent, self._received, largest=self._largest
                )
                for each in every_M
            ]
            for _, work in started:
                finish(work)
        return [received.index_select(0, self._order_R) for received, _ in started]

    def start_to_tokens(self, each_R: Tensor) -> tuple[Tensor, Pending | None]:
        """The reverse: starts sending rows back; returns those of the own tokens."""
        ordered = torch.empty_like(each_R).index_copy_(0, self._order_R, each_R)
        with part("ep"):
            return start_all_to_all_rows(
                ordered, self._group, self._received, self._sent, largest=self._largest
            )
