"""The mixture of experts against plain loops over experts, in fp64 where nothing is rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.errors import LayoutUnsupportedError
from layout_tuner.workers.trainer.model import matrix_products
from layout_tuner.workers.trainer.training import Training
from tests.workers.trainer.cases import initial_weights, make_layout, make_shape, make_training
from tests.workers.trainer.parallel_layers import drawn, weight
from tests.workers.trainer.reference import ReferenceModel
from tests.workers.trainer.tolerances import operation_error

EXPERTS = {"num_experts": 6, "experts_per_token": 2, "moe_ffn_hidden_size": 64, "num_layers": 1}


def gradients(training: Training) -> dict[str, Tensor]:
    """The gradient of each logical parameter after one pass."""
    found = {}
    for slot in training.flat.slots:
        start, grad = 0, slot.parameter.main_grad
        for part in slot.parameter.parts:
            found[part.name] = grad[start : start + part.shape[0]]
            start += part.shape[0]
    return found


def passes(
    shape: ModelShape, *, balanced: bool, set_up: Callable[[Any], None] = lambda _: None
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the trainer's model, without an update."""
    layout = make_layout(micro_batch_size=8, num_microbatches=1)
    training = make_training(shape, layout, balanced_routing=balanced)
    set_up(training)
    stats = training.step(training.batch(0), learning_rate=0.0)
    return stats.loss, gradients(training)


def exact_passes(shape: ModelShape, *, balanced: bool) -> tuple[float, dict[str, Tensor]]:
    """The same of the reference, in fp64."""
    batch = make_training(shape, make_layout(micro_batch_size=8, num_microbatches=1)).batch(0)
    weights = {name: value.double() for name, value in initial_weights(shape).items()}
    model = ReferenceModel(shape, weights)
    model.balanced = balanced
    size = (-1, shape.seq_length)
    loss = model(batch.ids_MT.reshape(size), batch.targets_MT.reshape(size))
    loss.backward()
    assert min(model.gaps, default=1.0) > 1e-5, (
        "rounding could change a decision; take another seed"
    )
    return loss.item(), {name: model.weight(name).grad for name in model.names}


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"experts_per_token": 1},
        {"experts_per_token": 6},
        {"num_experts": 40},  # some get no token
        {"shared_expert_ffn_hidden_size": 48},
        {"num_layers": 3, "num_dense_layers": 1, "moe_ffn_hidden_size": 24},
        {"head_dim": 16, "qk_norm": True},
        {"num_layers": 2, "attention_window": 5, "full_attention_every": 2},
        {"num_kv_heads": 4, "attention_window": 3, "qk_norm": True, "head_dim": 6},
    ],
    ids=str,
)
def test_losses_and_all_gradients_are_those_of_a_loop_over_experts(
    changes: dict[str, Any], balanced: bool
) -> None:
    shape = make_shape("llama", **EXPERTS | changes)
    loss, found = passes(shape, balanced=balanced)
    exact_loss, exact = exact_passes(shape, balanced=balanced)
    assert loss == pytest.approx(exact_loss, rel=1e-6)
    assert found.keys() == exact.keys()
    for name, gradient in found.items():
        expected = exact[name] if exact[name] is not None else torch.zeros_like(gradient)
        error = (gradient.double() - expected).norm()
        assert error <= 1e-5 * expected.norm() + 1e-9, name


def test_the_load_is_that_of_the_fullest_expert_over_the_mean() -> None:
    shape = make_shape("llama", **EXPERTS)
    training = make_training(shape, make_layout())
    (mixture,) = training.model.mixtures
    mixture.load_sums = torch.zeros(2)
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    taken = F.linear(x, mixture.router.detach()).topk(2).indices.flatten().bincount(minlength=6)
    mixture.route(x)
    assert mixture.load_sums.tolist() == pytest.approx([float(taken.max()) / (64 * 2 / 6), 1.0])


def test_16_bits_route_as_fp32_would_from_the_same_inputs() -> None:
    training = make_training(make_shape("llama", **EXPERTS), make_layout(precision="bf16"))
    (mixture,) = training.model.mixtures
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    routing = mixture.route(x)
    logits = x.float() @ mixture.router.detach().float().T
    assert torch.equal(routing.experts_TK, logits.topk(2).indices)
    assert routing.weights_TK.dtype == torch.float32
    assert torch.equal(routing.weights_TK, logits.topk(2).values.softmax(-1))


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_the_16_bit_product_of_few_rows_is_added_in_fp32(
    is_first: bool, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of many, where 16 bits are slow."""
    monkeypatch.setattr(matrix_products, "has_fast_16_bit_products", lambda: is_fast)
    ends = [5, 5, 69, 134]  # 5, 0, 64 and 65 rows: the last may be rounded to 16 bits
    parameter, rounded = weight(torch.zeros(4 * 12, 20)), [False, False, False, is_fast]
    parameter.main_grad_is_stale = is_first
    left, right = drawn(134, 12, seed=0).bfloat16(), drawn(134, 20, seed=1).bfloat16()
    parameter.add_products(left, right, torch.tensor(ends, dtype=torch.int32))
    sums = parameter.main_grad.view(4, 12, 20)
    for sum_, start, end, is_rounded in zip(sums, [0, *ends], ends, rounded, strict=False):
        exact = left[start:end].double().t() @ right[start:end].double()
        exact += 0.0 if is_first else 0.25
        error = operation_error(torch.bfloat16 if is_rounded else torch.float32, length=65)
        farthest = (sum_ - exact).abs().max().item()
        assert farthest <= error * max(exact.abs().max().item(), 1.0)
        assert not is_rounded or farthest > operation_error(torch.float32, length=65) * 100


def test_a_torch_without_grouped_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(F, "grouped_mm")
    with pytest.raises(LayoutUnsupportedError, match=r"install torch 2\.10 or newer"):
        make_training(make_shape("llama", **EXPERTS), make_layout())
    make_training(make_shape("llama"), make_layout())
