"""The pointwise kernels of a block: eager, and of a Llama compiled by torch.compile as an option.

Only the arithmetic between the matrix products is compiled: eager operators read and write memory
once for each operator. Matrix products, attention and communication are library calls in both
cases, and weight gradients are added to the flat buffer, which a compiler of whole blocks would
not see. Rotary positions stay eager: compiled, they take up to twice as long on a CPU.

The eager kernels work in place where they can. Nothing here communicates.

Shapes: T tokens of a micro-batch, H hidden, F local feed-forward width, U = 2 F outputs of gate
and up, or F of up alone.
"""

# ruff: noqa: N803, N806, N812 (tensors carry their shape in the name)

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

from layout_tuner.search_spaces.models.model_fields import Activation
from layout_tuner.workers.trainer.errors import CompilerMissingError
from layout_tuner.workers.trainer.model.parameters import ModelParameter

EPSILON: Final = 1e-5
"""Added to the mean square (RMSNorm) or the variance (LayerNorm)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The pointwise functions that layers call: the eager set, or the compiled set."""

    swiglu: Callable[[Tensor], Tensor]
    """(gate_up_T2F) -> y_TF"""
    swiglu_backward: Callable[[Tensor, Tensor], Tensor]
    """(gate_up_T2F, grad_TF) -> grad_T2F"""
    rms_norm: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """(x_TH, weight_H) -> y_TH, rstd_T1; rstd is the inverse root mean square, in fp32."""
    rms_norm_backward: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(grad_TH, x_TH, rstd_T1, weight_H) -> grad_x_TH, grad_weight_H; the latter in fp32."""

    def activate(self, activation: Activation, up_TU: Tensor) -> Tensor:
        """What a feed-forward does between its products, (T, F); a GELU is that of tanh."""
        if activation == "swiglu":
            return self.swiglu(up_TU)
        if activation == "geglu":
            gate_TF, up_TF = up_TU.chunk(2, dim=-1)
            return _gelu(gate_TF).mul_(up_TF)
        return _gelu(up_TU) if activation == "gelu" else F.relu(up_TU).square_()

    def activate_backward(self, activation: Activation, up_TU: Tensor, grad_TF: Tensor) -> Tensor:
        if activation == "swiglu":
            return self.swiglu_backward(up_TU, grad_TF)
        if activation == "geglu":
            return _gated_backward(up_TU, grad_TF, _gelu, _gelu_backward)
        if activation == "gelu":
            return torch.ops.aten.gelu_backward(grad_TF, up_TU, approximate="tanh")  # type: ignore[no-any-return]
        return F.relu(up_TU).mul_(grad_TF).mul_(2.0)


_gelu = functools.partial(F.gelu, approximate="tanh")
_gelu_backward = functools.partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh")


def _swiglu(gate_up_T2F: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return torch.ops.aten.silu(gate_TF).mul_(up_TF)  # type: ignore[no-any-return]


def _swiglu_backward(gate_up_T2F: Tensor, grad_TF: Tensor) -> Tensor:
    silu = torch.ops.aten.silu
    return _gated_backward(gate_up_T2F, grad_TF, silu, torch.ops.aten.silu_backward.grad_input)


def _gated_backward(
    gate_up_T2F: Tensor,
    grad_TF: Tensor,
    activate: Callable[[Tensor], Tensor],
    backward: Callable[..., Tensor],
) -> Tensor:
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    grad_T2F = torch.empty_like(gate_up_T2F)
    grad_gate_TF, grad_up_TF = grad_T2F.chunk(2, dim=-1)
    torch.mul(activate(gate_TF), grad_TF, out=grad_up_TF)
    backward(grad_TF * up_TF, gate_TF, grad_input=grad_gate_TF)
    return grad_T2F


def _rms_norm(x_TH: Tensor, weight_H: Tensor) -> tuple[Tensor, Tensor]:
    norm_T1 = torch.linalg.vector_norm(x_TH, dim=-1, keepdim=True, dtype=torch.float32)
    rstd_T1 = norm_T1.square_().div_(x_TH.shape[-1]).add_(EPSILON).rsqrt_()
    y_TH: Tensor = (x_TH * rstd_T1).mul_(weight_H)
    return y_TH.to(x_TH.dtype), rstd_T1


def _rms_norm_backward(
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
    swiglu=_swiglu,
    swiglu_backward=_swiglu_backward,
    rms_norm=_rms_norm,
    rms_norm_backward=_rms_norm_backward,
)
"""Kernels of plain torch operators."""


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "kernels", None), Kernels):
            module.kernels = kernels  # type: ignore[assignment]


@functools.cache
def compiled_kernels(device_type: str) -> Kernels:
    """The kernels, each compiled at its first call; torch caches the code on disk for other ranks.

    While live tensors are counted (`rank_memory.LogicalPeak`) the eager kernels run instead. The
    count would miss what compiled code allocates, which is never more than the eager kernels do.

    Raises:
        CompilerMissingError: there is no C++ compiler (CPU), or no Triton (GPU).
    """
    _refuse_without_compiler(device_type)
    from torch._inductor import config

    config.compile_threads = 1  # a rank must not fork
    return Kernels(
        swiglu=_compiled(_fused_swiglu, _swiglu),
        swiglu_backward=_compiled(_fused_swiglu_backward, _swiglu_backward),
        rms_norm=_compiled(_fused_rms_norm, _rms_norm),
        rms_norm_backward=_compiled(_fused_rms_norm_backward, _rms_norm_backward),
    )


def _compiled(function: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
    fused = torch.compile(function, fullgraph=True, dynamic=False)

    def call(*arguments: Any) -> Any:
        if _get_current_dispatch_mode() is not None:
            return eager(*arguments)
        with torch.no_grad():
            return fused(*(a.detach() if isinstance(a, Tensor) else a for a in arguments))

    return call


def _refuse_without_compiler(device_type: str) -> None:
    if device_type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise CompilerMissingError(
                "compile=true needs Triton for this GPU and it cannot be imported; "
                "install the triton that belongs to this torch, or leave compile out"
            )
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise CompilerMissingError(
            "compile=true needs a C++ compiler on this machine and none was found; "
            "install g++ or clang++, name one in CXX, or leave compile out"
        ) from error


def _fused_swiglu(gate_up_T2F: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
    return (gate_TF * torch.sigmoid(gate_TF) * up_TF).to(gate_up_T2F.dtype)


def _fused_swiglu_backward(gate_up_T2F: Tensor, grad_TF: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
    sigmoid_TF, grad_TF = torch.sigmoid(gate_TF), grad_TF.float()
    slope_TF = sigmoid_TF * (1.0 + gate_TF * (1.0 - sigmoid_TF))
    grad_T2F = torch.cat((grad_TF * up_TF * slope_TF, grad_TF * gate_TF * sigmoid_TF), dim=-1)
    return grad_T2F.to(gate_up_T2F.dtype)


def _fused_rms_norm(x_TH: Tensor, weight_H: Tensor) -> tuple[Tensor, Tensor]:
    x32_TH = x_TH.float()
    rstd_T1 = torch.rsqrt(x32_TH.square().mean(-1, keepdim=True) + EPSILON)
    return (x32_TH * rstd_T1 * weight_H).to(x_TH.dtype), rstd_T1


def _fused_rms_norm_backward(
    grad_TH: Tensor, x_TH: Tensor, rstd_T1: Tensor, weight_H: Tensor
) -> tuple[Tensor, Tensor]:
    normal_TH, grad32_TH = x_TH.float() * rstd_T1, grad_TH.float()
    product_TH = normal_TH * grad32_TH
    mean_T1 = (product_TH * weight_H).mean(-1, keepdim=True)
    grad_x_TH = (grad32_TH * weight_H - normal_TH * mean_T1) * rstd_T1
    return grad_x_TH.to(x_TH.dtype), product_TH.sum(0)


class LayerNormFunction(Function):
    """torch's fused LayerNorm; its weight gradients are added to the flat buffer."""

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
    """y = x / rms(x) * weight (arXiv:1910.07467), computed in fp32.

    torch's own RMSNorm is five times slower.
    """

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


