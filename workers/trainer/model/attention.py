"""Attention without its linear layers: rotary positions, the core, and selective recomputation.

On CPUs the core has its own backward pass. Nothing here communicates; `context_parallel` computes
attention of sequences that several ranks share, from the blocks that this module computes.

Shapes: B sequences, S positions, T = B S tokens, E positions of keys, D size of a query or key
head, V of a value head. W features of a fused projection: those of N local query heads, then of K
key and K value heads. R = N + K of M heads are rotated, each in P pairs of dims: D / 2, or
fewer of its first dims. The backward pass processes G heads and C positions at once, with the E
positions that they attend to.
"""

# ruff: noqa: N803, N806, N812 (tensors carry their shape in the name)

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.model.backward import recomputed
from layout_tuner.workers.trainer.model.matrix_products import multiplies_in_fp32
from layout_tuner.workers.trainer.trainer_options import AttentionChoice, AttentionKernel

_POSITIONS_AT_ONCE: Final = 64
_SCORES_AT_ONCE: Final = 1 << 19
"""fp32 scores that are processed at once: 2 MiB, about the size of a core's cache."""

_LOG2_E: Final = math.log2(math.e)


class HeadSizes(NamedTuple):
    """The heads of a fused projection."""

    num_queries: int
    num_keys: int
    """Key heads, and value heads; fewer than queries: several of these share one."""
    key_size: int
    """Features of a query head and of a key head."""
    value_size: int

    @classmethod
    def of(cls, shape: ModelShape, ranks: int) -> Self:
        """Those of one of so many ranks that divide the heads of a shape of one kind of layers."""
        numbers = shape.num_query_heads // ranks, shape.num_key_heads // ranks
        return cls(*numbers, shape.head_size, shape.value_head_size)

    @property
    def widths(self) -> list[int]:
        """Features of all queries, of all keys and of all values."""
        sizes = (self.num_queries, self.key_size), (self.num_keys, self.key_size)
        return [number * size for number, size in (*sizes, (self.num_keys, self.value_size))]

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return 1.0 / math.sqrt(self.key_size)

    def split(self, qkv_BSW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, S, N, D), keys (B, S, K, D) and values (B, S, K, V), as views."""
        q_BSI, k_BSI, v_BSI = torch.split(qkv_BSW, self.widths, dim=-1)
        q_BSND = torch.unflatten(q_BSI, -1, (self.num_queries, -1))
        k_BSKD, v_BSKV = (torch.unflatten(x, -1, (self.num_keys, -1)) for x in (k_BSI, v_BSI))
        return q_BSND, k_BSKD, v_BSKV


AttentionCore = Callable[[Tensor, HeadSizes], Tensor]
"""Attention of fused queries, keys and values (B, S, W): (B, S, N, V)."""


def causal_attention(
    qkv_BSW: Tensor,
    heads: HeadSizes,
    window_SS: Tensor | None = None,
    choice: AttentionChoice = "auto",
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v with a causal mask, (B, S, N, V), by the kernel of the choice.

    `window_SS` says where query i sees key j. The own kernel has no windows; where query heads
    share key heads, it copies these for each. torch's fused kernels keep values as wide as keys.
    """
    kernel = _kernel_of(qkv_BSW, heads, choice, has_window=window_SS is not None)
    is_grouped = heads.num_queries != heads.num_keys
    if kernel == "own" and not is_grouped:
        return _cpu_attention(qkv_BSW, heads)
    q_BSND, *kv_BSKD = heads.split(qkv_BSW)
    if kernel == "own":
        copies = heads.num_queries // heads.num_keys
        every = (q_BSND, *(x.repeat_interleave(copies, dim=2) for x in kv_BSKD))
        own = heads._replace(num_keys=heads.num_queries)
        return _cpu_attention(torch.cat([x.flatten(2) for x in every], dim=2), own)
    attend: Callable[..., Any] = F.scaled_dot_product_attention
    if kernel == "math":
        attend = _attend_by_math
    y_BNSV: Tensor = attend(
        *_as_wide(*(x.transpose(1, 2) for x in (q_BSND, *kv_BSKD))),
        attn_mask=window_SS,
        is_causal=window_SS is None,
        scale=heads.scale,
        enable_gqa=is_grouped,
    )
    return y_BNSV[..., : heads.value_size].transpose(1, 2)


