"""The pointwise kernels of a Llama block, eager; `workers.trainer.compiled` has the same, compiled.

Shapes: T tokens of a micro-batch, H hidden, F local feed-forward width.
"""

# ruff: noqa: N803, N806 (tensors carry their shape in the name)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

EPSILON: Final = 1e-5
"""Added to the mean square of what is normalised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """What the layers call for their pointwise arithmetic; none of them communicates."""

    swiglu: Callable[[Tensor], Tensor]
    """From (T, 2F), gate and up, to (T, F)."""
    swiglu_backward: Callable[[Tensor, Tensor], Tensor]
    """From (T, 2F) and the gradient (T, F) to the gradient (T, 2F)."""
    rms_norm: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """From (T, H) and weights (H) to (T, H), and the inverse of each root mean square, (T, 1) in fp32."""
    rms_norm_backward: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """From the gradient, the input, those inverses and the weights to both gradients, the second in fp32."""


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return torch.ops.aten.silu(gate_TF).mul_(up_TF)  # type: ignore[no-any-return]


def swiglu_backward(gate_up_T2F: Tensor, grad_TF: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    grad_T2F = torch.empty_like(gate_up_T2F)
    grad_gate_TF, grad_up_TF = grad_T2F.chunk(2, dim=-1)
    torch.mul(torch.ops.aten.silu(gate_TF), grad_TF, out=grad_up_TF)
    torch.ops.aten.silu_backward.grad_input(grad_TF * up_TF, gate_TF, grad_input=grad_gate_TF)
    return grad_T2F


def rms_norm(x_TH: Tensor, weight_H: Tensor) -> tuple[Tensor, Tensor]:
    norm_T1 = torch.linalg.vector_norm(x_TH, dim=-1, keepdim=True, dtype=torch.float32)
    rstd_T1 = norm_T1.square_().div_(x_TH.shape[-1]).add_(EPSILON).rsqrt_()
    y_TH: Tensor = (x_TH * rstd_T1).mul_(weight_H)
    return y_TH.to(x_TH.dtype), rstd_T1


def rms_norm_backward(
    grad_TH: Tensor, x_TH: Tensor, rstd_T1: Tensor, weight_H: Tensor
) -> tuple[Tensor, Tensor]:
    normal_TH = x_TH * rstd_T1
    product_TH = normal_TH * grad_TH
    grad_weight_H = product_TH.sum(0)
    weight_H = weight_H.float()
    mean_T = (product_TH @ weight_H).div_(x_TH.shape[-1])
    grad_x_TH = torch.mul(grad_TH, weight_H, out=product_TH)
    grad_x_TH.addcmul_(normal_TH, mean_T[:, None], value=-1.0).mul_(rstd_T1)
    return grad_x_TH.to(x_TH.dtype), grad_weight_H


EAGER: Final = Kernels(
    swiglu=swiglu,
    swiglu_backward=swiglu_backward,
    rms_norm=rms_norm,
    rms_norm_backward=rms_norm_backward,
)
"""One torch operator after the other, in place where it may be."""
