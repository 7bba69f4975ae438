"""Attention of sequences that the ranks of the cp axis share.

A sequence has 2 cp chunks; rank i holds the chunks i and 2 cp - 1 - i, its head and its tail half
(`search_spaces.layouts.rank_mesh.sequence_chunks`). Of the keys of an earlier rank, its queries
attend to the head half; of a later rank's, only the queries of the tail half attend, to both
halves. Attention to the own keys is causal.

Three ways of communication, by `cp_comm_type`:

- all_gather: every rank gathers all keys and values, and gathers them again in the backward pass,
  which reduce-scatters their gradients. Only the own share is kept: keeping all would take as much
  memory in every layer as cp saves there.
- p2p: keys and values go around a ring (arXiv:2310.01889), a step beside each block. Gradients of
  keys and values follow them in fp32.
- a2a: an all-to-all exchanges tokens for heads before attention and back after it
  (arXiv:2309.14509).

With the first two, blocks are merged by their log-sum-exp in fp32, and the block of the own keys is
computed while the others' keys arrive.

Shapes: B sequences, S positions of this rank, E positions of keys, N local query heads of size D, K
key heads, V size of a value head, W features of a fused projection, U of its keys and values alone,
O of the output (N V), R ranks.
"""

# ruff: noqa: N803, N806 (tensors carry their shape in the name)

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from layout_tuner.workers.trainer.comm.collectives import (
    Pending,
    all_to_all,
    finish,
    scatter_rows,
    start_gather_rows,
    start_ring_step,
)
from layout_tuner.workers.trainer.comm.groups import AxisGroup
from layout_tuner.workers.trainer.comm.mesh import Mesh
from layout_tuner.workers.trainer.model.attention import (
    AttentionCore,
    HeadSizes,
    attend_block,
    block_gradients,
    causal_attention,
    recomputed_attention,
)
from layout_tuner.workers.trainer.stopwatch import part

Block = tuple[slice, Tensor]
"""Queries of this rank, and keys and values of others to which all of them attend."""


def attention_core(
    mesh: Mesh, window_SS: Tensor | None = None, *, recomputes: bool = False
) -> AttentionCore:
    """Attention of a rank, which the backward pass recomputes if `recomputes`.

    `window_SS` says where query i sees key j of the whole sequence. Over cp, only a2a has windows
    (`search_spaces.legality_rules`) and a choice of kernels: the others merge blocks of one kernel.
    """
    group, choice = mesh.cp_group, mesh.options.attention
    core: AttentionCore = partial(causal_attention, window_SS=window_SS, choice=choice)
    if recomputes:
        core = partial(recomputed_attention, attend=core)
    if group is None:
        return core
    if mesh.layout.cp_comm_type == "a2a":
        # The exchanged tensors take as much memory as the own ones, and are not exchanged again.
        return partial(_attend_by_heads, group=group, core=core)
    assert window_SS is None, "a layout that the rules refuse"
    exchange = _Gathered if mesh.layout.cp_comm_type == "all_gather" else _RingExchange

    def attend(qkv_BSW: Tensor, heads: HeadSizes) -> Tensor:
        return _attend_to_all(qkv_BSW, heads, group, exchange)

    return partial(recomputed_attention, attend=attend) if recomputes else attend


