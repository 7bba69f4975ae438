"""Linear layers that are divided over the tp axis (arXiv:1909.08053).

Every backward pass adds its weight gradient to the `main_grad` of the weight and returns None for
it to autograd, so that accumulation over micro-batches costs no extra pass over memory.

Sequence parallelism (arXiv:2205.05198, section 4.2.2) divides tokens over the tp axis between these
layers. An all-gather before a column-parallel layer and a reduce-scatter after a row-parallel layer
replace the all-reduces and send the same bytes. Norms, residuals and pipeline transfers process
1/tp of the tokens. Rank r holds the r-th contiguous part of the tokens of a micro-batch. Attention
processes all of them.

Shapes: T tokens of a micro-batch, L = T / tp tokens of this rank, I and O local input and output
features.
"""

# ruff: noqa: N803, N806 (tensors carry their shape in the name)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from workers.trainer.comm.collectives import (
    all_reduce,
    finish,
    gather_rows,
    scatter_rows,
    start_all_reduce,
    start_gather_rows,
    start_scatter_rows,
)
from workers.trainer.comm.groups import AxisGroup
from workers.trainer.model.matrix_products import input_gradient, linear
from workers.trainer.model.parameters import ModelParameter


class SequenceColumnLinear(Function):
    """y = x W^T + b with W divided by rows: each rank computes its own outputs for every token.

    Forward: all-gather of the input over tp. Backward: reduce-scatter of the input gradient over
    tp, started before the weight gradient is computed.

    The gathered input is kept for the weight gradient. Megatron-LM keeps only the rank's share and
    gathers it again. This saves 2 (1 - 1/tp) hidden sizes per token and layer, but takes six
    all-gathers per layer instead of four: good where the network is otherwise idle, not where a
    CPU copies the bytes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_LI: Tensor,
        weight_OI: ModelParameter,
        bias_O: ModelParameter | None,
        group: AxisGroup,
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
    """residual + x W^T + b with W divided by columns: each rank computes a part of every output.

    Forward: reduce-scatter of the output over tp; then bias and residual are added to this rank's
    tokens, in place. Backward: all-gather of the output gradient over tp; meanwhile the bias
    gradient is computed from this rank's tokens.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        residual_LO: Tensor,
        weight_OI: ModelParameter,
        bias_O: ModelParameter | None,
        group: AxisGroup,
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


class ColumnLinear(Function):
    """y = x W^T + b with W divided by rows: each rank computes its own outputs.

    Forward: no communication. Backward: all-reduce of the input gradient over tp, started before
    the weight gradient is computed (f in arXiv:1909.08053).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight_OI: ModelParameter,
        bias_O: ModelParameter | None,
        group: AxisGroup | None,
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
    """residual + x W^T + b with W divided by columns: each rank computes a part of every output.

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
        group: AxisGroup | None,
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
    """A divided linear layer; subclasses name the functions that compute it."""

    whole: Callable[..., Tensor]
    """Computes the layer if every rank holds all tokens."""
    cut: Callable[..., Tensor]
    """Computes the layer if tokens are divided over tp (sequence parallelism)."""
    bias: ModelParameter | None

    def __init__(
        self,
        weight: ModelParameter,
        bias: ModelParameter | None,
        group: AxisGroup | None,
        *,
        cuts_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.weight, self.group = weight, group
        self.linear = type(self).cut if cuts_tokens else type(self).whole
        self.register_parameter("bias", bias)


class ColumnParallel(_ParallelLinear):
    """A linear layer whose outputs are divided over tp. Its input may be this rank's tokens."""

    whole, cut = _column_linear, sequence_column_linear

    def forward(self, x_TI: Tensor) -> Tensor:
        return self.linear(x_TI, self.weight, self.bias, self.group)


class RowParallel(_ParallelLinear):
    """A linear layer whose inputs are divided over tp; it adds its output to the residual."""

    whole, cut = _row_linear, sequence_row_linear

    def forward(self, x_TI: Tensor, residual_TO: Tensor) -> Tensor:
        return self.linear(x_TI, residual_TO, self.weight, self.bias, self.group)