def _as_wide(q_BNSD: Tensor, k_BKED: Tensor, v_BKEV: Tensor) -> tuple[Tensor, ...]:
    """The three with heads as wide as the widest: torch's fused kernels have one width.

    Added features are zeros: they change no score, and those of the output are zeros too.
    """
    size = max(q_BNSD.shape[-1], v_BKEV.shape[-1])
    each = (q_BNSD, k_BKED, v_BKEV)
    return tuple(x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1])) for x in each)


def _attend_by_math(*inputs_BNSD: Tensor, attn_mask: Tensor | None, **how: Any) -> Any:
    if attn_mask is not None:  # the operator adds the mask to the scores
        unseen = torch.zeros(attn_mask.shape, dtype=inputs_BNSD[0].dtype, device=attn_mask.device)
        attn_mask = unseen.masked_fill_(~attn_mask, -math.inf)
    return torch.ops.aten._scaled_dot_product_attention_math(
        *inputs_BNSD, attn_mask=attn_mask, **how
    )[0]


def _kernel_of(
    qkv_BSW: Tensor, heads: HeadSizes, choice: AttentionChoice, *, has_window: bool
) -> AttentionKernel:
    if choice in ("fused", "math"):
        return choice
    # The switch of the flash kernels (`torch.nn.attention.sdpa_kernel`) also covers the CPU's.
    has_flash = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    has_own = qkv_BSW.is_cpu and has_flash and not has_window
    is_grouped = heads.num_queries != heads.num_keys
    return "own" if has_own and (choice == "own" or not is_grouped) else "fused"


def running_kernel(
    qkv_BSW: Tensor, heads: HeadSizes, window_SS: Tensor | None, choice: AttentionChoice
) -> AttentionKernel:
    """The kernel that `causal_attention` runs for such an input.

    It is another than that of the choice if there is a window, or if torch has no fused kernel for
    the input, or is not to use one.
    """
    kernel = _kernel_of(qkv_BSW, heads, choice, has_window=window_SS is not None)
    if kernel != "fused":
        return kernel
    q_BNSD, k_BKSD, v_BKSV = _as_wide(*(part.transpose(1, 2) for part in heads.split(qkv_BSW)))
    chosen = torch._fused_sdp_choice(
        q_BNSD,
        k_BKSD,
        v_BKSV,
        attn_mask=window_SS,
        is_causal=window_SS is None,
        scale=heads.scale,
        enable_gqa=heads.num_queries != heads.num_keys,
    )
    return "math" if chosen == SDPBackend.MATH.value else "fused"


class Rotate(Function):
    """Rotary position embedding of queries and keys (arXiv:2104.09864), in place."""

    @staticmethod
    def forward(
        ctx: Any, qkv_TM: Tensor, cos_SP: Tensor, sin_SP: Tensor, num_rotated: int, head_size: int
    ) -> Tensor:
        ctx.how = cos_SP, sin_SP, num_rotated, head_size
        ctx.mark_dirty(qkv_TM)
        _rotate(qkv_TM, *ctx.how, sign=1.0)
        return qkv_TM

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[Tensor, None, None, None, None]:
        # Attention made this gradient, and nothing else reads it: it may be overwritten.
        _rotate(grad_TM, *ctx.how, sign=-1.0)
        return grad_TM, None, None, None, None


rotate: Callable[..., Tensor] = Rotate.apply


