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

Shapes: B sequences, S positions of this rank, E positions of keys, N local query heads, K key
heads, M heads of a fused projection (N + 2 K) or of keys and values (2 K), D head size, R ranks.
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

    def attend(qkv_BSMD: Tensor, num_heads: int) -> Tensor:
        return _attend_to_all(qkv_BSMD, num_heads, group, exchange)

    return partial(recomputed_attention, attend=attend) if recomputes else attend


class AttentionToAllRanks(Function):
    """Causal attention to the keys of all ranks of cp.

    Forward: keys and values over cp. Backward: keys and values again, and their gradients. Queries,
    keys and values of this rank, the output and the log-sum-exp of each row are kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv_BSMD: Tensor,
        num_heads: int,
        group: AxisGroup,
        exchange: type[_Gathered] | type[_RingExchange],
    ) -> Tensor:
        q_BNSD, kv_BSMD = _queries_and_keys(qkv_BSMD, num_heads)
        others = exchange(kv_BSMD, group)
        own_y_BNSD, lse_BNS = attend_block(q_BNSD, *_heads(kv_BSMD, num_heads), is_causal=True)
        y_BNSD = own_y_BNSD.float()
        for rows, kv_BEMD in others.blocks():
            _merge(
                y_BNSD[:, :, rows],
                lse_BNS[:, :, rows],
                *attend_block(q_BNSD[:, :, rows], *_heads(kv_BEMD, num_heads), is_causal=False),
            )
        y_BSND = y_BNSD.to(qkv_BSMD.dtype).transpose(1, 2)
        ctx.save_for_backward(qkv_BSMD, y_BSND, lse_BNS)
        ctx.num_heads, ctx.group, ctx.exchange = num_heads, group, exchange
        return y_BSND

    @staticmethod
    def backward(ctx: Any, grad_BSND: Tensor) -> tuple[Tensor, None, None, None]:
        qkv_BSMD, y_BSND, lse_BNS = ctx.saved_tensors
        q_BNSD, kv_BSMD = _queries_and_keys(qkv_BSMD, ctx.num_heads)
        grad_BNSD, y_BNSD = grad_BSND.transpose(1, 2), y_BSND.transpose(1, 2)
        others = ctx.exchange(kv_BSMD, ctx.group)

        def gradients(rows: slice, kv_BEMD: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
            dq_BNSD, dkv_BMED = block_gradients(
                (q_BNSD[:, :, rows], *_heads(kv_BEMD, ctx.num_heads)),
                grad_BNSD[:, :, rows],
                y_BNSD[:, :, rows],
                lse_BNS[:, :, rows],
                is_causal=is_causal,
            )
            if dkv_BMED.shape[1] > kv_BEMD.shape[2]:  # several query heads share a key head
                dkv_BMED = torch.unflatten(dkv_BMED, 1, (kv_BEMD.shape[2], -1)).sum(2)
            return dq_BNSD.transpose(1, 2), dkv_BMED.transpose(1, 2)

        dq_BSND, own_BSMD = gradients(slice(None), kv_BSMD, is_causal=True)
        dq_BSND = dq_BSND.float()
        for rows, kv_BEMD in others.blocks():
            more_BSND, dkv_BEMD = gradients(rows, kv_BEMD, is_causal=False)
            dq_BSND[:, rows] += more_BSND
            others.take_gradient(dkv_BEMD)
        own_BSMD = others.own_gradient(own_BSMD)
        return torch.cat((dq_BSND, own_BSMD), 2).to(qkv_BSMD.dtype), None, None, None


_attend_to_all: Callable[..., Tensor] = AttentionToAllRanks.apply


def _queries_and_keys(qkv_BSMD: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    return qkv_BSMD[:, :, :num_heads].transpose(1, 2), qkv_BSMD[:, :, num_heads:].contiguous()


def _heads(kv_BEMD: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values with a head for each query head, (B, N, E, D)."""
    queries_a_head = 2 * num_heads // kv_BEMD.shape[2]
    if queries_a_head > 1:
        kv_BEMD = kv_BEMD.repeat_interleave(queries_a_head, dim=2)
    k_BEND, v_BEND = kv_BEMD.chunk(2, dim=2)
    return k_BEND.transpose(1, 2), v_BEND.transpose(1, 2)


def _merge(y_BNSD: Tensor, lse_BNS: Tensor, more_BNSD: Tensor, more_lse_BNS: Tensor) -> None:
    """Merges the attention to more keys into y and its log-sum-exp, in place.

    y is a mean over keys with the weights exp(score): the share of the added keys in all weights is
    sigmoid(more_lse - lse) (arXiv:2205.14135, section 3.1).
    """
    y_BNSD.lerp_(more_BNSD.to(y_BNSD.dtype), (more_lse_BNS - lse_BNS).sigmoid_()[..., None])
    torch.logaddexp(lse_BNS, more_lse_BNS, out=lse_BNS)


