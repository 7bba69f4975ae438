"""Linear layers that are divided over the tp axis (arXiv:1909.08053).

Every backward pass adds its weight gradient to the `main_grad` of the weight and returns None for
it to autograd, so that accumulation over micro-batches costs no extra pass over memory.

Sequence parallelism (arXiv:2205.05198, section 4.2.2) divides tokens over the tp axis between these
layers. An all-gather before a column-parallel layer and a reduce-scatter after a row-parallel layer
replace the all-reduces and send the same bytes. Norms, residuals and pipeline transfers process
1/tp of the tokens. Rank r holds the r-th contiguous part of the tokens of a micro-batch. Attention
processes all of them.

Tensor columns (arXiv:2305.13525) divide the other side of every weight, and the features of the
residual stream: a column-parallel layer sums its outputs over columns, and a row-parallel layer the
gradients of its inputs. Between the layers nothing moves, since their roles alternate.

Shapes: T tokens of a micro-batch, L = T / tp tokens of this rank, I and O local input and output
features, H hidden, C features of this rank.
"""

# ruff: noqa: N803, N806 (tensors carry their shape in the name)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from layout_tuner.workers.trainer.comm.collectives import (
    Pending,
    all_reduce,
    finish,
    gather_columns,
    gather_rows,
    scatter_columns,
    scatter_rows,
    start_all_reduce,
    start_gather_rows,
    start_scatter_rows,
)
from layout_tuner.workers.trainer.comm.groups import AxisGroup
from layout_tuner.workers.trainer.model.backward import Remade
from layout_tuner.workers.trainer.model.matrix_products import input_gradient, linear
from layout_tuner.workers.trainer.model.parameters import ModelParameter


class ColumnLinear(Function):
    """y = x W^T + b with W divided by rows: each rank computes its own outputs for every token.

    Forward: no communication; where tokens are cut, an all-gather of the input over tp; an
    all-reduce of the output over tensor columns. Backward:
    an all-reduce of the input gradient over tp (f in arXiv:1909.08053); where tokens are cut, a
    reduce-scatter. Either is started before the weight gradient is computed.

    The gathered input is kept for the weight gradient, unless it is remade: then it is gathered
    again, too. Megatron-LM keeps only the rank's share and
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
        layer: _ParallelLinear,
        remade: Remade | None,
    ) -> Tensor:
        x_TI = x_LI if layer.token_group is None else gather_rows(x_LI, layer.token_group)
        ctx.save_for_backward(x_TI if remade is None else None)
        ctx.weight_OI, ctx.bias_O, ctx.layer, ctx.remade = weight_OI, bias_O, layer, remade
        if layer.columns is None:
            return linear(x_TI, weight_OI, bias_O)
        y_TO = linear(x_TI, weight_OI)
        all_reduce(y_TO, layer.columns)
        return y_TO if bias_O is None else y_TO.add_(bias_O)

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor, None, None, None, None]:
        (x_TI,), group = ctx.saved_tensors, ctx.layer.token_group
        if x_TI is None:
            x_TI = ctx.remade.again()
            x_TI = x_TI if group is None else gather_rows(x_TI, group)
        grad_LI = grad_TI = input_gradient(grad_TO, ctx.weight_OI)
        if group is None:
            summing = start_all_reduce(grad_TI, ctx.layer.group)
        else:
            grad_LI, summing = start_scatter_rows(grad_TI, group)
        summing = ctx.layer.overlapped(summing)
        ctx.weight_OI.add_product(grad_TO.t(), x_TI)
        _add_bias_gradient(ctx, grad_TO)
        finish(summing)
        return grad_LI, None, None, None, None


class RowLinear(Function):
    """residual + x W^T + b with W divided by columns: each rank computes a part of every output.

    Forward: all-reduce of the output over tp (g in arXiv:1909.08053); where tokens are cut, a
    reduce-scatter. Then bias and residual are added to this rank's tokens, in place; a residual of
    None is none. Backward: no
    communication; where tokens are cut, an all-gather of the output gradient over tp, while the
    bias gradient is computed from this rank's tokens.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        residual_LO: Tensor | None,
        weight_OI: ModelParameter,
        bias_O: ModelParameter | None,
        layer: _ParallelLinear,
        remade: Remade | None,
    ) -> Tensor:
        ctx.save_for_backward(x_TI if remade is None else None)
        ctx.weight_OI, ctx.bias_O, ctx.layer, ctx.remade = weight_OI, bias_O, layer, remade
        y_LO = linear(x_TI, weight_OI)
        if layer.token_group is None:
            all_reduce(y_LO, layer.group)
        else:
            y_LO = scatter_rows(y_LO, layer.token_group)
        if bias_O is not None:
            y_LO.add_(bias_O)
        return y_LO if residual_LO is None else y_LO.add_(residual_LO)

    @staticmethod
    def backward(ctx: Any, grad_LO: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        (x_TI,), layer = ctx.saved_tensors, ctx.layer
        residual_LO = grad_LO if ctx.needs_input_grad[1] else None
        x_TI = ctx.remade.again() if x_TI is None else x_TI
        if layer.token_group is None:
            grad_TI = input_gradient(grad_LO, ctx.weight_OI)
            summing = layer.overlapped(start_all_reduce(grad_TI, layer.columns))
            ctx.weight_OI.add_product(grad_LO.t(), x_TI)
            _add_bias_gradient(ctx, grad_LO)
            finish(summing)
            return grad_TI, residual_LO, None, None, None, None
        grad_TO, gathering = start_gather_rows(grad_LO, layer.token_group)
        _add_bias_gradient(ctx, grad_LO)
        finish(gathering)
        ctx.weight_OI.add_product(grad_TO.t(), x_TI)
        grad_TI = input_gradient(grad_TO, ctx.weight_OI)
        all_reduce(grad_TI, layer.columns)
        return grad_TI, residual_LO, None, None, None, None


def _add_bias_gradient(ctx: Any, grad_TO: Tensor) -> None:
    if ctx.bias_O is not None:
        ctx.bias_O.add_gradient(grad_TO.sum(0))


class GatherColumns(Function):
    """The whole features of tokens, of which each rank of the tensor columns has some.

    Forward: an all-gather over columns. Backward: a reduce-scatter over columns.
    """

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, columns: AxisGroup) -> Tensor:
        ctx.columns = columns
        return gather_columns(x_TC, columns)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None]:
        return scatter_columns(grad_TH, ctx.columns), None


