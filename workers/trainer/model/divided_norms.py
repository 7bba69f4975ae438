"""Norms of tokens whose features are divided over tensor columns, or whose heads over tp.

AxoNN's own port normalises each rank's features alone, which is another model. Here the statistics
are those of all features, so that the model is the same under every layout.

Shapes: T tokens that the rank holds of a micro-batch, C features of this rank, K statistics.
"""

# ruff: noqa: N803, N806 (tensors carry their shape in the name)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from layout_tuner.workers.trainer.comm.collectives import all_reduce, finish, start_all_reduce
from layout_tuner.workers.trainer.comm.groups import AxisGroup
from layout_tuner.workers.trainer.model.kernels import EPSILON, RMSNorm
from layout_tuner.workers.trainer.model.parameters import ModelParameter


class DividedNormFunction(Function):
    """LayerNorm, or without a bias RMSNorm, computed in fp32.

    Forward: an all-reduce over columns of two numbers a token, the sums of features and of their
    squares; of an RMSNorm of the squares alone. Backward: an all-reduce of as many, while the
    gradient of the weight is computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TC: Tensor,
        weight_C: ModelParameter,
        bias_C: ModelParameter | None,
        columns: AxisGroup,
    ) -> Tensor:
        ctx.weight_C, ctx.bias_C, ctx.columns = weight_C, bias_C, columns
        ctx.size = x_TC.shape[1] * columns.size
        mean_T1 = None
        if bias_C is None:
            norm_T = torch.linalg.vector_norm(x_TC, dim=-1, dtype=torch.float32)
            square_T1 = _mean(norm_T.square_()[None], ctx)[0]
        else:
            # Squares of a large mean would cancel in fp32, so the sums are fp64.
            spread_T, middle_T = torch.var_mean(x_TC.float(), -1, correction=0)
            middle_T = middle_T.double()
            means_KT = torch.stack((spread_T.double() + middle_T.square(), middle_T))
            square_T1, mean_T1 = _mean(means_KT.mul_(x_TC.shape[1]), ctx)
            square_T1 = square_T1.sub_(mean_T1.square()).float()
            mean_T1 = mean_T1.float()
        rstd_T1 = square_T1.add_(EPSILON).rsqrt_()
        ctx.save_for_backward(x_TC, mean_T1, rstd_T1)
        y_TC = _normal(x_TC, mean_T1, rstd_T1).mul_(weight_C)
        return (y_TC if bias_C is None else y_TC.add_(bias_C)).to(x_TC.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor, None, None, None]:
        x_TC, mean_T1, rstd_T1 = ctx.saved_tensors
        weight_C, bias_C = ctx.weight_C.float(), ctx.bias_C
        normal_TC, grad_TC = _normal(x_TC, mean_T1, rstd_T1), grad_TC.float()
        product_TC = normal_TC * grad_TC
        sums = [product_TC @ weight_C] + ([] if bias_C is None else [grad_TC @ weight_C])
        means_KT = torch.stack(sums).div_(ctx.size)
        summing = start_all_reduce(means_KT, ctx.columns)
        ctx.weight_C.add_gradient(product_TC.sum(0))
        if bias_C is not None:
            bias_C.add_gradient(grad_TC.sum(0))
        grad_x_TC = torch.mul(grad_TC, weight_C, out=product_TC)
        finish(summing)
        grad_x_TC.addcmul_(normal_TC, means_KT[0, :, None], value=-1.0)
        if bias_C is not None:
            grad_x_TC.sub_(means_KT[1, :, None])
        return grad_x_TC.mul_(rstd_T1).to(x_TC.dtype), None, None, None


def _mean(sums_KT: Tensor, ctx: Any) -> Tensor:
    """The means over all features, (K, T, 1), of the sums over this rank's."""
    all_reduce(sums_KT, ctx.columns)
    return sums_KT.div_(ctx.size)[:, :, None]


def _normal(x_TC: Tensor, mean_T1: Tensor | None, rstd_T1: Tensor) -> Tensor:
    """The normalised features in fp32, a new tensor."""
    return x_TC * rstd_T1 if mean_T1 is None else (x_TC - mean_T1).mul_(rstd_T1)


_apply: Callable[..., Tensor] = DividedNormFunction.apply


class DividedNorm(nn.Module):
    """LayerNorm, or without a bias RMSNorm, over tensor columns."""

    bias: ModelParameter | None

    def __init__(
        self, weight: ModelParameter, bias: ModelParameter | None, columns: AxisGroup
    ) -> None:
        super().__init__()
        self.weight, self.columns = weight, columns
        self.register_parameter("bias", bias)

    def forward(self, x_TC: Tensor) -> Tensor:
        return _apply(x_TC, self.weight, self.bias, self.columns)


class WidthNorm(nn.Module):
    """Norms of all query heads together, and of all key heads (OLMo 2).

    Communicates over tp, which divides the heads, as the norms of query and key do.
    """

    def __init__(self, query: RMSNorm | DividedNorm, key: RMSNorm | DividedNorm) -> None:
        super().__init__()
        self.query, self.key = query, key

    def forward(self, qkv_TM: Tensor) -> Tensor:
        sizes = [len(norm.weight) for norm in (self.query, self.key)]
        sizes.append(qkv_TM.shape[1] - sum(sizes))
        query, key, others = torch.split(qkv_TM, sizes, dim=1)
        # Copies, since the norms keep their inputs: views would keep all of the projection.
        normal = self.query(query.contiguous()), self.key(key.contiguous())
        return torch.cat((*normal, others), dim=1)
