"""Sequence parallelism: what a layer sends, and what it saves."""

from __future__ import annotations

from collections import Counter

import pytest

from search_spaces.spec.model_shape import ModelShape
from tests.workers.trainer.cases import lone_mesh, make_layout, make_shape, make_training, on_layout
from tests.workers.trainer.parallel_layers import TP, CountingCollectives
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
def test_a_layer_gathers_and_scatters_four_times_a_microbatch(family: str) -> None:
    two, four = (collectives(make_shape(family, num_layers=n), passes_alone=True) for n in (2, 4))
    per_layer = {name: (four[name] - n) / 2 / CUT.num_microbatches for name, n in two.items()}
    reductions = per_layer.pop("shared::all_reduce")
    assert reductions == 0
    assert sorted(per_layer.values()) == [4, 4], per_layer
    ends = {name: n / CUT.num_microbatches - 2 * 4 for name, n in two.items() if name in per_layer}
    assert sorted(ends.values()) == [2, 2], "the embedding's and the head's, both ways"
    assert two["shared::all_reduce"] == 2 * CUT.num_microbatches, "cross-entropy"
    step = collectives(make_shape(family), passes_alone=False)
    assert step - two == {"shared::all_reduce": 2}, "replicated gradients, and the sums reported"


def test_one_rank_alone_has_no_tokens_to_cut() -> None:
    mesh = lone_mesh(make_layout(sequence_parallel=True))
    training, plain = make_training(make_shape(), mesh=mesh), make_training(make_shape())
    assert training.step(training.batch(0)) == plain.step(plain.batch(0))
