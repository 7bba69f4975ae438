"""Backward passes: a call of autograd's engine, and recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
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


class Recomputed(Function):
    """Recomputation: keeps only the input of a part of the model, and runs its forward pass again.

    Forward: communicates as that pass does. Backward: as the forward pass, then as its backward
    pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.compute = compute
        return compute(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            start = get_gradient_edge(ctx.compute(x))  # the output itself is not needed
        run_backward(start, gradient)
        return x.grad, None


recomputed: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor] = Recomputed.apply
