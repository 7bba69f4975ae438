"""Each parallel layer against the dense one: values, and every gradient; and what they send."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.workers.trainer.cases import make_layout, make_shape, on_layout
from tests.workers.trainer.parallel_layers import (
    TP,
    CountingCollectives,
    drawn,
    gradient,
    on_tp_ranks,
    weight,
)
from tests.workers.trainer.tolerances import assert_close
from workers.trainer.model import vocabulary
from workers.trainer.model.kernels import LayerNorm, RMSNorm
from workers.trainer.model.vocabulary import vocab_cross_entropy
from workers.trainer.training import Training

pytestmark = pytest.mark.ranks


def test_a_vocabulary_cross_entropy_equals_the_dense_one() -> None:
    logits, targets = drawn(6, 12, seed=0) * 30, torch.tensor([0, 5, 6, 11, 5, 7])

    def work(rank: int, group: Any) -> list[Tensor]:
        x = logits[:, rank * 6 : rank * 6 + 6].clone().requires_grad_()
        loss = vocab_cross_entropy(x.clone(), targets, rank * 6, group)
        loss.backward(torch.tensor(0.5))
        return [loss, x.grad]  # type: ignore[list-item]

    results = on_tp_ranks(work)
    dense = logits.clone().requires_grad_()
    loss = F.cross_entropy(dense, targets)
    loss.backward(torch.tensor(0.5))
    for result in results:
        assert_close(result[0], loss.detach(), length=12)
    assert_close(torch.cat([r[1] for r in results], 1), dense.grad, length=12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens_at_once", [1, 4, 5])
def test_a_cross_entropy_is_the_same_however_few_tokens_are_worked_on_at_once(
    tokens_at_once: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = (drawn(10, 12, seed=0) * 30).to(dtype)
    targets = torch.arange(10)

    def both() -> tuple[Tensor, Tensor]:
        x = logits.clone().requires_grad_()
        loss = vocab_cross_entropy(x.clone(), targets, 0, None)
        loss.backward(torch.tensor(0.5))
        assert x.grad is not None
        assert x.grad.dtype == dtype
        return loss.detach(), x.grad

    at_once = both()
    monkeypatch.setitem(vocabulary._CHUNK_ELEMENTS, "cpu", 12 * tokens_at_once + 3)
    # Not bitwise: another number of rows may be another kernel's, or a vector's last elements.
    for value, expected in zip(both(), at_once, strict=True):
        assert_close(value, expected, length=12)
    dense = logits.float().requires_grad_()
    F.cross_entropy(dense, targets).backward(torch.tensor(0.5))
    assert dense.grad is not None
    assert_close(at_once[1], dense.grad.to(dtype), length=12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (300, 700), (1, 1 << 17)], ids=str)
def test_gradients_add_up_or_replace_stale_ones(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    parameter = weight(torch.zeros(shape))
    first, second = drawn(*shape, seed=0).to(dtype), drawn(*shape, seed=1).to(dtype)
    parameter.add_gradient(first)
    assert torch.equal(parameter.main_grad, 0.25 + first.float())
    parameter.main_grad_is_stale = True
    parameter.add_gradient(first)
    parameter.add_gradient(second)
    assert torch.equal(parameter.main_grad, first.float() + second.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_equal_torchs_own_in_double_precision(dtype: torch.dtype) -> None:
    x, w, b, dy = (drawn(*s, seed=i) for i, s in enumerate([(6, 8), (8,), (8,), (6, 8)]))
    x, w, b, dy = x.to(dtype), w.to(dtype), b.to(dtype), dy.to(dtype)
    layer_norm, rms_norm = LayerNorm(weight(w), weight(b)), RMSNorm(weight(w))
    doubles = [t.double() for t in (x, w, b)]
    for layer, dense in (
        (layer_norm, lambda x, w, b: F.layer_norm(x, (8,), w, b, 1e-5)),
        (rms_norm, lambda x, w, b: F.rms_norm(x, (8,), w, 1e-5)),
    ):
        x_in, inputs = x.clone().requires_grad_(), [t.clone().requires_grad_() for t in doubles]
        y, expected = layer(x_in), dense(*inputs)
        y.backward(dy)
        expected.backward(dy.double())
        # Sums over 8 features or 6 tokens, in fp32, rounded at the end. Gradients of weights are
        # fp32 here, though torch may have rounded them: then they are rounded twice.
        assert_close(y, expected, length=8)
        assert_close(x_in.grad, inputs[0].grad, length=8)
        assert inputs[1].grad is not None
        assert_close(gradient(layer.weight).to(dtype), inputs[1].grad, length=8, roundings=2)
    assert inputs[2].grad is None
    assert_close(gradient(layer_norm.bias).to(dtype), dy.double().sum(0), length=8, roundings=2)


@pytest.mark.parametrize(
    ("family", "shares_memory", "all_reduce"),
    [("gpt", True, "shared::all_reduce"), ("llama", False, "c10d::allreduce_")],
)
def test_a_layer_all_reduces_four_times(family: str, shares_memory: bool, all_reduce: str) -> None:
    layout = make_layout(tp=TP)

    def work(training: Training) -> Counter[str]:
        with CountingCollectives(training.mesh) as counting:
            training.pipeline.run(training.batch(0))
        return counting.counts

    def count(num_layers: int) -> Counter[str]:
        shape = make_shape(family, num_layers=num_layers)
        counts = on_layout(layout, work, shape, shares_memory=shares_memory)
        assert counts[0] == counts[1]
        return counts[0]

    two, four = count(2), count(4)
    assert set(two) == {all_reduce}
    per_layer = (four.total() - two.total()) / 2 / layout.num_microbatches
    assert per_layer == 4
    ends = two.total() / layout.num_microbatches - 2 * per_layer
    assert ends == 4, "embedding 1, cross-entropy 2, gradient into the last norm 1"
