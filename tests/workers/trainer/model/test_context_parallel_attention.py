"""The elements that attention to sequences that ranks share sends."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from search_spaces.spec.layout import CP_COMM_TYPES, Layout
from tests.workers.trainer.parallel_layers import drawn
from tests.workers.trainer.ranks import run_ranks
from workers.trainer.comm import collectives
from workers.trainer.comm.mesh import build_mesh
from workers.trainer.model.context_parallel import attention_core

pytestmark = pytest.mark.ranks

COMM_TYPES = pytest.mark.parametrize("comm_type", CP_COMM_TYPES)
SEQUENCES, HEADS, SIZE = 2, 12, 8


def elements_of(cp: int, comm_type: Any, num_kv_heads: int, monkeypatch: Any) -> tuple[int, int]:
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
        layout = Layout(cp=cp, cp_comm_type=comm_type)
        mesh = build_mesh(rank, layout, tied_embeddings=False)
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
