"""Full recomputation: a block's activations are made again in the backward pass.

Shapes: T tokens that the rank holds of a micro-batch, H hidden.
"""

# ruff: noqa: N803, N806 (tensors carry their shape in the name)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from workers.trainer.backward import run_backward


class Recomputed(Function):
    """Runs a block twice instead of keeping its activations: only its input is kept.

    Forward and backward communicate what the block's forward communicates; backward what its
    backward does, too.
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
            start = get_gradient_edge(ctx.block(x_TH))  # what follows needs the graph alone
        run_backward(start, grad_TH)
        return x_TH.grad, None


recomputed: Callable[[Tensor, nn.Module], Tensor] = Recomputed.apply
