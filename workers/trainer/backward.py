"""Starting a backward pass."""

from __future__ import annotations

from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge


def run_backward(output: Tensor | GradientEdge, gradient: Tensor) -> None:
    """What `torch.autograd.backward` does for one output whose gradient is known.

    Straight to the engine: torch's wrapper checks shapes symbolically, and for that imports sympy,
    which costs every rank 0.3 s in its first step.
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
    """What `torch.autograd.grad` returns for one output whose gradient is known."""
    return Variable._execution_engine.run_backward(
        (output,),
        (gradient,),
        False,  # keep the graph
        False,  # make a graph of the gradients
        inputs,
        allow_unreachable=False,
        accumulate_grad=False,
    )
