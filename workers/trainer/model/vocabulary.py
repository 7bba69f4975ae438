"""Embedding and cross-entropy, divided by rows of the vocabulary (arXiv:1909.08053).

Ranks of tp divide the vocabulary, and so do tensor columns; of the features between the layers a
rank has those of its column.

Shapes: T tokens of a micro-batch, B sequences, S positions, H hidden, V local rows of the
vocabulary, C tokens of a chunk, L tokens of this rank under sequence parallelism.
"""

# ruff: noqa: N803, N806, N812 (tensors carry their shape in the name)

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from layout_tuner.workers.trainer.comm.collectives import (
    all_reduce,
    all_reduce_max,
    gather_columns,
    gather_rows,
    scatter_columns,
    scatter_rows,
)
from layout_tuner.workers.trainer.comm.groups import AxisGroup
from layout_tuner.workers.trainer.comm.mesh import Mesh
from layout_tuner.workers.trainer.model.parameters import ModelParameter

_CHUNK_ELEMENTS: Final = {"cpu": 1 << 18, "cuda": 1 << 28}
"""Logits that are processed at once: 1 MiB on a CPU, which fits its cache; on a GPU many, for few
kernels."""


class VocabEmbedding(Function):
    """Looks up the rows that this rank holds.

    Forward: all-reduce over tp of rows that are zero on all ranks but one. Backward: no
    communication. Under sequence parallelism, forward: reduce-scatter over tp; backward: all-gather
    of the gradient over tp. With tensor columns, forward: before that a reduce-scatter of the
    features over columns; backward: after it an all-gather of theirs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        ids_T: Tensor,
        weight_VH: ModelParameter,
        first_row: int,
        group: AxisGroup | None,
        columns: AxisGroup | None,
        cuts_tokens: bool,
    ) -> Tensor:
        ctx.weight_VH, ctx.columns = weight_VH, columns
        ctx.token_group = group if cuts_tokens else None
        if group is None and columns is None:
            ctx.save_for_backward(ids_T, None)
            return F.embedding(ids_T, weight_VH)
        rows_T, elsewhere_T = _local_rows(ids_T, first_row, weight_VH.shape[0])
        ctx.save_for_backward(rows_T, elsewhere_T)
        x_TH = F.embedding(rows_T, weight_VH).masked_fill_(elsewhere_T[:, None], 0.0)
        if columns is not None:
            x_TH = scatter_columns(x_TH, columns)
        if ctx.token_group is not None:
            return scatter_rows(x_TH, ctx.token_group)
        all_reduce(x_TH, group)
        return x_TH

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[None, None, None, None, None, None]:
        rows_T, elsewhere_T = ctx.saved_tensors
        if ctx.token_group is not None:
            grad_TH = gather_rows(grad_TH, ctx.token_group)
        if ctx.columns is not None:
            grad_TH = gather_columns(grad_TH, ctx.columns)
        grad_TH = grad_TH.float()
        if elsewhere_T is not None:
            grad_TH = grad_TH.masked_fill(elsewhere_T[:, None], 0.0)
        ctx.weight_VH.add_rows(rows_T, grad_TH)
        return None, None, None, None, None, None


class AddPositions(Function):
    """Adds the learned positions to the embedded tokens, in place. Does not communicate."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, positions_SH: ModelParameter) -> Tensor:
        ctx.positions_SH, ctx.shape = positions_SH, positions_SH.shape
        ctx.mark_dirty(x_TH)
        x_TH.view(-1, *positions_SH.shape).add_(positions_SH)
        return x_TH

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None]:
        ctx.positions_SH.add_gradient(grad_TH.view(-1, *ctx.shape).sum(0))
        return grad_TH, None


class AddOwnPositions(Function):
    """Adds the learned positions to this rank's tokens, in place, where ranks share sequences.

    Row l of the positions' weight belongs to token l. Does not communicate.
    """

    @staticmethod
    def forward(ctx: Any, x_LH: Tensor, positions_SH: ModelParameter, rows_L: Tensor) -> Tensor:
        ctx.save_for_backward(rows_L)
        ctx.positions_SH = positions_SH
        ctx.mark_dirty(x_LH)
        return x_LH.add_(F.embedding(rows_L, positions_SH))

    @staticmethod
    def backward(ctx: Any, grad_LH: Tensor) -> tuple[Tensor, None, None]:
        (rows_L,) = ctx.saved_tensors
        ctx.positions_SH.add_rows(rows_L, grad_LH.float())
        return grad_LH, None, None


