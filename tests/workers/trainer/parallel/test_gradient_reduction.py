"""When gradients go over the wire: early, in order, and only once they are final."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.workers.trainer.parallel import flat_buffers
from layout_tuner.workers.trainer.training import Training
from tests.workers.trainer.cases import make_shape, on_layout
from tests.workers.trainer.parallel_layers import sent_in

pytestmark = pytest.mark.ranks

SMALL_BUCKETS = 3000
DP = Layout(dp=2, micro_batch_size=2, num_microbatches=2)
ZERO = {0: DP, 1: replace(DP, zero_stage=1)}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_buffers, "BUCKET_ELEMENTS", SMALL_BUCKETS)


def starts(training: Training) -> list[tuple[int, list[int]]]:
    """Takes a step; for each bucket that starts, the gradients that all parameters still lack."""
    reduction, seen = training.reduction, []
    start = reduction._start

    def noting(index: int) -> None:
        seen.append((index, [slot.parameter.gradients_left for slot in training.flat.slots]))
        start(index)

    reduction._start = noting
    training.step(training.batch(0))
    return seen


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_bucket_starts_as_soon_as_it_is_final_while_the_backward_goes_on(zero_stage: int) -> None:
    def work(training: Training) -> Any:
        buckets = [training.flat.plan.bucket_of(slot.start) for slot in training.flat.slots]
        return starts(training), buckets

    results = on_layout(ZERO[zero_stage], work)
    assert results[0] == results[1], "the ranks start their buckets in another order"
    seen, bucket_of_slot = results[0]
    assert [index for index, _ in seen] == list(range(max(bucket_of_slot) + 1))
    assert len(seen) > 3
    for index, left in seen:
        missing = [b for b, count in zip(bucket_of_slot, left, strict=True) if count]
        assert all(bucket > index for bucket in missing)
        # Of what comes later in the buffer, all but the next layer's is still to be computed.
        assert set(range(index + 2, len(seen))) <= set(missing)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_nothing_is_sent_while_gradients_accumulate(zero_stage: int) -> None:
    """Ten micro-batches send what one does."""
    layouts = [replace(ZERO[zero_stage], num_microbatches=count) for count in (1, 10)]
    one, ten = (sent_in(layout, make_shape(), whole_step=True) for layout in layouts)
    assert one == ten
    num_buckets = on_layout(layouts[0], lambda training: len(training.flat.plan.buckets))[0]
    shares = {"shared::reduce_scatter": num_buckets, "shared::all_gather": num_buckets}
    expected = {0: {}, 1: shares}[zero_stage]
    # And the sum of loss, tokens and norm.
    expected["shared::all_reduce"] = 1 + (num_buckets if zero_stage == 0 else 0)
    assert one == expected


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_layer_is_sent_once_a_microbatch_and_gathered_once_a_use(
    zero_stage: int, pp: int
) -> None:
    """Elements over the shard group; a rank sends half of each, as there are two ranks."""
    layout = replace(DP, zero_stage=zero_stage, pp=pp, num_microbatches=3)

    def work(training: Training) -> Any:
        sent: Counter[str] = Counter()
        lane = training.mesh.copies.shard_group.lane
        start = lane._start

        def noting(kind: str, operation: Any) -> Any:
            if kind in ("reduce_scatter", "all_gather"):
                sent[kind] += 2 * sum(len(piece) for piece in operation._own)
            return start(kind, operation)

        lane._start = noting
        training.step(training.batch(0))
        plan = training.flat.plan
        return sent, plan.num_elements, [plan.size(*layer) for layer in plan.layers]

    # Of four blocks, gathered for each pass, one is still there when it is used for the next but
    # one layer: around the head, and around the embedding. Of two, more often.
    blocks_gathered = {1: 2 * 4 * 3 - 3 - 2, 2: 5}[pp]
    for sent, whole, sizes in on_layout(layout, work, make_shape(num_layers=4)):
        assert sent["reduce_scatter"] == 3 * whole
        blocks = 4 // pp
        ends = sum(sizes) - blocks * sizes[1]
        gathered = whole if zero_stage == 2 else 3 * ends + blocks_gathered * sizes[1]
        assert sent["all_gather"] == gathered


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_tied_embedding_holds_no_other_bucket_up(family: str) -> None:
    """Its two ends are summed after dp, share by share; the others start in the backward pass."""

    def work(training: Training) -> Any:
        return [sum(left) for _, left in starts(training)]

    shape = make_shape(family, num_layers=4, tied_embeddings=True)
    for left in on_layout(replace(ZERO[1], pp=2), work, shape):
        assert left == sorted(left, reverse=True)
        assert left[0] > 5, "the first bucket waited for the end of the backward pass"


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_each_bucket_is_summed_once_over_the_copies_of_its_shards(zero_stage: int) -> None:
    def norm(training: Training) -> float:
        return training.step(training.batch(0)).grad_norm

    plain = Layout(dp=4, num_microbatches=2)
    copies = replace(plain, zero_stage=zero_stage, zero_replicas=2)
    expected, *_ = on_layout(plain, norm)
    assert on_layout(copies, norm) == pytest.approx([expected] * 4, rel=1e-4)
