"""The core of attention, and its selective recomputation (arXiv:2205.05198, section 5).

Shapes: B sequences, S positions, N and K local query and key heads, D head size.
"""

# ruff: noqa: N803, N806, N812 (tensors carry their shape in the name)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from workers.trainer.backward import gradients_of


def causal_attention(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over the positions so far; by a fused kernel where there is one."""
    grouped = q_BNSD.shape[1] != k_BKSD.shape[1]
    return F.scaled_dot_product_attention(
        q_BNSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=grouped
    )


class RecomputedAttention(Function):
    """Attends twice instead of keeping what attention saves: query, key and value alone are kept.

    No communication. Where attention is fused, what it saves beside them is a number a head and
    token; where it is not, the probabilities, S of those numbers.
    """

    @staticmethod
    def forward(ctx: Any, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
        ctx.save_for_backward(q_BNSD, k_BKSD, v_BKSD)
        return causal_attention(q_BNSD, k_BKSD, v_BKSD)

    @staticmethod
    def backward(ctx: Any, grad_BNSD: Tensor) -> tuple[Tensor, ...]:
        inputs = tuple(saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            y_BNSD = causal_attention(*inputs)
        return gradients_of(y_BNSD, grad_BNSD, inputs)


recomputed_attention: Callable[[Tensor, Tensor, Tensor], Tensor] = RecomputedAttention.apply