class QueryKeyNormFunction(Function):
    """RMSNorm of each head of query and key, in place; the weights of each are shared by its heads.

    The heads are kept as they were, beside the output.
    """

    @staticmethod
    def forward(ctx: Any, qkv_TM: Tensor, norm: QueryKeyNorm) -> Tensor:
        ctx.norm, ctx.kept = norm, []
        ctx.mark_dirty(qkv_TM)
        for part_TR, weight_D in norm.parts(qkv_TM):
            copy_TR = part_TR.clone(memory_format=torch.contiguous_format)
            x_RD = copy_TR.view(-1, len(weight_D))
            y_RD, rstd_R1 = norm.kernels.rms_norm(x_RD, weight_D)
            part_TR.copy_(y_RD.view_as(part_TR))
            ctx.kept.append((x_RD, rstd_R1))
        return qkv_TM

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[Tensor, None]:
        # Attention made this gradient, and nothing else reads it: it may be overwritten.
        norm = ctx.norm
        for (grad_TR, weight_D), (x_RD, rstd_R1) in zip(norm.parts(grad_TM), ctx.kept, strict=True):
            grad_RD = grad_TR.reshape(-1, len(weight_D))
            grad_x_RD, grad_weight_D = norm.kernels.rms_norm_backward(
                grad_RD, x_RD, rstd_R1, weight_D
            )
            grad_TR.copy_(grad_x_RD.view_as(grad_TR))
            weight_D.add_gradient(grad_weight_D)
        return grad_TM, None


