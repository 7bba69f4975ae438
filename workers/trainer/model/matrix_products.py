"""The matrix products of a linear layer, by the library that is faster on this processor.

Shapes: T tokens of a micro-batch, I and O local input and output features; E experts, M rows that
are sorted by expert.
"""

# ruff: noqa: N803, N806, N812 (tensors carry their shape in the name)

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from layout_tuner.process_resources import kernel_text
from layout_tuner.workers.trainer.errors import LayoutUnsupportedError
from layout_tuner.workers.trainer.model.precision import COMPUTE_DTYPES
from layout_tuner.workers.trainer.product_layouts import Kind, Product

_CPU_INFO: Final = Path("/proc/cpuinfo")

_FEATURES_AT_ONCE: Final = 512
"""Output features whose 16-bit weights are converted to fp32 at once: their rows stay in a core's
cache until they are multiplied, and products of this size still run at full speed."""

_PRECISIONS: Final = {dtype: precision for precision, dtype in COMPUTE_DTYPES.items()}

_layouts: dict[Product, str] = {}


def use_layouts(layouts: Mapping[Product, str]) -> None:
    """Lays the factors of these products out so from now on, and those of no others."""
    _layouts.clear()
    _layouts.update(layouts)


def _laid_out(kind: Kind, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of a product, copied where another layout than theirs was measured as faster."""
    if not _layouts:
        return left, right
    shape = len(left), right.shape[1], len(right)
    layout = _layouts.get(Product(kind, _PRECISIONS[left.dtype], *shape))
    if layout is None:
        return left, right
    left, right = (
        factor.contiguous() if letter == "N" else factor.t().contiguous().t()
        for letter, factor in zip(layout, (left, right), strict=True)
    )
    return left, right


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """The output of the layer, x W^T + b, without autograd."""
    if multiplies_in_fp32(x_TI):
        x32_TI, y_TO = x_TI.float(), x_TI.new_empty(len(x_TI), len(weight_OI))
        for some in _features(weight_OI):
            bias = None if bias_O is None else bias_O[some].float()
            y_TO[:, some].copy_(linear(x32_TI, weight_OI[some].float(), bias))
        return y_TO
    x_TI, weight_IO = _laid_out("output", x_TI, weight_OI.t())
    if x_TI.dtype == torch.float32 and x_TI.is_cpu and prefers_onednn():
        return _onednn_linear(x_TI, weight_IO.t(), bias_O)
    return F.linear(x_TI, weight_IO.t(), bias_O)


def input_gradient(grad_TO: Tensor, weight_OI: Tensor) -> Tensor:
    """The gradient of the layer's input, dy W, without autograd."""
    if multiplies_in_fp32(grad_TO):
        sum_TI = torch.zeros(len(grad_TO), weight_OI.shape[1])
        for some in _features(weight_OI):
            sum_TI.addmm_(grad_TO[:, some].float(), weight_OI[some].float())
        return sum_TI.to(grad_TO.dtype)
    grad_TO, weight_OI = _laid_out("input_gradient", grad_TO, weight_OI)
    if grad_TO.dtype == torch.float32 and grad_TO.is_cpu and prefers_onednn():
        return _onednn_linear(grad_TO, weight_OI.t(), None)
    return grad_TO @ weight_OI


def weight_gradient(left_OT: Tensor, right_TI: Tensor) -> Tensor:
    """dy^T x in the precision of the factors, without autograd."""
    left_OT, right_TI = _laid_out("weight_gradient", left_OT, right_TI)
    return left_OT @ right_TI


def add_product(sum_OI: Tensor, left_OT: Tensor, right_TI: Tensor, *, beta: int) -> None:
    """Overwrites the sum with beta * sum + left right, in fp32, without a temporary of its size."""
    if left_OT.dtype == torch.float32:
        sum_OI.addmm_(*_laid_out("weight_gradient", left_OT, right_TI), beta=beta)
        return
    right32_TI = right_TI.float()
    for some in _features(left_OT):
        sum_OI[some].addmm_(left_OT[some].float(), right32_TI, beta=beta)


def grouped_products(x_MI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """The rows of each expert times its matrix, (M, O), without autograd.

    `ends_E` has the end of each expert's rows, in int32.
    """
    if multiplies_in_fp32(x_MI):
        rows = x_MI.tensor_split(ends_E[:-1].cpu().long())
        return torch.cat([linear(x, w_IO.t()) for x, w_IO in zip(rows, weight_EIO, strict=True)])
    return F.grouped_mm(x_MI, weight_EIO, offs=ends_E)


def multiplies_in_fp32(factor: Tensor) -> bool:
    """Whether a product of 16-bit factors is computed from fp32 copies of them.

    The result is the same but for the order of the sums: a product of two 16-bit numbers is exact
    in fp32, and every library adds them up in fp32.
    """
    return factor.is_cpu and factor.dtype != torch.float32 and not has_fast_16_bit_products()


def _features(rows: Tensor) -> list[slice]:
    """Slices of consecutive rows that are converted at once."""
    return [slice(i, i + _FEATURES_AT_ONCE) for i in range(0, len(rows), _FEATURES_AT_ONCE)]


def refuse_without_grouped_products() -> None:
    """Raises LayoutUnsupportedError if this torch is too old for models with experts."""
    if not hasattr(F, "grouped_mm"):
        raise LayoutUnsupportedError(
            f"models with experts need torch.nn.functional.grouped_mm, and torch {torch.__version__} "
            "has none; install torch 2.10 or newer"
        )


@functools.cache
def prefers_onednn() -> bool:
    """Whether fp32 products use oneDNN instead of MKL: on AMD processors.

    torch uses MKL for fp32, which is tuned for Intel's processors. On a Zen 4 core oneDNN is 5 to
    10 % faster. torch's 16-bit products always use oneDNN. The processor's name decides and
    not a measurement, since every rank of a job must sum in the same order.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return "AuthenticAMD" in kernel_text(_CPU_INFO)


@functools.cache
def has_fast_16_bit_products() -> bool:
    """Whether 16-bit products on this processor are faster than fp32 ones.

    They are with AMX, and with AVX512_BF16 on AMD's Zen 4. Intel's AVX512_BF16 without AMX takes
    1.9 times as long as fp32 for bf16, and oneDNN without either five times or more. As for
    `prefers_onednn`, no measurement decides.
    """
    flags = kernel_text(_CPU_INFO)
    return "amx_bf16" in flags or ("avx512_bf16" in flags and "AuthenticAMD" in flags)


def _onednn_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, bias_O, "none", [], "")
    return product
