"""The ends of the model, cut over tp by rows of the vocabulary: embedding and cross-entropy.

Shapes: T tokens of a micro-batch, B sequences, S positions, H hidden, V local rows of the
vocabulary.
"""

# ruff: noqa: N803, N806, N812 (tensors carry their shape in the name)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from workers.trainer.collectives import all_reduce, all_reduce_max
from workers.trainer.parameters import ModelParameter


class VocabEmbedding(Function):
    """Looks up the rows that this rank holds.

    Forward: all-reduce over tp of rows that are zero on all ranks but one. Backward: no
    communication.
    """

    @staticmethod
    def forward(
        ctx: Any,
        ids_T: Tensor,
        weight_VH: ModelParameter,
        first_row: int,
        group: ProcessGroup | None,
    ) -> Tensor:
        ctx.weight_VH = weight_VH
        if group is None:
            ctx.save_for_backward(ids_T, None)
            return F.embedding(ids_T, weight_VH)
        rows_T, elsewhere_T = _local_rows(ids_T, first_row, weight_VH.shape[0])
        ctx.save_for_backward(rows_T, elsewhere_T)
        x_TH = F.embedding(rows_T, weight_VH).masked_fill_(elsewhere_T[:, None], 0.0)
        all_reduce(x_TH, group)
        return x_TH

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[None, None, None, None]:
        rows_T, elsewhere_T = ctx.saved_tensors
        grad_TH = grad_TH.float()
        if elsewhere_T is not None:
            grad_TH = grad_TH.masked_fill(elsewhere_T[:, None], 0.0)
        ctx.weight_VH.main_grad.index_add_(0, rows_T, grad_TH)
        return None, None, None, None


class AddPositions(Function):
    """Adds the learned positions to the embedded tokens, in place; no communication."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, positions_SH: ModelParameter) -> Tensor:
        ctx.positions_SH = positions_SH
        ctx.mark_dirty(x_TH)
        x_TH.view(-1, *positions_SH.shape).add_(positions_SH)
        return x_TH

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None]:
        positions_SH = ctx.positions_SH
        positions_SH.main_grad.add_(grad_TH.view(-1, *positions_SH.shape).sum(0))
        return grad_TH, None


class VocabCrossEntropy(Function):
    """Mean cross-entropy of a micro-batch, in fp32; overwrites fp32 logits.

    Forward: two all-reduces over tp, the largest logit (so that no exponential overflows), then
    the sum of exponentials together with the target's logit. Backward: no communication.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, targets_T: Tensor, first_row: int, group: ProcessGroup | None
    ) -> Tensor:
        ctx.dtype = logits_TV.dtype
        exp_TV = logits_TV.float()
        largest_T = exp_TV.amax(-1)
        all_reduce_max(largest_T, group)
        exp_TV.sub_(largest_T[:, None])
        rows_T, elsewhere_T = _local_rows(targets_T, first_row, exp_TV.shape[1])
        target_T = exp_TV.gather(1, rows_T[:, None]).squeeze(1).masked_fill_(elsewhere_T, 0.0)
        sums_2T = torch.stack((exp_TV.exp_().sum(-1), target_T))
        all_reduce(sums_2T, group)
        ctx.save_for_backward(exp_TV, sums_2T[0], rows_T, elsewhere_T)
        return (sums_2T[0].log() - sums_2T[1]).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        exp_TV, sum_T, rows_T, elsewhere_T = ctx.saved_tensors
        scale = grad / rows_T.numel()
        grad_TV = exp_TV.mul_((scale / sum_T)[:, None])
        minus_T = torch.where(elsewhere_T, torch.zeros_like(scale), -scale)
        grad_TV.scatter_add_(1, rows_T[:, None], minus_T[:, None])
        return grad_TV.to(ctx.dtype), None, None, None


def _local_rows(ids_T: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Row of each id on this rank (0 where it is elsewhere), and where it is elsewhere."""
    rows_T = ids_T - first_row
    elsewhere_T = (rows_T < 0) | (rows_T >= num_rows)
    return rows_T.masked_fill_(elsewhere_T, 0), elsewhere_T


_embed: Callable[..., Tensor] = VocabEmbedding.apply
_add_positions: Callable[..., Tensor] = AddPositions.apply
vocab_cross_entropy: Callable[..., Tensor] = VocabCrossEntropy.apply


class Embedding(nn.Module):
    """Tokens to the residual stream, with learned positions where the family has them."""

    positions: ModelParameter | None

    def __init__(
        self,
        weight: ModelParameter,
        positions: ModelParameter | None,
        *,
        tp_rank: int,
        group: ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.weight, self.group = weight, group
        self.register_parameter("positions", positions)
        self.first_row = tp_rank * weight.shape[0]

    def forward(self, ids_T: Tensor) -> Tensor:
        x_TH = _embed(ids_T, self.weight, self.first_row, self.group)
        if self.positions is None:
            return x_TH
        return _add_positions(x_TH, self.positions)