class VocabCrossEntropy(Function):
    """Mean cross-entropy of a micro-batch, in fp32; overwrites fp32 logits.

    Forward: two all-reduces over the ranks that divide the vocabulary, first of the largest logit
    (so that no exponential overflows), then of the sum of exponentials and the target's logit.
    Backward: no communication.
    Both process a few rows at a time, which stay in the cache from the first operator to the last.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, targets_T: Tensor, first_row: int, group: AxisGroup | None
    ) -> Tensor:
        ctx.dtype = logits_TV.dtype
        rows_T, elsewhere_T = _local_rows(targets_T, first_row, logits_TV.shape[1])
        exp_TV, largest_T, sums_2T = _exponentials(logits_TV, rows_T)
        # Exponentials are relative to this rank's largest logit. Its sums are rescaled to the
        # largest logit of all ranks.
        offset_T = -largest_T
        all_reduce_max(largest_T, group)
        offset_T = offset_T.add_(largest_T).neg_()
        sums_2T[0].mul_(offset_T.exp())
        sums_2T[1].add_(offset_T).masked_fill_(elsewhere_T, 0.0)
        all_reduce(sums_2T, group)
        scale_T = offset_T.exp_().div_(sums_2T[0] * rows_T.numel())
        ctx.save_for_backward(exp_TV, scale_T, rows_T, elsewhere_T)
        return (sums_2T[0].log() - sums_2T[1]).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        exp_TV, scale_T, rows_T, elsewhere_T = ctx.saved_tensors
        scale_T1 = (grad * scale_T)[:, None]
        minus_T1 = (elsewhere_T.logical_not() * (-grad / rows_T.numel()))[:, None]
        grad_TV = exp_TV if exp_TV.dtype == ctx.dtype else torch.empty_like(exp_TV, dtype=ctx.dtype)
        for some in _slices(exp_TV):
            grad_CV = exp_TV[some].mul_(scale_T1[some])
            grad_CV.scatter_add_(1, rows_T[some, None], minus_T1[some])
            if grad_TV is not exp_TV:
                grad_TV[some].copy_(grad_CV)
        return grad_TV, None, None, None


def _exponentials(logits_TV: Tensor, rows_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp_TV, largest_T and sums_2T of the local logits; fp32 logits are overwritten by exp_TV.

    Exponentials are relative to each token's largest local logit, largest_T. sums_2T[0] is their
    sum, and sums_2T[1] the logit of the local row rows_T[t], relative to the largest.
    """
    is_fp32 = logits_TV.dtype == torch.float32
    exp_TV = logits_TV if is_fp32 else torch.empty_like(logits_TV, dtype=torch.float32)
    sums_2T = torch.empty(2, len(logits_TV), device=logits_TV.device)
    largest_T = torch.empty_like(sums_2T[0])
    for some in _slices(logits_TV):
        exp_CV = exp_TV[some] if is_fp32 else exp_TV[some].copy_(logits_TV[some])
        largest_C = torch.amax(exp_CV, -1, out=largest_T[some])
        exp_CV.sub_(largest_C[:, None])
        sums_2T[1, some].copy_(exp_CV.gather(1, rows_T[some, None]).squeeze(1))
        torch.sum(exp_CV.exp_(), -1, out=sums_2T[0, some])
    return exp_TV, largest_T, sums_2T


def _slices(logits_TV: Tensor) -> list[slice]:
    """Slices of consecutive tokens whose logits are processed at once."""
    num_tokens, num_rows = logits_TV.shape
    size = max(_CHUNK_ELEMENTS[logits_TV.device.type] // num_rows, 1)
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


def _local_rows(ids_T: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Local row of each id (0 if another rank holds it), and whether another rank holds it."""
    rows_T = ids_T - first_row
    elsewhere_T = (rows_T < 0) | (rows_T >= num_rows)
    return rows_T.masked_fill_(elsewhere_T, 0), elsewhere_T


_embed: Callable[..., Tensor] = VocabEmbedding.apply
_add_positions: Callable[..., Tensor] = AddPositions.apply
_add_own_positions: Callable[..., Tensor] = AddOwnPositions.apply
vocab_cross_entropy: Callable[..., Tensor] = VocabCrossEntropy.apply


class Embedding(nn.Module):
    """From token ids to the residual stream, with learned positions if the family has them.

    Under sequence parallelism the output holds this rank's tokens only.
    """

    positions: ModelParameter | None

    def __init__(
        self, weight: ModelParameter, positions: ModelParameter | None, mesh: Mesh
    ) -> None:
        super().__init__()
        self.weight, self.group, self.columns = weight, mesh.tp_group, mesh.column_group
        self.tp_rank, self.cuts_tokens = mesh.place.tp_rank, mesh.cuts_tokens
        self.own_positions: Tensor | None = None
        """Where ranks share each sequence, this rank's positions of one, (S,)."""
        if positions is not None and mesh.cp_group is not None:
            self.own_positions = mesh.own_positions(torch.arange(len(positions)))
        self.register_parameter("positions", positions)
        self.first_row = mesh.vocabulary_rank * weight.shape[0]

    def forward(self, ids_T: Tensor) -> Tensor:
        groups = self.group, self.columns
        x_TH = _embed(ids_T, self.weight, self.first_row, *groups, self.cuts_tokens)
        if self.positions is None:
            return x_TH
        if not self.cuts_tokens and self.own_positions is None:
            return _add_positions(x_TH, self.positions)
        first = self.tp_rank * x_TH.shape[0] if self.cuts_tokens else 0
        tokens = torch.arange(first, first + x_TH.shape[0], device=x_TH.device)
        if self.own_positions is None:
            rows_L = tokens % self.positions.shape[0]
        else:
            rows_L = self.own_positions.to(x_TH.device)[tokens % len(self.own_positions)]
        return _add_own_positions(x_TH, self.positions, rows_L)