class AttentionToAllRanks(Function):
    """Causal attention to the keys of all ranks of cp.

    Forward: keys and values over cp. Backward: keys and values again, and their gradients. Queries,
    keys and values of this rank, the output and the log-sum-exp of each row are kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv_BSW: Tensor,
        heads: HeadSizes,
        group: AxisGroup,
        exchange: type[_Gathered] | type[_RingExchange],
    ) -> Tensor:
        q_BNSD, kv_BSU = _queries_and_keys(qkv_BSW, heads)
        others = exchange(kv_BSU, group)
        own_y_BNSV, lse_BNS = attend_block(q_BNSD, *_keys(kv_BSU, heads), is_causal=True)
        y_BNSV = own_y_BNSV.float()
        for rows, kv_BEU in others.blocks():
            _merge(
                y_BNSV[:, :, rows],
                lse_BNS[:, :, rows],
                *attend_block(q_BNSD[:, :, rows], *_keys(kv_BEU, heads), is_causal=False),
            )
        y_BSNV = y_BNSV.to(qkv_BSW.dtype).transpose(1, 2)
        ctx.save_for_backward(qkv_BSW, y_BSNV, lse_BNS)
        ctx.heads, ctx.group, ctx.exchange = heads, group, exchange
        return y_BSNV

    @staticmethod
    def backward(ctx: Any, grad_BSNV: Tensor) -> tuple[Tensor, None, None, None]:
        (qkv_BSW, y_BSNV, lse_BNS), heads = ctx.saved_tensors, ctx.heads
        q_BNSD, kv_BSU = _queries_and_keys(qkv_BSW, heads)
        grad_BNSV, y_BNSV = grad_BSNV.transpose(1, 2), y_BSNV.transpose(1, 2)
        others = ctx.exchange(kv_BSU, ctx.group)

        def gradients(rows: slice, kv_BEU: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
            dq_BNSD, *dkv_BNED = block_gradients(
                (q_BNSD[:, :, rows], *_keys(kv_BEU, heads)),
                grad_BNSV[:, :, rows],
                y_BNSV[:, :, rows],
                lse_BNS[:, :, rows],
                is_causal=is_causal,
            )
            if heads.num_keys < heads.num_queries:  # several query heads share a key head
                dkv_BNED = [torch.unflatten(x, 1, (heads.num_keys, -1)).sum(2) for x in dkv_BNED]
            dkv_BEU = torch.cat([x.transpose(1, 2).flatten(2) for x in dkv_BNED], 2)
            return dq_BNSD.transpose(1, 2).flatten(2), dkv_BEU

        dq_BSI, own_BSU = gradients(slice(None), kv_BSU, is_causal=True)
        dq_BSI = dq_BSI.float()
        for rows, kv_BEU in others.blocks():
            more_BSI, dkv_BEU = gradients(rows, kv_BEU, is_causal=False)
            dq_BSI[:, rows] += more_BSI
            others.take_gradient(dkv_BEU)
        own_BSU = others.own_gradient(own_BSU)
        return torch.cat((dq_BSI, own_BSU), 2).to(qkv_BSW.dtype), None, None, None


_attend_to_all: Callable[..., Tensor] = AttentionToAllRanks.apply


def _queries_and_keys(qkv_BSW: Tensor, heads: HeadSizes) -> tuple[Tensor, Tensor]:
    """Queries (B, N, S, D), and keys and values as one tensor."""
    q_BSND, _, _ = heads.split(qkv_BSW)
    return q_BSND.transpose(1, 2), qkv_BSW[:, :, heads.widths[0] :].contiguous()


def _keys(kv_BEU: Tensor, heads: HeadSizes) -> tuple[Tensor, Tensor]:
    """Keys (B, N, E, D) and values (B, N, E, V) with a head for each query head."""
    k_BEKD, v_BEKV = (
        torch.unflatten(x, 2, (heads.num_keys, -1))
        for x in torch.split(kv_BEU, heads.widths[1:], 2)
    )
    queries_a_head = heads.num_queries // heads.num_keys
    if queries_a_head > 1:
        k_BEKD, v_BEKV = (x.repeat_interleave(queries_a_head, dim=2) for x in (k_BEKD, v_BEKV))
    return k_BEKD.transpose(1, 2), v_BEKV.transpose(1, 2)


def _merge(y_BNSD: Tensor, lse_BNS: Tensor, more_BNSD: Tensor, more_lse_BNS: Tensor) -> None:
    """Merges the attention to more keys into y and its log-sum-exp, in place.

    y is a mean over keys with the weights exp(score): the share of the added keys in all weights is
    sigmoid(more_lse - lse) (arXiv:2205.14135, section 3.1).
    """
    y_BNSD.lerp_(more_BNSD.to(y_BNSD.dtype), (more_lse_BNS - lse_BNS).sigmoid_()[..., None])
    torch.logaddexp(lse_BNS, more_lse_BNS, out=lse_BNS)


class _Gathered:
    """The keys and values of all ranks, in one all-gather."""

    def __init__(self, kv_BSU: Tensor, group: AxisGroup) -> None:
        self._group, self._shape = group, kv_BSU.shape
        self._half, self._block = kv_BSU.shape[1] // 2, 0
        self._gradients: Tensor | None = None
        with part("cp"):
            self._whole, self._work = start_gather_rows(kv_BSU, group)

    def _parts(self, whole: Tensor) -> list[tuple[slice, Tensor]]:
        """Queries and, by rank, the keys to which they attend: of earlier ranks, of later ranks."""
        whole_RBSU, rank = whole.view(self._group.size, *self._shape), self._group.rank
        earlier, later = whole_RBSU[:rank, :, : self._half], whole_RBSU[rank + 1 :]
        parts = [(slice(None), earlier), (slice(self._half, None), later)]
        return [(rows, keys) for rows, keys in parts if len(keys)]

    def blocks(self) -> Iterator[Block]:
        """Yields blocks until all queries have attended to all keys before them."""
        with part("cp"):
            finish(self._work)
        for block, (rows, keys_RBEU) in enumerate(self._parts(self._whole)):
            self._block = block
            yield rows, keys_RBEU.transpose(0, 1).flatten(1, 2)

    def take_gradient(self, dkv_BEU: Tensor) -> None:
        """Takes the gradient of the keys and values of the block that came last."""
        if self._gradients is None:
            self._gradients = torch.zeros_like(self._whole)
        _, into_RBEU = self._parts(self._gradients)[self._block]
        into_RBEU.copy_(torch.unflatten(dkv_BEU, 1, (len(into_RBEU), -1)).transpose(0, 1))

    def own_gradient(self, own_BSU: Tensor) -> Tensor:
        """Sums the gradient of the own keys and values over all ranks; a reduce-scatter."""
        assert self._gradients is not None, "every rank attends to a part of another's keys"
        self._gradients.view(self._group.size, *self._shape)[self._group.rank] = own_BSU
        del self._whole
        with part("cp"):
            return scatter_rows(self._gradients, self._group)


class _RingExchange:
    """The keys and values of one rank after the other, from the nearest earlier one on."""

    def __init__(self, kv_BSU: Tensor, group: AxisGroup) -> None:
        self._group, self._half = group, kv_BSU.shape[1] // 2
        self._keys = _Passing(kv_BSU, group, channel=0)
        self._gradients: _Passing | None = None
        self._shape, self._rows = kv_BSU.shape, slice(None)

    def blocks(self) -> Iterator[Block]:
        """Yields blocks until all queries have attended to all keys before them."""
        for step in range(1, self._group.size):
            kv_BSU = self._keys.arrived()
            if step < self._group.size - 1:
                self._keys = _Passing(kv_BSU, self._group, channel=0)
            is_earlier = step <= self._group.rank
            # The queries, and the positions of the keys: a later rank's keys meet the tail half.
            self._rows = slice(0, self._half) if is_earlier else slice(None)
            yield slice(None) if is_earlier else slice(self._half, None), kv_BSU[:, self._rows]

    def take_gradient(self, dkv_BEU: Tensor) -> None:
        """Adds the gradient of the last block to what other ranks computed, and passes it on."""
        sum_BSU = torch.zeros(self._shape, dtype=torch.float32, device=dkv_BEU.device)
        sum_BSU[:, self._rows] = dkv_BEU
        if self._gradients is not None:
            sum_BSU += self._gradients.arrived()
        self._gradients = _Passing(sum_BSU, self._group, channel=1)

    def own_gradient(self, own_BSU: Tensor) -> Tensor:
        """Adds the gradient that the own keys and values got on the way around the ring."""
        assert self._gradients is not None, "a ring has two ranks or more"
        return own_BSU + self._gradients.arrived()


class _Passing:
    """A tensor on its way to the next rank, while the previous rank's arrives."""

    def __init__(self, outgoing: Tensor, group: AxisGroup, *, channel: int) -> None:
        self._outgoing, self._incoming = outgoing, torch.empty_like(outgoing)
        with part("cp"):
            self._works: Sequence[Pending] = start_ring_step(
                outgoing, self._incoming, group, channel
            )

    def arrived(self) -> Tensor:
        """Waits for both directions; returns the previous rank's tensor."""
        with part("cp"):
            for work in self._works:
                finish(work)
        return self._incoming