class Activate(Function):
    """The activation between the products of a feed-forward. Only the input is kept.

    Of a gated one (arXiv:2002.05202) gate is in the first F columns, up in the others.
    """

    @staticmethod
    def forward(ctx: Any, up_TU: Tensor, activation: Activation, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(up_TU)
        ctx.activation, ctx.kernels = activation, kernels
        return kernels.activate(activation, up_TU)

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor, None, None]:
        (up_TU,) = ctx.saved_tensors
        return ctx.kernels.activate_backward(ctx.activation, up_TU, grad_TF), None, None


_apply_layer_norm: Callable[..., Tensor] = LayerNormFunction.apply
_apply_rms_norm: Callable[..., Tensor] = RMSNormFunction.apply
activate: Callable[..., Tensor] = Activate.apply
_apply_query_key_norm: Callable[..., Tensor] = QueryKeyNormFunction.apply


class LayerNorm(nn.Module):
    def __init__(self, weight: ModelParameter, bias: ModelParameter) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x_TH: Tensor) -> Tensor:
        return _apply_layer_norm(x_TH, self.weight, self.bias)


class RMSNorm(nn.Module):
    def __init__(self, weight: ModelParameter) -> None:
        super().__init__()
        self.weight, self.kernels = weight, EAGER

    def forward(self, x_TH: Tensor) -> Tensor:
        return _apply_rms_norm(x_TH, self.weight, self.kernels)


class QueryKeyNorm(nn.Module):
    """Norms of N query heads and K key heads, which come first in a fused projection of width M."""

    def __init__(
        self, query: ModelParameter, key: ModelParameter, *, num_heads: int, num_kv_heads: int
    ) -> None:
        super().__init__()
        self.query, self.key, self.kernels = query, key, EAGER
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads

    def parts(self, qkv_TM: Tensor) -> list[tuple[Tensor, ModelParameter]]:
        """The columns of the queries and of the keys, as views, each with its weight."""
        size = len(self.query)
        first, last = self.num_heads * size, (self.num_heads + self.num_kv_heads) * size
        return [(qkv_TM[:, :first], self.query), (qkv_TM[:, first:last], self.key)]

    def forward(self, qkv_TM: Tensor) -> Tensor:
        return _apply_query_key_norm(qkv_TM, self)
