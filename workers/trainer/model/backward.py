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

    def __init__(self, compute: Callable[..., Tensor], source: Remade | None = None) -> None:
        """Of a part with several inputs, the source makes the first one."""
        self._compute, self._source = compute, source
        self._inputs: list[Tensor] = []
        self._output: Tensor | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        self._inputs = [x.detach() for x in inputs[self._source is not None :]]
        return _make(self, *inputs)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._compute(*inputs)

    def again(self) -> Tensor:
        """The output, the same until the backward pass of the part."""
        if self._output is None:
            if self._source is not None:
                self._inputs.insert(0, self._source.again())
            assert self._inputs, "the part's backward pass has run"
            self._inputs = [x.detach().requires_grad_() for x in self._inputs]
            with torch.enable_grad():
                self._output = self._compute(*self._inputs)
        return self._output.detach()

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        """The gradients of the inputs."""
        self.again()
        assert self._output is not None
        inputs, start = self._inputs, get_gradient_edge(self._output)
        self._inputs, self._output = [], None
        run_backward(start, gradient)
        return [x.grad for x in inputs]


class _Make(Function):
    """Runs a part that is remade. Communicates forward as the part does, backward as it does."""

    @staticmethod
    def forward(ctx: Any, remade: Remade, *inputs: Tensor) -> Tensor:
        ctx.remade = remade
        return remade.forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.remade.backward(gradient)


_make: Callable[..., Tensor] = _Make.apply
