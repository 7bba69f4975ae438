"""Multi-head latent attention (arXiv:2405.04434, section 2.1), trained with its up-projections.

Every rank of tp has both down-projections and the norms of both latents, and computes the latents
of its own tokens; the up-projections and the output are divided by heads. What sequence parallelism
gathers are the latents, in one all-gather. Without it all ranks compute the same latents.

Shapes: L tokens of this rank beside the layer, T of the micro-batch, B sequences, S positions; H
hidden; C = A + R + P features of the latents: A of queries (0: queries are projected from H), R of
keys and values, P of the rotated part of keys, which all heads share. N local heads: D features of
a query or a key, of which the last P are rotated, V of a value; I = N D, U = N (D - P + V), W = N
(2 D + V) features of queries, of the up-projection of keys and values, and of all three.
"""

# ruff: noqa: N803, N806 (tensors carry their shape in the name)

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from layout_tuner.workers.trainer.comm.collectives import (
    finish,
    gather_rows,
    start_all_reduce,
    start_scatter_rows,
)
from layout_tuner.workers.trainer.model.attention import HeadSizes, turn
from layout_tuner.workers.trainer.model.backward import Remade
from layout_tuner.workers.trainer.model.context_parallel import attention_core
from layout_tuner.workers.trainer.model.kernels import QueryKeyNorm
from layout_tuner.workers.trainer.model.matrix_products import input_gradient, linear
from layout_tuner.workers.trainer.model.parameters import ModelParameter

if TYPE_CHECKING:
    from layout_tuner.workers.trainer.model.model import StageBuilder


class LatentNorm(QueryKeyNorm):
    """RMSNorms of the latents of queries, if there are any, and of keys and values, in place."""

    query: ModelParameter | None  # type: ignore[assignment]

    def __init__(self, query: ModelParameter | None, key_value: ModelParameter) -> None:
        super().__init__(key_value, key_value, num_heads=1, num_kv_heads=1)
        self.query = query

    def parts(self, latents_LC: Tensor) -> list[tuple[Tensor, ModelParameter]]:
        """The columns of each latent, as views, each with its weight."""
        weights = [self.key] if self.query is None else [self.query, self.key]
        sizes = [len(weight) for weight in weights]
        views = torch.split(latents_LC[:, : sum(sizes)], sizes, dim=1)
        return list(zip(views, weights, strict=True))