def _rotate(
    qkv_TM: Tensor,
    cos_SP: Tensor,
    sin_SP: Tensor,
    num_rotated: int,
    head_size: int,
    *,
    sign: float,
) -> None:
    """Rotates the first `num_rotated` heads, in place."""
    seq_length, half = cos_SP.shape
    heads_BSMD = qkv_TM.view(-1, seq_length, qkv_TM.shape[-1] // head_size, head_size)
    turn(heads_BSMD[:, :, :num_rotated, : 2 * half], cos_SP, sin_SP, sign=sign)


def turn(heads_BSRD: Tensor, cos_SP: Tensor, sin_SP: Tensor, *, sign: float) -> None:
    """Rotates pairs (i, i + P) of heads of 2 P features, in place."""
    first_BSRP, second_BSRP = heads_BSRD.chunk(2, dim=-1)
    cos_S1P, sin_S1P = cos_SP[:, None], sin_SP[:, None]
    turned_BSRP = (second_BSRP * cos_S1P).addcmul_(first_BSRP, sin_S1P, value=sign)
    first_BSRP.mul_(cos_S1P).addcmul_(second_BSRP, sin_S1P, value=-sign)
    second_BSRP.copy_(turned_BSRP)


class GateOutput(Function):
    """The output of attention times the sigmoid of its gate, both of which are kept."""

    @staticmethod
    def forward(ctx: Any, y_TI: Tensor, gate_TI: Tensor) -> Tensor:
        ctx.save_for_backward(y_TI, gate_TI)
        return gate_TI.sigmoid().mul_(y_TI)

    @staticmethod
    def backward(ctx: Any, grad_TI: Tensor) -> tuple[Tensor, Tensor]:
        y_TI, gate_TI = ctx.saved_tensors
        share_TI = gate_TI.sigmoid()
        slope_TI = torch.ops.aten.sigmoid_backward(grad_TI * y_TI, share_TI)
        return share_TI.mul_(grad_TI), slope_TI


gated: Callable[..., Tensor] = GateOutput.apply


def rotary_tables(
    seq_length: int, size: int, *, base: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position and pair of R = `size` rotated dims, computed in fp64.

    Pair i turns by base^(-2i/R) per position (arXiv:2104.09864, section 3.2.2).
    """
    powers = torch.arange(0, size, 2, dtype=torch.float64) / size
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
    def forward(ctx: Any, qkv_BSW: Tensor, heads: HeadSizes) -> Tensor:
        q_BNSD, k_BNSD, v_BNSV = (part.transpose(1, 2) for part in heads.split(qkv_BSW))
        y_BNSV, lse_BNS = attend_block(q_BNSD, k_BNSD, v_BNSV, is_causal=True)
        ctx.save_for_backward(qkv_BSW, y_BNSV, lse_BNS)
        ctx.heads = heads
        return y_BNSV.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad_BSNV: Tensor) -> tuple[Tensor, None]:
        (qkv_BSW, y_BNSV, lse_BNS), heads = ctx.saved_tensors, ctx.heads
        grad_BNSV = grad_BSNV.transpose(1, 2)
        # dS = P (dP - rowsum(dP P)), and that sum is dy y^T (arXiv:2205.14135, appendix B.2).
        dot_BNS = (grad_BNSV.float() * y_BNSV).sum(-1)
        grad_qkv_BSW = torch.empty_like(qkv_BSW)
        inputs = *(part.transpose(1, 2) for part in heads.split(qkv_BSW)), grad_BNSV
        grads = tuple(part.transpose(1, 2) for part in heads.split(grad_qkv_BSW))
        _cpu_backward(inputs, lse_BNS, dot_BNS, grads, is_causal=True)
        return grad_qkv_BSW, None


def _cpu_backward(
    inputs_BNSD: tuple[Tensor, ...],
    lse_BNS: Tensor,
    dot_BNS: Tensor,
    grads_BNSD: tuple[Tensor, ...],
    *,
    is_causal: bool,
) -> None:
    """Writes the gradients of query, key and value, given those three and that of the output."""
    num_heads, num_keys = inputs_BNSD[1].shape[1:3]
    size = max(_SCORES_AT_ONCE // (_POSITIONS_AT_ONCE * num_keys), 1)
    for sequence in range(len(lse_BNS)):
        for first in range(0, num_heads, size):
            some = sequence, slice(first, first + size)
            _attend_backward(
                tuple(value[some] for value in inputs_BNSD),
                lse_BNS[some] * _LOG2_E,
                dot_BNS[some],
                tuple(grad[some] for grad in grads_BNSD),
                is_causal=is_causal,
            )


def attend_block(
    q_BNSD: Tensor, k_BNED: Tensor, v_BNEV: Tensor, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of S queries to E keys alone, and the log-sum-exp of each row of scores, (B, N, S).

    A causal block has as many keys as queries. Backward: `block_gradients`.
    """
    sizes, how = (q_BNSD.shape[3], v_BNEV.shape[3]), {"scale": 1.0 / math.sqrt(q_BNSD.shape[3])}
    inputs, size = _as_wide(q_BNSD, k_BNED, v_BNEV), q_BNSD.shape[2]
    if q_BNSD.is_cpu:
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *inputs, 0.0, is_causal, **how
        )
    elif _uses_flash(inputs[0]):
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention(*inputs, 0.0, is_causal, **how)[
            :2
        ]
    else:
        y, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
            *inputs, None, True, 0.0, is_causal, **how
        )[:2]
    if sizes[0] > sizes[1]:  # a copy, so that the wide output is not kept
        y = y[..., : sizes[1]].transpose(1, 2).contiguous().transpose(1, 2)
    return y, lse[:, :, :size]  # one kernel pads the rows


