"""Normalisation over the hidden dim, of every token that the rank holds, without communication.

Shapes: T tokens, H hidden. Weight gradients go straight to `main_grad`.
"""

# ruff: noqa: N803, N806 (tensors carry their shape in the name)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from workers.trainer.kernels import EAGER, EPSILON, Kernels
from workers.trainer.parameters import ModelParameter


class LayerNormFunction(Function):
    """torch's fused LayerNorm, with its weight gradients added to the flat buffer."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_H: ModelParameter, bias_H: ModelParameter) -> Tensor:
        y_TH, mean_T1, rstd_T1 = torch.native_layer_norm(
            x_TH, weight_H.shape, weight_H, bias_H, EPSILON
        )
        ctx.save_for_backward(x_TH, mean_T1, rstd_T1)
        ctx.weight_H, ctx.bias_H = weight_H, bias_H
        return y_TH

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None, None]:
        x_TH, mean_T1, rstd_T1 = ctx.saved_tensors
        weight_H, bias_H = ctx.weight_H, ctx.bias_H
        grad_x_TH, grad_weight_H, grad_bias_H = torch.ops.aten.native_layer_norm_backward(
            grad_TH, x_TH, weight_H.shape, mean_T1, rstd_T1, weight_H, bias_H, [True, True, True]
        )
        weight_H.add_gradient(grad_weight_H)
        bias_H.add_gradient(grad_bias_H)
        return grad_x_TH, None, None


class RMSNormFunction(Function):
    """y = x / rms(x) * weight (arXiv:1910.07467), in fp32; torch's own is five times slower."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_H: ModelParameter, kernels: Kernels) -> Tensor:
        y_TH, rstd_T1 = kernels.rms_norm(x_TH, weight_H)
        ctx.save_for_backward(x_TH, rstd_T1)
        ctx.weight_H, ctx.kernels = weight_H, kernels
        return y_TH

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None, None]:
        x_TH, rstd_T1 = ctx.saved_tensors
        grad_x_TH, grad_weight_H = ctx.kernels.rms_norm_backward(
            grad_TH, x_TH, rstd_T1, ctx.weight_H
        )
        ctx.weight_H.add_gradient(grad_weight_H)
        return grad_x_TH, None, None


_layer_norm: Callable[..., Tensor] = LayerNormFunction.apply
_rms_norm: Callable[..., Tensor] = RMSNormFunction.apply


class LayerNorm(nn.Module):
    def __init__(self, weight: ModelParameter, bias: ModelParameter) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x_TH: Tensor) -> Tensor:
        return _layer_norm(x_TH, self.weight, self.bias)


class RMSNorm(nn.Module):
    def __init__(self, weight: ModelParameter) -> None:
        super().__init__()
        self.weight, self.kernels = weight, EAGER

    def forward(self, x_TH: Tensor) -> Tensor:
        return _rms_norm(x_TH, self.weight, self.kernels)
