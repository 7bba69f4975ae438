"""Sequence parallelism: each layer against the dense one, what a layer sends, and what it saves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from search_spaces.estimates.memory import peak_memory_bytes
from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape
from tests.workers.trainer.cases import lone_mesh, make_layout, make_shape, make_training
from tests.workers.trainer.parallel_layers import (
    TP,
    CountingCollectives,
    drawn,
    gradient,
    on_tp_ranks,
    weight,
)
from tests.workers.trainer.ranks import run_ranks
from tests.workers.trainer.tolerances import assert_close
from workers.trainer.comm.mesh import build_mesh
from workers.trainer.model.tensor_parallel import ColumnParallel, RowParallel
from workers.trainer.model.vocabulary import Embedding
from workers.trainer.probe.measurement import rehearse

pytestmark = pytest.mark.ranks

CUT = make_layout(tp=TP, sequence_parallel=True)


def halves(rank: int) -> slice:
    """This rank's tokens of six."""
    return slice(rank * 3, rank * 3 + 3)


def test_a_column_layer_gathers_tokens_and_scatters_their_gradient() -> None:
    x, w, b, dy = (drawn(*s, seed=i) for i, s in enumerate([(6, 8), (10, 8), (10,), (6, 10)]))

    def work(rank: int, group: Any) -> list[Tensor]:
        rows = slice(rank * 5, rank * 5 + 5)
        layer = ColumnParallel(weight(w[rows]), weight(b[rows]), group, cuts_tokens=True)
        x_in = x[halves(rank)].clone().requires_grad_()
        y = layer(x_in)
        y.backward(dy[:, rows])
        assert layer.bias is not None
        return [y, x_in.grad, gradient(layer.weight), gradient(layer.bias)]  # type: ignore[list-item]

    results = on_tp_ranks(work)
    dense = [t.clone().requires_grad_() for t in (x, w, b)]
    y = F.linear(*dense)
    y.backward(dy)
    assert_close(torch.cat([r[0] for r in results], 1), y.detach(), length=10)
    for index, expected in enumerate(dense, start=1):
        assert_close(torch.cat([r[index] for r in results]), expected.grad, length=10)


def test_a_row_layer_scatters_its_sum_and_each_rank_has_a_part_of_the_bias_gradient() -> None:
    x, w, b, dy, residual = (
        drawn(*s, seed=i) for i, s in enumerate([(6, 8), (10, 8), (10,), (6, 10), (6, 10)])
    )

    def work(rank: int, group: Any) -> list[Tensor]:
        columns = slice(rank * 4, rank * 4 + 4)
        layer = RowParallel(weight(w[:, columns]), weight(b), group, cuts_tokens=True)
        x_in = x[:, columns].clone().requires_grad_()
        r_in = residual[halves(rank)].clone().requires_grad_()
        y = layer(x_in, r_in)
        y.backward(dy[halves(rank)])
        assert layer.bias is not None
        return [y, x_in.grad, r_in.grad, gradient(layer.weight), gradient(layer.bias)]  # type: ignore[list-item]

    results = on_tp_ranks(work)
    dense = [t.clone().requires_grad_() for t in (x, w, b)]
    y = F.linear(*dense) + residual
    y.backward(dy)
    assert_close(torch.cat([r[0] for r in results]), y.detach(), length=10)
    assert_close(torch.cat([r[1] for r in results], 1), dense[0].grad, length=10)
    assert_close(torch.cat([r[2] for r in results]), dy, length=10)
    assert_close(torch.cat([r[3] for r in results], 1), dense[1].grad, length=10)
    assert_close(results[0][4] + results[1][4], dense[2].grad, length=10)


