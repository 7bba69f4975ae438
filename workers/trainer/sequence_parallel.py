"""Linear layers between which the tokens are cut over the tp axis (arXiv:2205.05198, section 4.2.2).

Where a layer without sequence parallelism all-reduces, one with it gathers before and scatters
after: the same bytes, while norms, residuals and pipeline transfers see 1/tp of the tokens. Rank
r holds the r-th stretch of the micro-batch's tokens; attention sees all of them.

Shapes: T tokens of a micro-batch, L = T / tp tokens of this rank, I and O local input and output
features.
"""

# ruff: noqa: N803, N806 (tensors carry their shape in the name)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function

from workers.trainer.collectives import (
    finish,
    gather_rows,
    scatter_rows,
    start_gather_rows,
    start_scatter_rows,
)
from workers.trainer.groups import Group
from workers.trainer.parameters import ModelParameter
from workers.trainer.products import input_gradient, linear


class SequenceColumnLinear(Function):
    """y = x W^T + b with W cut by rows: each rank computes its own outputs, of every token.

    Forward: all-gather of the input over tp. Backward: reduce-scatter of the input gradient over
    tp, started before the weight gradient is computed.

    The gathered input is kept for the weight gradient. Megatron-LM keeps the rank's share and
    gathers it again, which saves 2 (1 - 1/tp) hidden sizes a token and layer, but makes six
    all-gathers a layer of four: worth it where the network is idle meanwhile, not where a CPU
    moves the bytes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_LI: Tensor,
        weight_OI: ModelParameter,
        bias_O: ModelParameter | None,
        group: Group,
    ) -> Tensor:
        x_TI = gather_rows(x_LI, group)
        ctx.save_for_backward(x_TI)
        ctx.weight_OI, ctx.bias_O, ctx.group = weight_OI, bias_O, group
        return linear(x_TI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor, None, None, None]:
        (x_TI,) = ctx.saved_tensors
        grad_TI = input_gradient(grad_TO, ctx.weight_OI)
        grad_LI, scattering = start_scatter_rows(grad_TI, ctx.group)
        ctx.weight_OI.add_product(grad_TO.t(), x_TI)
        if ctx.bias_O is not None:
            ctx.bias_O.add_gradient(grad_TO.sum(0))
        finish(scattering)
        return grad_LI, None, None, None


class SequenceRowLinear(Function):
    """residual + x W^T + b with W cut by columns: each rank computes a part of every output.

    Forward: reduce-scatter of the output over tp; then bias and residual are added to this rank's
    tokens, in place. Backward: all-gather of the output gradient over tp, behind which the bias
    gradient is computed, of this rank's tokens alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        residual_LO: Tensor,
        weight_OI: ModelParameter,
        bias_O: ModelParameter | None,
        group: Group,
    ) -> Tensor:
        ctx.save_for_backward(x_TI)
        ctx.weight_OI, ctx.bias_O, ctx.group = weight_OI, bias_O, group
        y_LO = scatter_rows(linear(x_TI, weight_OI), group)
        if bias_O is not None:
            y_LO.add_(bias_O)
        return y_LO.add_(residual_LO)

    @staticmethod
    def backward(ctx: Any, grad_LO: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (x_TI,) = ctx.saved_tensors
        grad_TO, gathering = start_gather_rows(grad_LO, ctx.group)
        if ctx.bias_O is not None:
            ctx.bias_O.add_gradient(grad_LO.sum(0))
        finish(gathering)
        ctx.weight_OI.add_product(grad_TO.t(), x_TI)
        return input_gradient(grad_TO, ctx.weight_OI), grad_LO, None, None, None


sequence_column_linear: Callable[..., Tensor] = SequenceColumnLinear.apply
sequence_row_linear: Callable[..., Tensor] = SequenceRowLinear.apply