class _Gathered:
    """The keys and values of all ranks, in one all-gather."""

    def __init__(self, kv_BSMD: Tensor, group: AxisGroup) -> None:
        self._group, self._shape = group, kv_BSMD.shape
        self._half, self._block = kv_BSMD.shape[1] // 2, 0
        self._gradients: Tensor | None = None
        with part("cp"):
            self._whole, self._work = start_gather_rows(kv_BSMD, group)

    def _parts(self, whole: Tensor) -> list[tuple[slice, Tensor]]:
        """Queries and, by rank, the keys to which they attend: of earlier ranks, of later ranks."""
        whole_RBSMD, rank = whole.view(self._group.size, *self._shape), self._group.rank
        earlier, later = whole_RBSMD[:rank, :, : self._half], whole_RBSMD[rank + 1 :]
        parts = [(slice(None), earlier), (slice(self._half, None), later)]
        return [(rows, keys) for rows, keys in parts if len(keys)]

    def blocks(self) -> Iterator[Block]:
        """Yields blocks until all queries have attended to all keys before them."""
        with part("cp"):
            finish(self._work)
        for block, (rows, keys_RBEMD) in enumerate(self._parts(self._whole)):
            self._block = block
            yield rows, keys_RBEMD.transpose(0, 1).flatten(1, 2)

    def take_gradient(self, dkv_BEMD: Tensor) -> None:
        """Takes the gradient of the keys and values of the block that came last."""
        if self._gradients is None:
            self._gradients = torch.zeros_like(self._whole)
        _, into_RBEMD = self._parts(self._gradients)[self._block]
        into_RBEMD.copy_(torch.unflatten(dkv_BEMD, 1, (len(into_RBEMD), -1)).transpose(0, 1))

    def own_gradient(self, own_BSMD: Tensor) -> Tensor:
        """Sums the gradient of the own keys and values over all ranks; a reduce-scatter."""
        assert self._gradients is not None, "every rank attends to a part of another's keys"
        self._gradients.view(self._group.size, *self._shape)[self._group.rank] = own_BSMD
        del self._whole
        with part("cp"):
            return scatter_rows(self._gradients, self._group)


class _RingExchange:
    """The keys and values of one rank after the other, from the nearest earlier one on."""

    def __init__(self, kv_BSMD: Tensor, group: AxisGroup) -> None:
        self._group, self._half = group, kv_BSMD.shape[1] // 2
        self._keys = _Passing(kv_BSMD, group, channel=0)
        self._gradients: _Passing | None = None
        self._shape, self._rows = kv_BSMD.shape, slice(None)

    def blocks(self) -> Iterator[Block]:
        """Yields blocks until all queries have attended to all keys before them."""
        for step in range(1, self._group.size):
            kv_BSMD = self._keys.arrived()
            if step < self._group.size - 1:
                self._keys = _Passing(kv_BSMD, self._group, channel=0)
            is_earlier = step <= self._group.rank
            # The queries, and the positions of the keys: a later rank's keys meet the tail half.
            self._rows = slice(0, self._half) if is_earlier else slice(None)
            yield slice(None) if is_earlier else slice(self._half, None), kv_BSMD[:, self._rows]

    def take_gradient(self, dkv_BEMD: Tensor) -> None:
        """Adds the gradient of the last block to what other ranks computed, and passes it on."""
        sum_BSMD = torch.zeros(self._shape, dtype=torch.float32, device=dkv_BEMD.device)
        sum_BSMD[:, self._rows] = dkv_BEMD
        if self._gradients is not None:
            sum_BSMD += self._gradients.arrived()
        self._gradients = _Passing(sum_BSMD, self._group, channel=1)

    def own_gradient(self, own_BSMD: Tensor) -> Tensor:
        """Adds the gradient that the own keys and values got on the way around the ring."""
        assert self._gradients is not None, "a ring has two ranks or more"
        return own_BSMD + self._gradients.arrived()


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

    From (B, S, M, D) to (B, R S, M / R, D), in the order of the sequence; or the reverse. Backward
    is the other way. `sections` are heads of queries, keys and values: each rank gets a part of
    each. Communicates: an all-to-all over cp each.
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
    qkv_BSMD: Tensor, num_heads: int, *, group: AxisGroup, core: AttentionCore
) -> Tensor:
    """Attention to whole sequences, with 1 / R of the heads."""
    num_kv_heads = (qkv_BSMD.shape[2] - num_heads) // 2
    sections = [num_heads, num_kv_heads, num_kv_heads]
    y = core(_heads_for_tokens(qkv_BSMD, sections, group, False), num_heads // group.size)
    return _heads_for_tokens(y, [num_heads], group, True)


_heads_for_tokens: Callable[..., Tensor] = HeadsForTokens.apply


def _to_heads(x_BSMD: Tensor, sections: list[int], group: AxisGroup) -> Tensor:
    by_rank = [
        torch.unflatten(heads, 2, (group.size, -1)) for heads in torch.split(x_BSMD, sections, 2)
    ]
    with part("cp"):
        x_RBSMD = all_to_all(torch.cat(by_rank, 3).permute(2, 0, 1, 3, 4).contiguous(), group)
    # Head halves in the order of the ranks, then tail halves in the reverse order.
    head_RBSMD, tail_RBSMD = x_RBSMD.chunk(2, dim=2)
    return torch.cat((head_RBSMD, tail_RBSMD.flip(0))).transpose(0, 1).flatten(1, 2)


def _to_tokens(y: Tensor, sections: list[int], group: AxisGroup) -> Tensor:
    head_BRSMD, tail_BRSMD = torch.unflatten(y, 1, (2 * group.size, -1)).chunk(2, dim=1)
    x_BRSMD = torch.cat((head_BRSMD, tail_BRSMD.flip(1)), 2)
    with part("cp"):
        x_RBSMD = all_to_all(x_BRSMD.transpose(0, 1).contiguous(), group)
    of_rank = [size // group.size for size in sections]
    split = torch.split(x_RBSMD, of_rank, 3)
    return torch.cat([heads.permute(1, 2, 0, 3, 4).flatten(2, 3) for heads in split], 2)
