"""What a Llama block does between its matrix products: SwiGLU and rotary positions.

Shapes: T tokens of a micro-batch, S positions, F local feed-forward width, D head size,
M heads of a fused projection (queries, keys, values), R those of them that are rotated.
"""

# ruff: noqa: N803, N806 (tensors carry their shape in the name)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workers.trainer.kernels import EAGER, Kernels


class SwiGLU(Function):
    """silu(gate) * up of a fused projection (arXiv:2002.05202); keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(gate_up_T2F)
        ctx.kernels = kernels
        return kernels.swiglu(gate_up_T2F)

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor, None]:
        (gate_up_T2F,) = ctx.saved_tensors
        return ctx.kernels.swiglu_backward(gate_up_T2F, grad_TF), None


class Rotate(Function):
    """Turns queries and keys by their position (arXiv:2104.09864), in place."""

    @staticmethod
    def forward(
        ctx: Any, qkv_TM: Tensor, cos_SD: Tensor, sin_SD: Tensor, num_rotated: int
    ) -> Tensor:
        ctx.cos_SD, ctx.sin_SD, ctx.num_rotated = cos_SD, sin_SD, num_rotated
        ctx.mark_dirty(qkv_TM)
        _rotate(qkv_TM, cos_SD, sin_SD, num_rotated, sign=1.0)
        return qkv_TM

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[Tensor, None, None, None]:
        # The gradient is attention's own, made for this, so nobody else reads it.
        _rotate(grad_TM, ctx.cos_SD, ctx.sin_SD, ctx.num_rotated, sign=-1.0)
        return grad_TM, None, None, None


_swiglu: Callable[..., Tensor] = SwiGLU.apply
rotate: Callable[..., Tensor] = Rotate.apply


def swiglu(gate_up_T2F: Tensor, kernels: Kernels = EAGER) -> Tensor:
    """From gate and up, side by side, to the activation."""
    return _swiglu(gate_up_T2F, kernels)


def _rotate(
    qkv_TM: Tensor, cos_SD: Tensor, sin_SD: Tensor, num_rotated: int, *, sign: float
) -> None:
    """Rotates the first heads, in place; the tables hold half a head."""
    seq_length, half = cos_SD.shape
    heads_BSRD = qkv_TM.view(-1, seq_length, qkv_TM.shape[-1] // (2 * half), 2 * half)
    first, second = heads_BSRD[:, :, :num_rotated].chunk(2, dim=-1)
    cos, sin = cos_SD[:, None], sin_SD[:, None]
    turned = (second * cos).addcmul_(first, sin, value=sign)
    first.mul_(cos).addcmul_(second, sin, value=-sign)
    second.copy_(turned)


def rotary_tables(
    seq_length: int, head_size: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, for the first half of a head."""
    powers = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    angles_SD = torch.outer(torch.arange(seq_length, dtype=torch.float64), 10000.0**-powers)
    return (
        angles_SD.cos().to(device=device, dtype=dtype),
        angles_SD.sin().to(device=device, dtype=dtype),
    )
