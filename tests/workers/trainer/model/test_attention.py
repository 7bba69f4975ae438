"""Attention against its definition, in double precision; what it sends where ranks share it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from layout_tuner.search_spaces.layouts.layout import CP_COMM_TYPES, Layout
from layout_tuner.workers.trainer.comm import collectives
from layout_tuner.workers.trainer.comm.mesh import build_mesh
from layout_tuner.workers.trainer.model import attention
from layout_tuner.workers.trainer.model.attention import (
    AttentionCore,
    HeadSizes,
    causal_attention,
    recomputed_attention,
)
from layout_tuner.workers.trainer.model.context_parallel import attention_core
from tests.workers.trainer.parallel_layers import drawn
from tests.workers.trainer.ranks import run_ranks
from tests.workers.trainer.tolerances import (
    assert_close,
    operation_error,
    relative_distance,
    sum_error,
)

HEADS = [
    pytest.param(HeadSizes(4, 4, 8, 8), id="a-key-a-query"),
    pytest.param(HeadSizes(4, 2, 8, 8), id="grouped"),
    pytest.param(HeadSizes(4, 4, 12, 8), id="narrow-values"),
    pytest.param(HeadSizes(4, 4, 8, 12), id="wide-values"),
]


def drawn_for(heads: HeadSizes, batch: int, seq_length: int) -> tuple[Tensor, Tensor]:
    """A fused projection, and a gradient of the output."""
    dy = drawn(batch, seq_length, heads.num_queries, heads.value_size, seed=1)
    return drawn(batch, seq_length, sum(heads.widths), seed=0), dy


def defined(qkv: Tensor, heads: HeadSizes) -> Tensor:
    queries, keys, key_size, value_size = heads
    widths = queries * key_size, keys * key_size, keys * value_size
    q, k, v = torch.split(qkv, widths, dim=2)
    q, k, v = (
        x.reshape(*qkv.shape[:2], -1, n) for x, n in ((q, key_size), (k, key_size), (v, value_size))
    )
    k, v = (part.repeat_interleave(queries // keys, dim=2) for part in (k, v))
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) / key_size**0.5
    future = torch.ones(qkv.shape[1], qkv.shape[1]).triu(1).bool()
    return torch.einsum("bnqk,bknd->bqnd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def values_of(
    attend: AttentionCore, qkv: Tensor, heads: HeadSizes, dy: Tensor
) -> tuple[Tensor, Tensor]:
    x = qkv.clone().requires_grad_()
    y = attend(x, heads)
    y.backward(dy)
    return y.detach(), x.grad


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("seq_length", [1, 16, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_and_its_gradient_are_those_of_the_definition(
    dtype: torch.dtype, seq_length: int, heads: HeadSizes
) -> None:
    qkv, dy = (x.to(dtype) for x in drawn_for(heads, 2, seq_length))
    expected = values_of(defined, qkv.double(), heads, dy.double())
    found = values_of(causal_attention, qkv, heads, dy)
    for value, exact in zip(found, expected, strict=True):
        assert value.dtype == dtype
        # Rounded values: the probabilities and the output; in the backward pass the output again,
        # for the gradient of the scores, the probabilities, that gradient, and its three results.
        allowed = operation_error(dtype, length=seq_length, roundings=8)
        assert relative_distance(value, exact) < allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_the_same_however_few_heads_are_worked_on_at_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = HeadSizes(5, 5, 8, 8)
    qkv, dy = (x.to(dtype) for x in drawn_for(heads, 2, 100))
    at_once = values_of(causal_attention, qkv, heads, dy)
    for heads_at_once in (1, 2):
        monkeypatch.setattr(attention, "_SCORES_AT_ONCE", heads_at_once * 64 * 100)
        for value, expected in zip(
            values_of(causal_attention, qkv, heads, dy), at_once, strict=True
        ):
            # The same numbers are rounded after sums over the positions in another order.
            assert_close(value, expected, length=100, roundings=2)


@pytest.mark.parametrize("heads", HEADS)
def test_attention_that_is_recomputed_has_the_same_bits(heads: HeadSizes) -> None:
    qkv, dy = drawn_for(heads, 2, 70)
    kept = values_of(causal_attention, qkv, heads, dy)
    again = values_of(recomputed_attention, qkv, heads, dy)
    for value, expected in zip(again, kept, strict=True):
        assert torch.equal(value, expected)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    heads = HeadSizes(2, 2, 8, 8)
    qkv, dy = drawn_for(heads, 1, 80)
    qkv *= 10
    expected = values_of(defined, qkv.double(), heads, dy.double())
    q, k, _ = heads.split(qkv.double())
    largest = float(torch.einsum("bqnd,bknd->bnqk", q, k).abs().max()) / 8**0.5
    # The exponential turns the absolute error of a score into a relative one: of its sum over 8
    # terms, and of the other results, which are sums over 80 positions.
    allowed = sum_error(8) * largest + sum_error(80)
    for value, exact in zip(values_of(causal_attention, qkv, heads, dy), expected, strict=True):
        assert relative_distance(value, exact) < allowed


@pytest.mark.ranks
@pytest.mark.parametrize("comm_type", CP_COMM_TYPES)
@pytest.mark.parametrize("value_size", [8, 4])
@pytest.mark.parametrize("cp", [2, 3])
def test_a_rank_sends_as_many_elements_as_the_formulas_say(
    comm_type: Any, cp: int, value_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With s tokens of b sequences, n ranks, and the elements of a token's heads."""
    heads, tokens = HeadSizes(12, 6, 8, value_size), 2 * 8 * cp
    sent: list[int] = []

    def counted(name: str, place: int, peers: int, parts: int) -> Any:
        """So many peers are each sent one of the parts of the argument at this place."""
        start = getattr(collectives, name)

        def call(*arguments: Any) -> Any:
            sent.append(arguments[place].numel() * peers // parts)
            return start(*arguments)

        return call

    starts = {
        "comm.collectives.start_all_gather": (1, cp - 1, 1),
        "comm.collectives.start_reduce_scatter": (1, cp - 1, cp),
        "model.context_parallel.all_to_all": (0, cp - 1, cp),
        "model.context_parallel.start_ring_step": (0, 1, 1),
    }

    def work(rank: int) -> tuple[int, int]:
        mesh = build_mesh(rank, Layout(cp=cp, cp_comm_type=comm_type), tied_embeddings=False)
        for name, how in starts.items():
            call = counted(name.rpartition(".")[2], *how)
            monkeypatch.setattr(f"layout_tuner.workers.trainer.{name}", call)
        x = drawn(2, tokens // 2 // cp, sum(heads.widths), seed=0).requires_grad_()
        y = attention_core(mesh)(x, heads)
        forward = sum(sent)
        y.sum().backward()
        return forward, sum(sent) - forward

    q, keys, values = heads.widths
    of_keys = tokens * (keys + values) * (cp - 1) // cp
    of_heads = (q + keys + values + 12 * value_size) * (tokens // cp) * (cp - 1) // cp
    expected = (of_heads, of_heads) if comm_type == "a2a" else (of_keys, 2 * of_keys)
    assert run_ranks(cp, work) == [expected] * cp
