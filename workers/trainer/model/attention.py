"""Attention without its linear layers: rotary positions, the core, and selective recomputation.

On CPUs the core has its own backward pass. Nothing here communicates.

Shapes: B sequences, S positions, T = B S tokens, D head size. M heads of a fused projection: N
local query heads, then K key and K value heads. R = N + K heads are rotated, each in P = D / 2
pairs of dims. The backward pass processes G heads and C positions at once, with the E positions
that they attend to.
"""

# ruff: noqa: N803, N806, N812 (tensors carry their shape in the name)

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from workers.trainer.model.backward import gradients_of

_POSITIONS_AT_ONCE: Final = 64
_SCORES_AT_ONCE: Final = 1 << 19
"""fp32 scores that are processed at once: 2 MiB, about the size of a core's cache."""

_LOG2_E: Final = math.log2(math.e)


def causal_attention(qkv_BSMD: Tensor, num_heads: int, window_SS: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v with a causal mask, (B, S, N, D); fused where torch has a kernel.

    On CPUs it has its own backward pass, unless query heads share key heads or there is a window:
    `window_SS` says where query i sees key j.
    """
    num_kv_heads = (qkv_BSMD.shape[2] - num_heads) // 2
    # The switch of the flash kernels (`torch.nn.attention.sdpa_kernel`) also covers the CPU's.
    has_flash = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    if qkv_BSMD.is_cpu and num_heads == num_kv_heads and has_flash and window_SS is None:
        return _cpu_attention(qkv_BSMD)
    heads = [num_heads, num_kv_heads, num_kv_heads]
    q_BNSD, k_BKSD, v_BKSD = (part.transpose(1, 2) for part in torch.split(qkv_BSMD, heads, dim=2))
    y_BNSD = F.scaled_dot_product_attention(
        q_BNSD,
        k_BKSD,
        v_BKSD,
        attn_mask=window_SS,
        is_causal=window_SS is None,
        enable_gqa=num_heads != num_kv_heads,
    )
    return y_BNSD.transpose(1, 2)


class Rotate(Function):
    """Rotary position embedding of queries and keys (arXiv:2104.09864), in place."""

    @staticmethod
    def forward(
        ctx: Any, qkv_TM: Tensor, cos_SP: Tensor, sin_SP: Tensor, num_rotated: int
    ) -> Tensor:
        ctx.cos_SP, ctx.sin_SP, ctx.num_rotated = cos_SP, sin_SP, num_rotated
        ctx.mark_dirty(qkv_TM)
        _rotate(qkv_TM, cos_SP, sin_SP, num_rotated, sign=1.0)
        return qkv_TM

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[Tensor, None, None, None]:
        # Attention made this gradient, and nothing else reads it: it may be overwritten.
        _rotate(grad_TM, ctx.cos_SP, ctx.sin_SP, ctx.num_rotated, sign=-1.0)
        return grad_TM, None, None, None


rotate: Callable[..., Tensor] = Rotate.apply


def _rotate(
    qkv_TM: Tensor, cos_SP: Tensor, sin_SP: Tensor, num_rotated: int, *, sign: float
) -> None:
    """Rotates pairs (i, i + P) of the first `num_rotated` heads, in place."""
    seq_length, half = cos_SP.shape
    heads_BSMD = qkv_TM.view(-1, seq_length, qkv_TM.shape[-1] // (2 * half), 2 * half)
    first_BSRP, second_BSRP = heads_BSMD[:, :, :num_rotated].chunk(2, dim=-1)
    cos_S1P, sin_S1P = cos_SP[:, None], sin_SP[:, None]
    turned_BSRP = (second_BSRP * cos_S1P).addcmul_(first_BSRP, sin_S1P, value=sign)
    first_BSRP.mul_(cos_S1P).addcmul_(second_BSRP, sin_S1P, value=-sign)
    second_BSRP.copy_(turned_BSRP)


def rotary_tables(
    seq_length: int, head_size: int, *, base: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position and pair, computed in fp64.

    Pair i turns by base^(-2i/D) per position (arXiv:2104.09864, section 3.2.2).
    """
    powers = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    angles_SP = torch.outer(torch.arange(seq_length, dtype=torch.float64), float(base) ** -powers)
    return (
        angles_SP.cos().to(device=device, dtype=dtype),
        angles_SP.sin().to(device=device, dtype=dtype),
    )


def attention_window(seq_length: int, window: int, device: torch.device) -> Tensor:
    """Where query i sees key j, (S, S): the last `window` positions up to its own."""
    near_SS = torch.ones(seq_length, seq_length, dtype=torch.bool, device=device)
    return near_SS.tril_().triu_(1 - window)


class CpuAttention(Function):
    """Forward: torch's flash kernel. Backward: batched products of blocks of several heads.

    torch's backward kernel multiplies blocks of one head at a time. Blocks of several heads at once
    are as fast as large matrix products. Input, output and the log-sum-exp of each
    row are kept.
    """

    @staticmethod
    def forward(ctx: Any, qkv_BSMD: Tensor) -> Tensor:
        q_BNSD, k_BNSD, v_BNSD = (part.transpose(1, 2) for part in qkv_BSMD.chunk(3, dim=2))
        y_BNSD, lse_BNS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BNSD, k_BNSD, v_BNSD, 0.0, True
        )
        ctx.save_for_backward(qkv_BSMD, y_BNSD, lse_BNS)
        return y_BNSD.transpose(1, 2)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_BSND: Tensor) -> Tensor:
        qkv_BSMD, y_BNSD, lse_BNS = ctx.saved_tensors
        grad_BNSD = grad_BSND.transpose(1, 2)
        # dS = P (dP - rowsum(dP P)), and that sum is dy y^T (arXiv:2205.14135, appendix B.2).
        dot_BNS = (grad_BNSD.float() * y_BNSD).sum(-1)
        num_heads, seq_length = lse_BNS.shape[1:]
        size = max(_SCORES_AT_ONCE // (_POSITIONS_AT_ONCE * seq_length), 1)
        grad_qkv_BSMD = torch.empty_like(qkv_BSMD)
        for sequence in range(len(qkv_BSMD)):
            q_NSD, k_NSD, v_NSD = qkv_BSMD[sequence].transpose(0, 1).chunk(3)
            grads_NSD = grad_qkv_BSMD[sequence].transpose(0, 1).chunk(3)
            for first in range(0, num_heads, size):
                some = slice(first, first + size)
                _attend_backward(
                    (q_NSD[some], k_NSD[some], v_NSD[some], grad_BNSD[sequence, some]),
                    lse_BNS[sequence, some] * _LOG2_E,
                    dot_BNS[sequence, some],
                    tuple(grad[some] for grad in grads_NSD),
                )
        return grad_qkv_BSMD


def _attend_backward(
    inputs_GSD: tuple[Tensor, Tensor, Tensor, Tensor],
    lse_GS: Tensor,
    dot_GS: Tensor,
    grads_GSD: tuple[Tensor, ...],
) -> None:
    """Writes the gradients of query, key and value of G heads of a sequence.

    Scores and their gradients are computed in fp32. Probabilities have the precision of the inputs
    in products, as in the flash kernels. lse_GS is to the base of 2, for which the exponential is
    cheapest.
    """
    q_GSD, k_GSD, _, dy_GSD = inputs_GSD
    q32_GSD, k32_GSD, v32_GSD, dy32_GSD = (value.float() for value in inputs_GSD)
    dtype, (_, seq_length, head_size) = q_GSD.dtype, q_GSD.shape
    scale = head_size**-0.5
    future_CC = torch.ones(_POSITIONS_AT_ONCE, _POSITIONS_AT_ONCE, dtype=torch.bool).triu_(1)
    dk_GSD = torch.zeros(k_GSD.shape)
    dv_GSD = torch.zeros(k_GSD.shape)
    for start in range(0, seq_length, _POSITIONS_AT_ONCE):
        end = min(start + _POSITIONS_AT_ONCE, seq_length)
        rows = slice(start, end)
        p_GCE = torch.baddbmm(
            lse_GS[:, rows, None],
            q32_GSD[:, rows],
            k32_GSD[:, :end].mT,
            beta=-1.0,
            alpha=scale * _LOG2_E,
        )
        p_GCE[:, :, rows].masked_fill_(future_CC[: end - start, : end - start], -math.inf)
        p_GCE.exp2_()
        ds_GCE = torch.baddbmm(
            dot_GS[:, rows, None], dy32_GSD[:, rows], v32_GSD[:, :end].mT, beta=-1.0
        ).mul_(p_GCE)
        _add_product(dv_GSD[:, :end], p_GCE.to(dtype).mT, dy_GSD[:, rows])
        ds_GCE = ds_GCE.to(dtype)
        _add_product(dk_GSD[:, :end], ds_GCE.mT, q_GSD[:, rows])
        torch.mul(torch.bmm(ds_GCE, k_GSD[:, :end]), scale, out=grads_GSD[0][:, rows])
    torch.mul(dk_GSD, scale, out=grads_GSD[1])
    grads_GSD[2].copy_(dv_GSD)


def _add_product(sum_GED: Tensor, left_GEC: Tensor, right_GCD: Tensor) -> None:
    if left_GEC.dtype == sum_GED.dtype:
        sum_GED.baddbmm_(left_GEC, right_GCD)
    else:
        sum_GED.add_(torch.bmm(left_GEC, right_GCD))


class RecomputedAttention(Function):
    """Selective recomputation: keeps query, key and value, and computes attention again.

    It does not communicate. Without it a fused kernel would keep one more number per head and
    token; unfused attention would keep the probabilities, S numbers per head and token
    (arXiv:2205.05198, section 5).
    """

    @staticmethod
    def forward(
        ctx: Any, qkv_BSMD: Tensor, num_heads: int, window_SS: Tensor | None = None
    ) -> Tensor:
        ctx.save_for_backward(qkv_BSMD)
        ctx.num_heads, ctx.window_SS = num_heads, window_SS
        return causal_attention(qkv_BSMD, num_heads, window_SS)

    @staticmethod
    def backward(ctx: Any, grad_BSND: Tensor) -> tuple[Tensor, None, None]:
        qkv_BSMD = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y_BSND = causal_attention(qkv_BSMD, ctx.num_heads, ctx.window_SS)
        (grad_qkv_BSMD,) = gradients_of(y_BSND, grad_BSND, (qkv_BSMD,))
        return grad_qkv_BSMD, None, None


_cpu_attention: Callable[[Tensor], Tensor] = CpuAttention.apply
recomputed_attention: Callable[..., Tensor] = RecomputedAttention.apply
