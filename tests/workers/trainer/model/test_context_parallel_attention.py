"""Attention to sequences that ranks share, against its definition; the elements that it sends.

Sequences cut into heads and tails give what whole sequences do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from search_spaces.spec.layout import CP_COMM_TYPES, Layout
from tests.workers.trainer.model.test_attention import defined, values_of
from tests.workers.trainer.parallel_layers import drawn
from tests.workers.trainer.ranks import run_ranks
from tests.workers.trainer.tolerances import operation_error, relative_distance
from workers.trainer.batches import own_chunks
from workers.trainer.comm import collectives
from workers.trainer.comm.mesh import Mesh, build_mesh
from workers.trainer.model.context_parallel import attention_core

pytestmark = pytest.mark.ranks

COMM_TYPES = pytest.mark.parametrize("comm_type", CP_COMM_TYPES)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SEQUENCES, HEADS, SIZE = 2, 12, 8


def mesh_of(rank: int, cp: int, comm_type: Any, **changes: Any) -> Mesh:
    shares = changes.pop("shares_memory", True)
    layout = Layout(cp=cp, cp_comm_type=comm_type, **changes)
    return build_mesh(rank, layout, tied_embeddings=False, shares_memory=shares)


def put_together(parts: list[Tensor], cp: int) -> Tensor:
    """Whole sequences of the ranks' chunks."""
    positions = [own_chunks(torch.arange(cp * parts[0].shape[1]), cp, rank) for rank in range(cp)]
    return torch.cat(parts, 1)[:, torch.cat(positions).argsort()]


@COMM_TYPES
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("num_kv_heads", [12, 6])
@pytest.mark.parametrize(("cp", "length"), [(2, 160), (3, 96), (3, 6)])
def test_output_and_gradients_are_those_of_the_whole_sequence(
    comm_type: str, precision: str, num_kv_heads: int, cp: int, length: int
) -> None:
    dtype = DTYPES[precision]
    qkv = drawn(SEQUENCES, length, HEADS + 2 * num_kv_heads, SIZE, seed=0).to(dtype)
    dy = drawn(SEQUENCES, length, HEADS, SIZE, seed=1).to(dtype)

    def work(rank: int) -> Any:
        mesh = mesh_of(rank, cp, comm_type)
        own, own_dy = (own_chunks(whole, cp, rank, dim=1) for whole in (qkv, dy))
        return [
            each.float().numpy() for each in values_of(attention_core(mesh), own, HEADS, own_dy)
        ]

    found = [[torch.from_numpy(each) for each in of_rank] for of_rank in run_ranks(cp, work)]
    expected = values_of(defined, qkv.double(), HEADS, dy.double())
    for parts, exact in zip(zip(*found, strict=True), expected, strict=True):
        # Beyond those of attention in one block: the sums of a head's gradients over blocks.
        allowed = operation_error(dtype, length=length, roundings=8 + cp)
        assert relative_distance(put_together(list(parts), cp), exact) < allowed


@COMM_TYPES
def test_recomputed_attention_and_other_transports_have_the_same_bits(comm_type: str) -> None:
    qkv = drawn(SEQUENCES, 32, 3 * HEADS, SIZE, seed=0)
    dy = drawn(SEQUENCES, 32, HEADS, SIZE, seed=1)

    def work(rank: int) -> bool:
        own, own_dy = (own_chunks(whole, 2, rank, dim=1) for whole in (qkv, dy))
        meshes = (
            mesh_of(rank, 2, comm_type),
            mesh_of(rank, 2, comm_type, recompute="selective"),
            mesh_of(rank, 2, comm_type, shares_memory=False),
        )
        first, *others = (values_of(attention_core(mesh), own, HEADS, own_dy) for mesh in meshes)
        return all(torch.equal(a, b) for each in others for a, b in zip(each, first, strict=True))

    assert all(run_ranks(2, work))


def elements_of(cp: int, comm_type: str, num_kv_heads: int, monkeypatch: Any) -> tuple[int, int]:
    """Elements that a rank sends forward, and backward."""
    sent: list[int] = []
    shares = {
        "comm.collectives.start_all_gather": 1,
        "comm.collectives.start_reduce_scatter": 1,
        "model.context_parallel.all_to_all": 0,
    }

    def counted(name: str, place: int) -> Any:
        whole = getattr(collectives, name.rpartition(".")[2])

        def call(*arguments: Any) -> Any:
            of_one = arguments[place].numel()
            if name.endswith("start_all_gather"):
                sent.append(of_one * (cp - 1))
            else:
                sent.append(of_one * (cp - 1) // cp)
            return whole(*arguments)

        return call

    length = 8 * cp

    def work(rank: int) -> tuple[int, int]:
        mesh = mesh_of(rank, cp, comm_type)
        for name, place in shares.items():
            monkeypatch.setattr(f"workers.trainer.{name}", counted(name, place))

        def ring(outgoing: Tensor, *others: Any) -> Any:
            sent.append(outgoing.numel())
            return collectives.start_ring_step(outgoing, *others)

        monkeypatch.setattr("workers.trainer.model.context_parallel.start_ring_step", ring)
        x = drawn(SEQUENCES, length // cp, HEADS + 2 * num_kv_heads, SIZE, seed=0).requires_grad_()
        y = attention_core(mesh)(x, HEADS)
        forward = sum(sent)
        y.sum().backward()
        return forward, sum(sent) - forward

    found = run_ranks(cp, work)
    assert len(set(found)) == 1
    forward, backward = found[0]
    return forward, backward


@COMM_TYPES
@pytest.mark.parametrize("cp", [2, 3])
def test_a_rank_sends_as_many_elements_as_the_formulas_say(
    comm_type: str, cp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With s tokens of b sequences, n ranks, and q and kv elements of a token's heads."""
    num_kv_heads, tokens = 6, SEQUENCES * 8 * cp
    q, kv = HEADS * SIZE, num_kv_heads * SIZE
    keys = 2 * tokens * kv * (cp - 1) // cp
    heads = 2 * (q + kv) * (tokens // cp) * (cp - 1) // cp
    expected = (heads, heads) if comm_type == "a2a" else (keys, 2 * keys)
    assert elements_of(cp, comm_type, num_kv_heads, monkeypatch) == expected
