"""Tests of the tolerances: roundings of any processor stay within them, likely faults do not.

The reference is trained in fp64 with random roundings, as an imaginary processor would make them;
then with faults instead of roundings.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Container
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from layout_tuner.search_spaces.layouts.layout import Precision
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.model.precision import COMPUTE_DTYPES
from layout_tuner.workers.trainer.parallel.optimizer import FlatOptimizer, OptimizerSettings
from tests.workers.trainer.cases import (
    ADAMW,
    STEPS,
    Run,
    assert_same_training,
    excess,
    in_turn,
    initial_weights,
    largest,
    make_layout,
    make_shape,
    train,
)
from tests.workers.trainer.parallel_layers import drawn
from tests.workers.trainer.reference import ReferenceModel, train_reference
from tests.workers.trainer.test_parity import SGD, TorchOptimizer, global_batches
from tests.workers.trainer.tolerances import (
    FP32,
    GLOBAL_BATCH,
    LARGEST_CURVATURE,
    LARGEST_GRADIENT,
    assert_close,
    unit_roundoff,
)

CLIPPED_SGD = OptimizerSettings(kind="sgd", learning_rate=0.1, clip_grad_norm=0.5)
SHAPES = {
    "gpt": make_shape("gpt"),
    "llama": make_shape("llama"),
    "gpt-of-4-tied": make_shape("gpt", num_layers=4, tied_embeddings=True),
    "llama-of-8": make_shape("llama", num_layers=8),
}
EXACT = {
    *("_unsafe_view", "alias", "as_strided", "cat", "clone", "copy_", "detach", "empty_like"),
    *("expand", "index", "index_select", "embedding", "lift_fresh", "masked_fill", "neg"),
    *("new_zeros", "ones_like", "permute", "reshape", "select", "slice", "split", "squeeze", "t"),
    *("transpose", "triu", "unsqueeze", "view", "zeros", "zeros_like"),
}
"""Operators that compute nothing, so that nothing is rounded."""
IN_FP32 = {"_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward"}
"""The trainer computes the cross-entropy in fp32 in every precision."""


class RandomRoundings(TorchDispatchMode):
    """Rounds what each operator computes in fp64 as one of fewer bits would, at random.

    A result is off by up to u of its type. A product of matrices, or a sum, is also off by the
    random walk of its roundings in fp32, in whatever order they are made.
    """

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self._u = unit_roundoff(dtype)
        self._generator = torch.Generator().manual_seed(seed)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in EXACT or func.is_view:
            return result
        u = unit_roundoff(FP32) if name in IN_FP32 else self._u
        if isinstance(result, tuple):
            return (self._rounded(result[0], u, 1), *result[1:])
        return self._rounded(result, u, self._length(name, args, result))

    @staticmethod
    def _length(name: str, args: Any, result: Any) -> int:
        if name in ("mm", "bmm"):
            return int(args[0].shape[-1])
        if name in ("addmm", "baddbmm"):
            return int(args[1].shape[-1])
        if name in ("sum", "mean", "embedding_dense_backward"):
            return max(args[0].numel() // result.numel(), 1)
        return 1

    def _rounded(self, value: Any, u: float, length: int) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        uniform = torch.rand(value.shape, generator=self._generator, dtype=value.dtype) * 2 - 1
        walk = torch.randn(value.shape, generator=self._generator, dtype=value.dtype)
        size = value.square().mean().sqrt()
        summed = unit_roundoff(FP32) * math.sqrt(length / 6) * size * walk if length > 1 else 0.0
        return (value + summed) * (1 + u * uniform)


class RoundedWeights(ReferenceModel):
    """Its weights pass an operator, and are rounded there."""

    def weight(self, name: str) -> Tensor:
        return super().weight(name) * 1.0


def in_fp64(
    shape: ModelShape, settings: OptimizerSettings, precision: Precision = "fp32", **options: Any
) -> Run:
    """The reference in fp64: exact, next to any other precision."""
    losses, grad_norms, weights = train_reference(
        shape,
        {name: value.double() for name, value in initial_weights(shape).items()},
        global_batches(shape),
        functools.partial(TorchOptimizer, settings),
        clip_grad_norm=settings.clip_grad_norm,
        **options,
    )
    return Run(
        shape=shape,
        settings=settings,
        precision=precision,
        losses=losses,
        grad_norms=grad_norms,
        weights=weights,
    )


exact = functools.cache(in_fp64)


@pytest.mark.sampled(5)
@in_turn(
    ("model", "optimizer"),
    list(itertools.product(SHAPES, ["fp32", "fp16", "bf16"])),
    ["adamw", "clipped-sgd"],
)
def test_the_roundings_of_any_processor_stay_within_half_of_what_is_allowed(
    model: tuple[str, Precision], optimizer: str
) -> None:
    (name, precision), settings = model, ADAMW if optimizer == "adamw" else CLIPPED_SGD
    shape = SHAPES[name]
    roundings = RandomRoundings(COMPUTE_DTYPES[precision], seed=0)
    found = in_fp64(shape, settings, precision, make_model=RoundedWeights, passes=lambda: roundings)
    assert 0 < excess(found, exact(shape, settings)) < 0.5


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", [ADAMW, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradients_and_their_curvature_are_no_larger_than_the_tolerances_take_them_for(
    shape: ModelShape, settings: OptimizerSettings
) -> None:
    """The curvature is a finite difference of the gradient, a ten-thousandth of a unit along it."""
    curvatures: list[float] = []
    batches = global_batches(shape)

    def look(model: ReferenceModel, step: int) -> None:
        weights = list(model.parameters())
        gradients = [weight.grad.clone() for weight in weights]
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))

        def move(distance: float) -> None:
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight.add_(gradient, alpha=distance / norm)

        move(1e-4)
        moved = torch.autograd.grad(model(*batches[step]), weights)
        move(-1e-4)
        squares = sum(float((a - b).square().sum()) for a, b in zip(moved, gradients, strict=True))
        curvatures.append(math.sqrt(squares) / 1e-4)

    run = in_fp64(shape, settings, after_backward=look)
    assert largest(run.grad_norms) < LARGEST_GRADIENT
    assert len(curvatures) == STEPS
    assert largest(curvatures) < LARGEST_CURVATURE


Fault = Callable[[ReferenceModel, int], None]
"""What changes the gradients of a step."""


def of_half_the_batch(model: ReferenceModel, step: int) -> None:
    half = [value[: GLOBAL_BATCH // 2] for value in global_batches(model.shape)[step]]
    model.zero_grad()
    model(*half).backward()


def scaled(factor: float, part: str = "", *, steps: Container[int] = range(STEPS)) -> Fault:
    """Gradients of the weights with this in their names are so many times as large."""

    def scale(model: ReferenceModel, step: int) -> None:
        for name in model.names:
            if part in name and step in steps:
                model.weight(name).grad.mul_(factor)

    return scale


FAULTS: dict[str, tuple[Fault, list[tuple[Precision, OptimizerSettings, float]]]] = {
    "not-summed-over-dp": (
        of_half_the_batch,
        [
            *(("fp32", ADAMW, 1000), ("fp16", ADAMW, 5), ("bf16", ADAMW, 2)),
            *(("fp32", SGD, 1000), ("fp16", SGD, 5), ("bf16", SGD, 5)),
        ],
    ),
    "summed-over-dp-instead-of-averaged": (
        *(scaled(2), [("fp32", ADAMW, 1000), ("fp16", SGD, 100), ("bf16", SGD, 10)]),
    ),
    "of-norms-summed-over-tp-though-each-rank-had-all-of-them": (
        *(scaled(2, "norm"), [("fp32", ADAMW, 30), ("fp32", SGD, 100)]),
    ),
    "none-for-one-bias": (
        scaled(0, "layers.0.feed_forward.down.bias"),
        [("fp32", ADAMW, 100), ("fp32", SGD, 100)],
    ),
    "wrong-in-a-single-step": (
        *(scaled(2, steps=[STEPS // 2]), [("fp32", SGD, 100), ("fp16", SGD, 10)]),
    ),
    "a-little-off": (scaled(0.999), [("fp32", ADAMW, 10), ("fp32", SGD, 10)]),
}
"""What may happen to gradients in a trainer, and how many times it exceeds what is allowed."""


@pytest.mark.parametrize(
    ("fault", "precision", "settings", "times"),
    [
        pytest.param(fault, *case, id=f"{name}-{case[0]}-{case[1].kind}")
        for name, (fault, cases) in FAULTS.items()
        for case in cases
    ],
)
def test_a_fault_exceeds_what_is_allowed_by_far(
    fault: Fault, precision: Precision, settings: OptimizerSettings, times: float
) -> None:
    shape = make_shape("gpt")
    found = in_fp64(shape, settings, precision, after_backward=fault)
    # A fault that ends in NaN would exceed anything.
    assert times < excess(found, exact(shape, settings)) < math.inf


def with_nan(run: Run, where: str) -> Run:
    """The run with a last number that is none."""
    if where != "weights":
        return dataclasses.replace(run, **{where: [*getattr(run, where)[:-1], math.nan]})
    *_, last = run.weights
    values = run.weights[last].clone()
    values.view(-1)[-1] = math.nan
    return dataclasses.replace(run, weights={**run.weights, last: values})


@pytest.mark.parametrize("where", ["weights", "losses", "grad_norms"])
def test_a_training_that_ends_in_nan_is_refused(where: str) -> None:
    expected = exact(make_shape("gpt"), ADAMW)
    found = with_nan(expected, where)
    assert excess(expected, expected) == 0
    for pair in ((found, expected), (expected, found), (found, found)):
        assert excess(*pair) == math.inf
        with pytest.raises(AssertionError):
            assert_same_training(*pair)


@pytest.mark.ranks
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_trainer_that_forgets_what_to_divide_by_is_refused(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm that clips, in fp32, and in fp16 the loss's scale, too: in the trainer itself."""
    shape, layout = make_shape("gpt"), make_layout(precision=precision)
    found = train(shape, layout, CLIPPED_SGD)
    assert excess(found, exact(shape, CLIPPED_SGD)) <= 1
    monkeypatch.setattr(FlatOptimizer, "divisor", lambda *_: None)
    faulty = train.__wrapped__(shape, layout, CLIPPED_SGD)
    assert excess(faulty, exact(shape, CLIPPED_SGD)) >= 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_operation_without_a_term_or_too_large_is_refused(dtype: torch.dtype) -> None:
    x, w = drawn(6, 8, seed=0).to(dtype), drawn(10, 8, seed=1).to(dtype)
    expected = x.double() @ w.double().t()
    assert_close((x.float() @ w.float().t()).to(dtype), expected, length=8)
    dropped = (x[:, 1:].float() @ w[:, 1:].float().t()).to(dtype)
    larger = (1.05 * expected).to(dtype)
    for faulty in (dropped, larger):
        with pytest.raises(AssertionError, match="not close"):
            assert_close(faulty, expected, length=8)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_an_operation_with_a_result_that_is_not_finite_is_refused(number: float) -> None:
    right = drawn(6, 8, seed=0)
    wrong = right.clone()
    wrong[-1, -1] = number
    for found, expected in ((wrong, right), (right, wrong), (wrong, wrong)):
        with pytest.raises(AssertionError):
            assert_close(found, expected)
