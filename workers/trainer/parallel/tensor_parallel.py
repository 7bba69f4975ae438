"""Linear layers that are cut over the tp axis (arXiv:1909.08053).

Shapes: T tokens of a micro-batch, I and O local input and output features.
Every function here adds its weight gradient straight to the weight's `main_grad` and returns none
to autograd, so that accumulation over micro-batches costs no extra pass.
"""

# ruff: noqa: N803, N806 (tensors carry their shape in the name)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from workers.trainer.collectives import all_reduce, finish, start_all_reduce
from workers.trainer.groups import Group
from workers.trainer.parameters import ModelParameter
from workers.trainer.products import input_gradient, linear
from workers.trainer.sequence_parallel import sequence_column_linear, sequence_row_linear


class ColumnLinear(Function):
    """y = x W^T + b with W cut by rows: each rank computes its own outputs.

    Forward: no communication. Backward: all-reduce of the input gradient over tp, started before
    the weight gradient is computed (f in arXiv:1909.08053).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight_OI: ModelParameter,
        bias_O: ModelParameter | None,
        group: Group | None,
    ) -> Tensor:
        ctx.save_for_backward(x_TI)
        ctx.weight_OI, ctx.bias_O, ctx.group = weight_OI, bias_O, group
        return linear(x_TI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor, None, None, None]:
        (x_TI,) = ctx.saved_tensors
        grad_TI = input_gradient(grad_TO, ctx.weight_OI)
        reduction = start_all_reduce(grad_TI, ctx.group)
        ctx.weight_OI.add_product(grad_TO.t(), x_TI)
        if ctx.bias_O is not None:
            ctx.bias_O.add_gradient(grad_TO.sum(0))
        finish(reduction)
        return grad_TI, None, None, None


class RowLinear(Function):
    """residual + x W^T + b with W cut by columns: each rank computes a part of every output.

    Forward: all-reduce of the output over tp (g in arXiv:1909.08053); then bias and residual are
    added, in place. Backward: no communication.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        residual_TO: Tensor,
        weight_OI: ModelParameter,
        bias_O: ModelParameter | None,
        group: Group | None,
    ) -> Tensor:
        ctx.save_for_backward(x_TI)
        ctx.weight_OI, ctx.bias_O = weight_OI, bias_O
        y_TO = linear(x_TI, weight_OI)
        all_reduce(y_TO, group)
        if bias_O is not None:
            y_TO.add_(bias_O)
        return y_TO.add_(residual_TO)

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (x_TI,) = ctx.saved_tensors
        grad_TI = input_gradient(grad_TO, ctx.weight_OI)
        ctx.weight_OI.add_product(grad_TO.t(), x_TI)
        if ctx.bias_O is not None:
            ctx.bias_O.add_gradient(grad_TO.sum(0))
        return grad_TI, grad_TO, None, None, None


_column_linear: Callable[..., Tensor] = ColumnLinear.apply
_row_linear: Callable[..., Tensor] = RowLinear.apply


class _ParallelLinear(nn.Module):
    """What the two have in common: the function that computes them is chosen by their kind."""

    whole: Callable[..., Tensor]
    """Computes the layer where every rank holds all tokens."""
    cut: Callable[..., Tensor]
    """Computes it where tokens are cut over tp."""
    bias: ModelParameter | None

    def __init__(
        self,
        weight: ModelParameter,
        bias: ModelParameter | None,
        group: Group | None,
        *,
        cuts_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.weight, self.group = weight, group
        self.linear = type(self).cut if cuts_tokens else type(self).whole
        self.register_parameter("bias", bias)


class ColumnParallel(_ParallelLinear):
    """A linear layer whose outputs are cut over tp; where tokens are cut too, it gathers them."""

    whole, cut = _column_linear, sequence_column_linear

    def forward(self, x_TI: Tensor) -> Tensor:
        return self.linear(x_TI, self.weight, self.bias, self.group)


class RowParallel(_ParallelLinear):
    """A linear layer whose inputs are cut over tp; it adds its output to the residual stream."""

    whole, cut = _row_linear, sequence_row_linear

    def forward(self, x_TI: Tensor, residual_TO: Tensor) -> Tensor:
        return self.linear(x_TI, residual_TO, self.weight, self.bias, self.group)
