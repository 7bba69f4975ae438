"""Each parallel layer against the dense one: values, and every gradient; and what they send."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from layout_tuner.workers.trainer.comm.mesh import build_mesh
from layout_tuner.workers.trainer.model import vocabulary
from layout_tuner.workers.trainer.model.kernels import LayerNorm, RMSNorm
from layout_tuner.workers.trainer.model.vocabulary import vocab_cross_entropy
from tests.workers.trainer.cases import CUT, TP, lone_mesh, make_layout, make_shape, make_training
from tests.workers.trainer.parallel_layers import drawn, gradient, sent_in, weight
from tests.workers.trainer.ranks import run_ranks
from tests.workers.trainer.tolerances import assert_close

pytestmark = pytest.mark.ranks


def test_a_vocabulary_cross_entropy_equals_the_dense_one() -> None:
    logits, targets = drawn(6, 12, seed=0) * 30, torch.tensor([0, 5, 6, 11, 5, 7])

    def work(rank: int) -> tuple[Tensor, Tensor]:
        group = build_mesh(rank, make_layout(**TP), tied_embeddings=False).tp_group
        x = logits[:, rank * 6 : rank * 6 + 6].clone().requires_grad_()
        loss = vocab_cross_entropy(x.clone(), targets, rank * 6, group)
        loss.backward(torch.tensor(0.5))
        return loss.detach(), x.grad

    losses, gradients = zip(*run_ranks(2, work), strict=True)
    dense = logits.clone().requires_grad_()
    expected = F.cross_entropy(dense, targets)
    expected.backward(torch.tensor(0.5))
    for loss in losses:
        assert_close(loss, expected.detach(), length=12)
    assert_close(torch.cat(gradients, 1), dense.grad, length=12)


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
        assert x.grad.dtype == dtype
        return loss.detach(), x.grad

    at_once = both()
    monkeypatch.setitem(vocabulary._CHUNK_ELEMENTS, "cpu", 12 * tokens_at_once + 3)
    # Not bitwise: another number of rows may be another kernel's, or a vector's last elements.
    for value, expected in zip(both(), at_once, strict=True):
        assert_close(value, expected, length=12)
    dense = logits.float().requires_grad_()
    F.cross_entropy(dense, targets).backward(torch.tensor(0.5))
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
        assert_close(gradient(layer.weight).to(dtype), inputs[1].grad, length=8, roundings=2)
    assert inputs[2].grad is None
    assert_close(gradient(layer_norm.bias).to(dtype), dy.double().sum(0), length=8, roundings=2)


@pytest.mark.parametrize(
    ("family", "shares_memory", "all_reduce"),
    [("gpt", True, "shared::all_reduce"), ("llama", False, "c10d::allreduce_")],
)
def test_a_layer_all_reduces_four_times(family: str, shares_memory: bool, all_reduce: str) -> None:
    layout = make_layout(**TP)
    two, four = (
        sent_in(layout, make_shape(family, num_layers=n), shares_memory=shares_memory)
        for n in (2, 4)
    )
    assert set(two) == {all_reduce}
    per_layer = (four.total() - two.total()) / 2 / layout.num_microbatches
    assert per_layer == 4
    ends = two.total() / layout.num_microbatches - 2 * per_layer
    assert ends == 4, "embedding 1, cross-entropy 2, gradient into the last norm 1"


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_layer_gathers_and_scatters_cut_tokens_four_times_a_microbatch(family: str) -> None:
    layout = make_layout(**CUT)
    two, four = (sent_in(layout, make_shape(family, num_layers=n)) for n in (2, 4))
    per_layer = {name: (four[name] - n) / 2 / layout.num_microbatches for name, n in two.items()}
    reductions = per_layer.pop("shared::all_reduce")
    assert reductions == 0
    assert sorted(per_layer.values()) == [4, 4], per_layer
    ends = {name: two[name] / layout.num_microbatches - 2 * 4 for name in per_layer}
    assert sorted(ends.values()) == [2, 2], "the embedding's and the head's, both ways"
    assert two["shared::all_reduce"] == 2 * layout.num_microbatches, "cross-entropy"
    step = sent_in(layout, make_shape(family), whole_step=True)
    assert step - two == {"shared::all_reduce": 2}, "replicated gradients, and the sums reported"


def test_one_rank_alone_has_no_tokens_to_cut() -> None:
    mesh = lone_mesh(make_layout(sequence_parallel=True))
    training, plain = make_training(make_shape(), mesh=mesh), make_training(make_shape())
    assert training.step(training.batch(0)) == plain.step(plain.batch(0))
