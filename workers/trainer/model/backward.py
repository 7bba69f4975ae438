"""Backward passes: calls of autograd's engine, and full recomputation of a block.

Shapes: T tokens that the rank holds of a micro-batch, H hidden.
"""

# ruff: noqa: N803, N806 (tensors carry their shape in the name)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge


def run_backward(output: Tensor | GradientEdge, gradient: Tensor) -> None:
    """Runs the backward pass of one output, like `torch.autograd.backward`.

    It calls the engine directly: torch's wrapper checks shapes symbolically and imports sympy for
    that, which costs every rank 0.3 s in its first step.
    """
    Variable._execution_engine.run_backward(
        (output,),
        (gradient,),
        False,  # keep the graph
        False,  # make a graph of the gradients
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def gradients_of(
    output: Tensor, gradient: Tensor, inputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The gradients of the inputs of one output, like `torch.autograd.grad`."""
    return Variable._execution_engine.run_backward(
        (output,),
        (gradient,),
        False,  # keep the graph
        False,  # make a graph of the gradients
        inputs,
        allow_unreachable=False,
        accumulate_grad=False,
    )


class Recomputed(Function):
    """Full recomputation: keeps only the block's input, and runs its forward pass again.

    Forward: communicates over tp as the block's forward pass does. Backward: as the block's forward
    pass, then as its backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, block: nn.Module) -> Tensor:
        ctx.save_for_backward(x_TH)
        ctx.block = block
        y_TH: Tensor = block(x_TH)
        return y_TH

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, None]:
        (saved_TH,) = ctx.saved_tensors
        x_TH = saved_TH.detach().requires_grad_()
        with torch.enable_grad():
            start = get_gradient_edge(ctx.block(x_TH))  # the output itself is not needed
        run_backward(start, grad_TH)
        return x_TH.grad, None


recomputed: Callable[[Tensor, nn.Module], Tensor] = Recomputed.apply