class HeadsForTokens(Function):
    """Gives the tokens of this rank for some heads of the whole sequence, or takes them back.

    From (B, S, W) to (B, R S, W / R), in the order of the sequence; or the reverse. Backward is the
    other way. `sections` are features of queries, keys and values: each rank gets a part of each.
    Communicates: an all-to-all over cp each.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sections: list[int], group: AxisGroup, is_reverse: bool
    ) -> Tensor:
        ctx.sections, ctx.group, ctx.is_reverse = sections, group, is_reverse
        return (_to_tokens if is_reverse else _to_heads)(x, sections, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        move = _to_heads if ctx.is_reverse else _to_tokens
        return move(grad, ctx.sections, ctx.group), None, None, None


def _attend_by_heads(
    qkv_BSW: Tensor, heads: HeadSizes, *, group: AxisGroup, core: AttentionCore
) -> Tensor:
    """Attention to whole sequences, with 1 / R of the heads."""
    queries, keys = heads.num_queries // group.size, heads.num_keys // group.size
    own = heads._replace(num_queries=queries, num_keys=keys)
    y = core(_heads_for_tokens(qkv_BSW, heads.widths, group, False), own).flatten(2)
    y_BSO = _heads_for_tokens(y, [y.shape[2] * group.size], group, True)
    return torch.unflatten(y_BSO, 2, (heads.num_queries, -1))


_heads_for_tokens: Callable[..., Tensor] = HeadsForTokens.apply


def _to_heads(x_BSW: Tensor, sections: list[int], group: AxisGroup) -> Tensor:
    by_rank = [
        torch.unflatten(heads, 2, (group.size, -1)) for heads in torch.split(x_BSW, sections, 2)
    ]
    with part("cp"):
        x_RBSW = all_to_all(torch.cat(by_rank, 3).permute(2, 0, 1, 3).contiguous(), group)
    # Head halves in the order of the ranks, then tail halves in the reverse order.
    head_RBSW, tail_RBSW = x_RBSW.chunk(2, dim=2)
    return torch.cat((head_RBSW, tail_RBSW.flip(0))).transpose(0, 1).flatten(1, 2)


def _to_tokens(y: Tensor, sections: list[int], group: AxisGroup) -> Tensor:
    head_BRSW, tail_BRSW = torch.unflatten(y, 1, (2 * group.size, -1)).chunk(2, dim=1)
    x_BRSW = torch.cat((head_BRSW, tail_BRSW.flip(1)), 2)
    with part("cp"):
        x_RBSW = all_to_all(x_BRSW.transpose(0, 1).contiguous(), group)
    of_rank = [size // group.size for size in sections]
    split = torch.split(x_RBSW, of_rank, 3)
    return torch.cat([heads.permute(1, 2, 0, 3).flatten(2) for heads in split], 2)
