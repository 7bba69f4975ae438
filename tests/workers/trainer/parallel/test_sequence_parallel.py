"""Sequence parallelism: what a layer sends, and what it saves."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from search_spaces.estimates.memory import peak_memory_bytes
from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape
from tests.workers.trainer.cases import lone_mesh, make_layout, make_shape, make_training, on_layout
from tests.workers.trainer.parallel_layers import TP, CountingCollectives
from workers.trainer.probe.measurement import rehearse
from workers.trainer.training import Training

pytestmark = pytest.mark.ranks

CUT = make_layout(tp=TP, sequence_parallel=True)


def collectives(shape: ModelShape, *, passes_alone: bool) -> Counter[str]:
    """What the passes of one step, or all of it, send over tp."""

    def work(training: Training) -> Counter[str]:
        with CountingCollectives(training.mesh) as counting:
            if passes_alone:
                training.pipeline.run(training.batch(0))
            else:
                training.step(training.batch(0))
        return counting.counts

    counts = on_layout(CUT, work, shape)
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
    return on_layout(layout, functools.partial(rehearse, limit_bytes=None), DEEP)


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
