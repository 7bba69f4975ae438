"""torch.compile, as an option: the pointwise kernels of a block, each fused into one.

What torch writes code for is what lies between the products: there eager operators go over memory
again and again. The products themselves, attention and communication are library calls either way,
and weight gradients go straight to the flat buffer, which a compiler of whole blocks would not see.
Rotary positions stay eager: compiled, they take up to twice as long on a CPU (decision 0017).

Shapes: those of `workers.trainer.kernels`.
"""

# ruff: noqa: N803, N806 (tensors carry their shape in the name)

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from workers.trainer.errors import CompilerMissingError
from workers.trainer.kernels import EAGER, EPSILON, Kernels


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Gives these kernels to every layer of the model that calls any."""
    for module in model.modules():
        if isinstance(getattr(module, "kernels", None), Kernels):
            module.kernels = kernels  # type: ignore[assignment]


@functools.cache
def compiled_kernels(device_type: str) -> Kernels:
    """The kernels, compiled when first called; torch keeps what it compiled on disk for later ranks.

    While tensors are counted (`workers.trainer.memory`) the eager ones run: compiled code allocates
    where nobody sees it, and never more than they.

    Raises:
        CompilerMissingError: there is no C++ compiler (CPU), or no Triton (GPU).
    """
    _refuse_without_compiler(device_type)
    from torch._inductor import config

    config.compile_threads = 1  # a rank forks nothing
    written: dict[str, Callable[..., Any]] = {
        "swiglu": _swiglu,
        "swiglu_backward": _swiglu_backward,
        "rms_norm": _rms_norm,
        "rms_norm_backward": _rms_norm_backward,
    }
    return Kernels(
        **{
            field.name: _compiled(written[field.name], getattr(EAGER, field.name))
            for field in fields(Kernels)
        }
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


def _swiglu(gate_up_T2F: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
    return (gate_TF * torch.sigmoid(gate_TF) * up_TF).to(gate_up_T2F.dtype)


def _swiglu_backward(gate_up_T2F: Tensor, grad_TF: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
    sigmoid_TF, grad_TF = torch.sigmoid(gate_TF), grad_TF.float()
    slope_TF = sigmoid_TF * (1.0 + gate_TF * (1.0 - sigmoid_TF))
    grad_T2F = torch.cat((grad_TF * up_TF * slope_TF, grad_TF * gate_TF * sigmoid_TF), dim=-1)
    return grad_T2F.to(gate_up_T2F.dtype)


def _rms_norm(x_TH: Tensor, weight_H: Tensor) -> tuple[Tensor, Tensor]:
    x32_TH = x_TH.float()
    rstd_T1 = torch.rsqrt(x32_TH.square().mean(-1, keepdim=True) + EPSILON)
    return (x32_TH * rstd_T1 * weight_H).to(x_TH.dtype), rstd_T1


def _rms_norm_backward(
    grad_TH: Tensor, x_TH: Tensor, rstd_T1: Tensor, weight_H: Tensor
) -> tuple[Tensor, Tensor]:
    normal_TH, grad32_TH = x_TH.float() * rstd_T1, grad_TH.float()
    product_TH = normal_TH * grad32_TH
    mean_T1 = (product_TH * weight_H).mean(-1, keepdim=True)
    grad_x_TH = (grad32_TH * weight_H - normal_TH * mean_T1) * rstd_T1
    return grad_x_TH.to(x_TH.dtype), product_TH.sum(0)
