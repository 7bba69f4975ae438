"""Backward passes: a call of autograd's engine, and recomputation with or without the output."""

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


class Remade:
    """A part of the model whose output is not kept either: the backward pass makes it again.

    The function that takes the output saves this object in its place and calls `again` in its
    backward pass. The part itself keeps its input, or nothing where that is remade too (`source`).
    The first call of `again` communicates as the part's forward pass does.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor], source: Remade | None = None) -> None:
        self._compute, self._source = compute, source
        self._input: Tensor | None = None
        self._output: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._source is None:
            self._input = x.detach()
        return _make(x, self)

    def forward(self, x: Tensor) -> Tensor:
        return self._compute(x)

    def again(self) -> Tensor:
        """The output, the same until the backward pass of the part."""
        if self._output is None:
            x = self._input if self._source is None else self._source.again()
            assert x is not None, "the part's backward pass has run"
            self._input = x.detach().requires_grad_()
            with torch.enable_grad():
                self._output = self._compute(self._input)
        return self._output.detach()

    def backward(self, gradient: Tensor) -> Tensor | None:
        self.again()
        assert self._input is not None
        assert self._output is not None
        x, start = self._input, get_gradient_edge(self._output)
        self._input = self._output = None
        run_backward(start, gradient)
        return x.grad


class _Make(Function):
    """Runs a part that is remade. Communicates forward as the part does, backward as it does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, remade: Remade) -> Tensor:
        ctx.remade = remade
        return remade.forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        return ctx.remade.backward(gradient), None


_make: Callable[[Tensor, Remade], Tensor] = _Make.apply