@pytest.mark.parametrize("seq_length", [2, 3, 6], ids="positions={}".format)
def test_an_embedding_knows_the_positions_of_its_stretch_of_tokens(seq_length: int) -> None:
    """Six tokens in two stretches: cut within a sequence, between two, and a sequence in half."""
    w, positions, dy = drawn(12, 4, seed=0), drawn(seq_length, 4, seed=1), drawn(6, 4, seed=2)
    ids = torch.tensor([0, 5, 6, 11, 5, 7])

    def work(rank: int, group: Any) -> list[Tensor]:
        rows = slice(rank * 6, rank * 6 + 6)
        layer = Embedding(
            weight(w[rows]), weight(positions), tp_rank=rank, group=group, cuts_tokens=True
        )
        y = layer(ids)
        y.backward(dy[halves(rank)])
        assert layer.positions is not None
        return [y, gradient(layer.weight), gradient(layer.positions)]

    results = on_tp_ranks(work)
    dense, dense_positions = w.clone().requires_grad_(), positions.clone().requires_grad_()
    y = F.embedding(ids, dense) + dense_positions.repeat(6 // seq_length, 1)
    y.backward(dy)
    assert_close(torch.cat([r[0] for r in results]), y.detach(), length=6)
    assert_close(torch.cat([r[1] for r in results]), dense.grad, length=6)
    assert_close(results[0][2] + results[1][2], dense_positions.grad, length=6)


def collectives(shape: ModelShape, *, passes_alone: bool) -> Counter[str]:
    """What the passes of one step, or all of it, send over tp."""

    def work(rank: int) -> Counter[str]:
        mesh = build_mesh(rank, CUT, tied_embeddings=False)
        training = make_training(shape, mesh=mesh)
        with CountingCollectives(mesh) as counting:
            if passes_alone:
                training.pipeline.run(training.batch(0))
            else:
                training.step(training.batch(0))
        return counting.counts

    counts = run_ranks(TP, work)
    assert counts[0] == counts[1]
    return counts[0]


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_layer_sends_four_pairs_of_gather_and_scatter_a_microbatch(family: str) -> None:
    two, four = (collectives(make_shape(family, num_layers=n), passes_alone=True) for n in (2, 4))
    per_layer = {name: (four[name] - n) / 2 / CUT.num_microbatches for name, n in two.items()}
    reductions = per_layer.pop("shared::all_reduce")
    assert reductions == 0
    assert sorted(per_layer.values()) == [4, 4], per_layer
    ends = {name: n / CUT.num_microbatches - 2 * 4 for name, n in two.items() if name in per_layer}
    assert sorted(ends.values()) == [2, 2], "the embedding's and the head's, both ways"
    assert two["shared::all_reduce"] == 2 * CUT.num_microbatches, "cross-entropy"


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_replicated_gradients_are_summed_once_a_step(family: str) -> None:
    shape = make_shape(family)
    passes, step = (collectives(shape, passes_alone=alone) for alone in (True, False))
    assert step - passes == {"shared::all_reduce": 2}, "the gradients, and the sums reported"


DEEP = make_shape(num_layers=8, hidden_size=128, ffn_hidden_size=128, seq_length=64)


def peaks(**changes: Any) -> list[int]:
    layout = Layout(**{"tp": TP, "micro_batch_size": 16, "num_microbatches": 2, **changes})

    def work(rank: int) -> int:
        mesh = build_mesh(rank, layout, tied_embeddings=False)
        return rehearse(make_training(DEEP, mesh=mesh), limit_bytes=None)

    return run_ranks(layout.num_devices, work)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("pp", [1, 2])
def test_cutting_the_tokens_lowers_the_peak_of_every_rank(pp: int, recompute: str) -> None:
    axes = {"pp": pp, "recompute": recompute}
    whole, cut = peaks(**axes), peaks(sequence_parallel=True, **axes)
    assert all(less < more for less, more in zip(cut, whole, strict=True)), (cut, whole)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_estimate_knows_what_cut_tokens_save(recompute: str) -> None:
    layout = Layout(tp=TP, micro_batch_size=16, num_microbatches=2, recompute=recompute)  # type: ignore[arg-type]
    for sequence_parallel in (False, True):
        estimated = peak_memory_bytes(replace(layout, sequence_parallel=sequence_parallel), DEEP)
        measured = peaks(recompute=recompute, sequence_parallel=sequence_parallel)
        assert measured == pytest.approx([float(estimated)] * TP, rel=0.12)


def test_one_rank_alone_has_no_tokens_to_cut() -> None:
    mesh = lone_mesh(make_layout(sequence_parallel=True))
    training, plain = make_training(make_shape(), mesh=mesh), make_training(make_shape())
    assert training.step(training.batch(0)) == plain.step(plain.batch(0))