class ProjectLatents(Function):
    """Rotated queries and keys, and values, from the latents.

    Forward: where tokens are cut, an all-gather of the latents over tp. Backward: an all-reduce of
    their gradient over tp, or where tokens are cut a reduce-scatter. Either is started before the
    weight gradients are computed. The gathered latents are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, latents_LC: Tensor, query_TI: Tensor | None, layer: LatentAttention
    ) -> Tensor:
        group = layer.key_value.token_group
        latents_TC = latents_LC if group is None else gather_rows(latents_LC, group)
        ctx.save_for_backward(latents_TC)
        ctx.layer = layer
        own_TA, own_TR, shared_TP = layer.split(latents_TC)
        if layer.query_up is not None:
            query_TI = linear(own_TA, layer.query_up.weight)
        assert query_TI is not None
        up_TU = linear(own_TR, layer.key_value.weight)
        qkv_BSW = layer.by_sequence(query_TI.new_empty(len(query_TI), sum(layer.heads.widths)))
        q_BSND, k_BSND, v_BSNV = layer.heads.split(qkv_BSW)
        q_BSND.copy_(query_TI.view(q_BSND.shape))
        up_BSNU = up_TU.view(*k_BSND.shape[:3], -1)
        plain = k_BSND.shape[3] - shared_TP.shape[1]
        k_BSND[..., :plain].copy_(up_BSNU[..., :plain])
        v_BSNV.copy_(up_BSNU[..., plain:])
        turned_BS1P = layer.by_sequence(shared_TP.contiguous())[:, :, None].clone()
        layer.turn(turned_BS1P, sign=1.0)
        k_BSND[..., plain:].copy_(turned_BS1P)
        layer.turn(q_BSND[..., plain:], sign=1.0)
        return qkv_BSW

    @staticmethod
    def backward(ctx: Any, grad_BSW: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (latents_TC,), layer = ctx.saved_tensors, ctx.layer
        own_TA, own_TR, shared_TP = layer.split(latents_TC)
        dq_BSND, dk_BSND, dv_BSNV = layer.heads.split(grad_BSW)
        plain = dk_BSND.shape[3] - shared_TP.shape[1]
        # Attention made this gradient, and nothing else reads it: it may be overwritten.
        layer.turn(dq_BSND[..., plain:], sign=-1.0)
        dshared_BS1P = dk_BSND[..., plain:].sum(2, keepdim=True)
        layer.turn(dshared_BS1P, sign=-1.0)
        tokens = len(latents_TC)
        dq_TI = dq_BSND.reshape(tokens, -1)
        if layer.key_value.weight.put_off is not None:  # a view would keep what it is a part of
            dq_TI = dq_TI.contiguous()
        dup_TU = torch.cat((dk_BSND[..., :plain], dv_BSNV), 3).view(tokens, -1)
        grad_TC = torch.empty_like(latents_TC)
        dA, dR, dP = layer.split(grad_TC)
        if layer.query_up is not None:
            dA.copy_(input_gradient(dq_TI, layer.query_up.weight))
        dR.copy_(input_gradient(dup_TU, layer.key_value.weight))
        dP.copy_(dshared_BS1P.view(tokens, -1))
        grad_LC, group = grad_TC, layer.key_value.token_group
        if group is None:
            summing = start_all_reduce(grad_TC, layer.key_value.group)
        else:
            grad_LC, summing = start_scatter_rows(grad_TC, group)
        summing = layer.key_value.overlapped(summing)
        layer.key_value.weight.add_product(dup_TU.t(), own_TR)
        if layer.query_up is not None:
            layer.query_up.weight.add_product(dq_TI.t(), own_TA)
        finish(summing)
        return grad_LC, dq_TI if layer.query_up is None else None, None


_project_latents: Callable[..., Tensor] = ProjectLatents.apply


class LatentAttention(nn.Module):
    """Causal latent attention over the heads of this rank; it adds the residual.

    It communicates as `Attention` does, but with the latents in place of the input. `recomputes`
    may name `core_attention`, and `mla_up_proj`: then queries, keys and values are not kept but
    made again from the latents, which are gathered again.
    """

    def __init__(
        self, build: StageBuilder, prefix: str, window: int | None, recomputes: Container[str]
    ) -> None:
        super().__init__()
        shape = build.shape
        a, r, p = shape.q_lora_rank, shape.kv_lora_rank, shape.qk_rope_head_dim
        self.sizes = [a, r, p]
        inputs = {"query_latent": a} if a else {}
        self.down = build.whole(prefix, {**inputs, "key_value_latent": r + p})
        self.norm = LatentNorm(
            build.whole_norm(f"{prefix}.query_latent_norm", a) if a else None,
            build.whole_norm(f"{prefix}.key_value_latent_norm", r),
        )
        queries = {"query": shape.query_size}
        self.query = None if a else build.column(prefix, queries, has_bias=False)
        self.query_up = build.column(prefix, queries, has_bias=False, inputs=a) if a else None
        outputs = shape.num_query_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        self.key_value = build.column(prefix, {"key_value": outputs}, has_bias=False, inputs=r)
        self.out = build.row(
            f"{prefix}.out", shape.num_query_heads * shape.v_head_dim, has_bias=False
        )
        self.seq_length = shape.seq_length // build.mesh.layout.cp
        self.heads = HeadSizes.of(shape, build.mesh.layout.tp)
        self.recomputes = "core_attention" in recomputes
        self.remakes_heads = "mla_up_proj" in recomputes
        self.attend = attention_core(build.mesh, recomputes=self.recomputes)
        self.rotary: tuple[Tensor, Tensor] | None = None
        self.window = window

    def forward(
        self, x_LH: Tensor, residual_LH: Tensor | None, remade: Remade | None = None
    ) -> Tensor:
        latents_LC = self.norm(self.down(x_LH, remade))
        inputs = (latents_LC,) if self.query is None else (x_LH, latents_LC)
        if not self.remakes_heads:
            y_BSNV = self.attend(self._heads_of(*inputs, remade=remade), self.heads)
        else:
            again = Remade(self._heads_of, None if self.query is None else remade)
            qkv_BSW = again(*inputs)
            with not_kept(qkv_BSW, again):
                y_BSNV = self.attend(qkv_BSW, self.heads)
        y_TO = y_BSNV.reshape(y_BSNV.shape[0] * self.seq_length, -1)
        return self.out(y_TO, residual_LH)  # type: ignore[no-any-return]

    def _heads_of(self, *inputs_L: Tensor, remade: Remade | None = None) -> Tensor:
        """Queries, keys and values, (B, S, W), of the latents and what comes before them."""
        query_TI = None if self.query is None else self.query(inputs_L[0], remade)
        return _project_latents(inputs_L[-1], query_TI, self)

    def split(self, latents_C: Tensor) -> tuple[Tensor, ...]:
        """The latents of queries, of keys and values, and the shared part of keys, as views."""
        return torch.split(latents_C, self.sizes, dim=-1)

    def by_sequence(self, x_T: Tensor) -> Tensor:
        return x_T.view(-1, self.seq_length, x_T.shape[1])

    def turn(self, heads_BSNP: Tensor, *, sign: float) -> None:
        """Rotates the features in place."""
        assert self.rotary is not None
        turn(heads_BSNP, *self.rotary, sign=sign)


def not_kept(x: Tensor, remade: Remade) -> saved_tensors_hooks:
    """Keeps of a tensor, which is remade, and of its views only where in its memory they lie."""
    storage = x.untyped_storage()._cdata

    def pack(kept: Tensor) -> Any:
        if kept.untyped_storage()._cdata != storage:
            return kept
        return kept.shape, kept.stride(), kept.storage_offset()

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else remade.again().as_strided(*packed)

    return saved_tensors_hooks(pack, unpack)