whole_features: Callable[[Tensor, AxisGroup], Tensor] = GatherColumns.apply
_column_linear: Callable[..., Tensor] = ColumnLinear.apply
_row_linear: Callable[..., Tensor] = RowLinear.apply


class _ParallelLinear(nn.Module):
    """A linear layer that is divided over tp and tensor columns.

    Args:
        weight: this rank's slice.
        bias: this rank's slice, or the whole bias of a row-parallel layer; None: there is none.
        group: the tp group; None: there is one rank.
        columns: the group of tensor columns; None: there is one rank.
        cuts_tokens: whether the tokens beside the layer are divided over tp too.
        overlaps: whether the input gradient is summed while the weight gradient is computed.
    """

    bias: ModelParameter | None

    def __init__(
        self,
        weight: ModelParameter,
        bias: ModelParameter | None,
        group: AxisGroup | None,
        *,
        columns: AxisGroup | None = None,
        cuts_tokens: bool = False,
        overlaps: bool = True,
    ) -> None:
        super().__init__()
        self.weight, self.group, self.columns = weight, group, columns
        self.token_group, self.overlaps = group if cuts_tokens else None, overlaps
        self.register_parameter("bias", bias)

    def overlapped(self, work: Pending | None) -> Pending | None:
        """Returns the work, to be awaited later; without overlap, waits for it here."""
        if self.overlaps:
            return work
        finish(work)
        return None


class ColumnParallel(_ParallelLinear):
    """A linear layer whose outputs are divided over tp. Its input may be this rank's tokens.

    The input is not kept where it is remade; the same of `RowParallel`.
    """

    def forward(self, x_LI: Tensor, remade: Remade | None = None) -> Tensor:
        return _column_linear(x_LI, self.weight, self.bias, self, remade)


class RowParallel(_ParallelLinear):
    """A linear layer whose inputs are divided over tp; it adds its output to the residual."""

    def forward(
        self, x_TI: Tensor, residual_LO: Tensor | None, remade: Remade | None = None
    ) -> Tensor:
        return _row_linear(x_TI, residual_LO, self.weight, self.bias, self, remade)