def block_gradients(
    inputs_BNSD: tuple[Tensor, Tensor, Tensor],
    grad_BNSV: Tensor,
    y_BNSV: Tensor,
    lse_BNS: Tensor,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's part of the gradients of its queries, keys and values.

    Output, its gradient and the log-sum-exp are those of the attention to all keys, of which the
    block may be a part.
    """
    if grad_BNSV.is_cpu:
        grads = dq_BNSD, dk_BNED, dv_BNEV = tuple(torch.empty(each.shape) for each in inputs_BNSD)
        dot_BNS = (grad_BNSV.float() * y_BNSV).sum(-1)
        _cpu_backward((*inputs_BNSD, grad_BNSV), lse_BNS, dot_BNS, grads, is_causal=is_causal)
        return dq_BNSD, dk_BNED, dv_BNEV
    queries, keys = grad_BNSV.shape[2], inputs_BNSD[1].shape[2]
    sizes = [each.shape[3] for each in inputs_BNSD]
    how = {"scale": 1.0 / math.sqrt(sizes[0])}
    inputs_BNSD = _as_wide(*inputs_BNSD)  # type: ignore[assignment]
    wide = inputs_BNSD[0].shape[3] - sizes[2]
    grad_BNSV, y_BNSV = (F.pad(each, (0, wide)) if wide else each for each in (grad_BNSV, y_BNSV))
    unused = torch.zeros((), dtype=torch.int64, device=grad_BNSV.device)  # of dropout
    if _uses_flash(grad_BNSV):
        no_lengths = torch.empty(0, dtype=torch.int32, device=grad_BNSV.device)
        every = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad_BNSV,
            *inputs_BNSD,
            y_BNSV,
            lse_BNS.contiguous(),
            no_lengths,
            no_lengths,
            queries,
            keys,
            0.0,
            is_causal,
            unused,
            unused,
            **how,
        )
    else:
        if torch.version.hip is None:
            lse_BNS = F.pad(lse_BNS, (0, -queries % 32), value=math.inf)
        every = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad_BNSV,
            *inputs_BNSD,
            None,
            y_BNSV,
            lse_BNS.contiguous(),
            unused,
            unused,
            0.0,
            [True, True, True, False],
            is_causal,
            **how,
        )[:3]
    dq_BNSD, dk_BNED, dv_BNEV = (x[..., :size] for x, size in zip(every, sizes, strict=True))
    return dq_BNSD, dk_BNED, dv_BNEV


def _uses_flash(x_BNSD: Tensor) -> bool:
    """Whether a GPU's flash kernels take the tensor; the memory-efficient ones take the others."""
    return x_BNSD.dtype != torch.float32 and x_BNSD.shape[3] % 8 == 0 and x_BNSD.shape[3] <= 256


def _attend_backward(
    inputs_GSD: tuple[Tensor, ...],
    lse_GS: Tensor,
    dot_GS: Tensor,
    grads_GSD: tuple[Tensor, ...],
    *,
    is_causal: bool,
) -> None:
    """Writes the gradients of query, key and value of G heads of a sequence.

    Scores and their gradients are computed in fp32. Probabilities have the precision of the inputs
    in products, as in the flash kernels, unless those run in fp32 anyway. lse_GS is to the base of
    2, for which the exponential is cheapest.
    """
    q32_GSD, k32_GSD, v32_GSD, dy32_GSD = (value.float() for value in inputs_GSD)
    if multiplies_in_fp32(inputs_GSD[0]):
        inputs_GSD = q32_GSD, k32_GSD, v32_GSD, dy32_GSD
    q_GSD, k_GSD, _, dy_GSD = inputs_GSD
    num_keys = k_GSD.shape[1]
    dtype, (_, seq_length, head_size) = q_GSD.dtype, q_GSD.shape
    scale = head_size**-0.5
    future_CC = torch.ones(_POSITIONS_AT_ONCE, _POSITIONS_AT_ONCE, dtype=torch.bool).triu_(1)
    dk_GSD = torch.zeros(k_GSD.shape)
    dv_GSD = torch.zeros(v32_GSD.shape)
    for start in range(0, seq_length, _POSITIONS_AT_ONCE):
        end = min(start + _POSITIONS_AT_ONCE, seq_length)
        rows, last = slice(start, end), end if is_causal else num_keys
        p_GCE = torch.baddbmm(
            lse_GS[:, rows, None],
            q32_GSD[:, rows],
            k32_GSD[:, :last].mT,
            beta=-1.0,
            alpha=scale * _LOG2_E,
        )
        if is_causal:
            p_GCE[:, :, rows].masked_fill_(future_CC[: end - start, : end - start], -math.inf)
        p_GCE.exp2_()
        ds_GCE = torch.baddbmm(
            dot_GS[:, rows, None], dy32_GSD[:, rows], v32_GSD[:, :last].mT, beta=-1.0
        ).mul_(p_GCE)
        _add_product(dv_GSD[:, :last], p_GCE.to(dtype).mT, dy_GSD[:, rows])
        ds_GCE = ds_GCE.to(dtype)
        _add_product(dk_GSD[:, :last], ds_GCE.mT, q_GSD[:, rows])
        torch.mul(torch.bmm(ds_GCE, k_GSD[:, :last]), scale, out=grads_GSD[0][:, rows])
    torch.mul(dk_GSD, scale, out=grads_GSD[1])
    grads_GSD[2].copy_(dv_GSD)


def _add_product(sum_GED: Tensor, left_GEC: Tensor, right_GCD: Tensor) -> None:
    if left_GEC.dtype == sum_GED.dtype:
        sum_GED.baddbmm_(left_GEC, right_GCD)
    else:
        sum_GED.add_(torch.bmm(left_GEC, right_GCD))


def recomputed_attention(
    qkv_BSW: Tensor, heads: HeadSizes, attend: AttentionCore = causal_attention
) -> Tensor:
    """Selective recomputation: keeps query, key and value, and computes attention again.

    It communicates as `attend` does, forward and backward. Without it a fused kernel would keep one
    more number per head and token; unfused attention would keep the probabilities, S numbers per
    head and token (arXiv:2205.05198, section 5).
    """
    return recomputed(qkv_BSW, lambda again_BSW: attend(again_BSW, heads))


_cpu_attention: Callable[..., Tensor] = CpuAttention.apply
