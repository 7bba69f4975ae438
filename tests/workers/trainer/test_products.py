"""Layouts of matrix products in memory: which is chosen, where, and what they compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.workers.trainer.cases import make_layout, make_shape
from tests.workers.trainer.parallel_layers import drawn
from tests.workers.trainer.ranks import make_context, run_ranks
from tests.workers.trainer.tolerances import assert_close
from workers.trainer.model import matrix_products
from workers.trainer.open_training import TrainingSettings, open_training
from workers.trainer.parallel.optimizer import OptimizerSettings
from workers.trainer.products import (
    LAYOUTS,
    OWN_LAYOUTS,
    Product,
    fastest_layouts,
    products_of,
    to_rows,
)

pytestmark = pytest.mark.ranks

SHAPE = make_shape("llama")


@pytest.fixture(autouse=True)
def _forget_the_layouts() -> Iterator[None]:
    yield
    matrix_products.use_layouts({})


def timings(product: Product, **seconds: float) -> list[dict[str, Any]]:
    what = {"operation": "product", **product._asdict()}
    return [{**what, "layout": name, "seconds": value} for name, value in seconds.items()]


def test_another_layout_is_taken_where_it_saves_more_than_the_noise_of_timings() -> None:
    slow, fast, near = (Product("output", "bf16", rows, 64, 32) for rows in (8, 16, 32))
    listed = [
        {"operation": "stream", "seconds": 1.0},
        *timings(slow, NN=0.5, NT=4.0, TN=2.0),
        *timings(fast, NN=4.0, NT=1.0, TN=2.0),
        *timings(near, NN=0.96, NT=1.0, TN=2.0),
    ]
    assert fastest_layouts(listed) == {slow: "NN"}


def test_the_products_of_a_model_are_those_that_its_training_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one rank with whole layers, at a micro-batch of two."""
    asked: set[tuple[Any, ...]] = set()
    lay_out = matrix_products._laid_out

    def watched(kind: Any, left: torch.Tensor, right: torch.Tensor) -> Any:
        asked.add((kind, len(left), right.shape[1], len(right)))
        return lay_out(kind, left, right)

    monkeypatch.setattr(matrix_products, "_laid_out", watched)
    layout = make_layout(micro_batch_size=2)

    def work(rank: int, store: Any) -> set[tuple[Any, ...]]:
        settings = TrainingSettings(
            model=SHAPE, layout=layout, seed=0, optimizer=OptimizerSettings()
        )
        training = open_training(settings, make_context(rank, 1, store))
        training.step(training.batch(0))
        return asked

    [found] = run_ranks(1, work, own_group=True)
    listed = set(products_of(SHAPE, devices_per_node=2, precision="fp32"))
    assert {(kind, *shape) for kind, _, *shape in listed} >= found
    assert {kind for kind, *_ in found} == set(OWN_LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_are_the_same_in_every_layout(
    layout: str, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix_products, "has_fast_16_bit_products", lambda: True)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    x, w, b, dy = (drawn(*s, seed=i) for i, s in enumerate([(6, 8), (10, 8), (10,), (6, 10)]))
    x, w, b, dy = (each.to(dtype) for each in (x, w, b, dy))
    products = {
        Product("output", precision, 6, 10, 8),
        Product("input_gradient", precision, 6, 8, 10),
        Product("weight_gradient", precision, 10, 8, 6),
    }
    matrix_products.use_layouts(dict.fromkeys(products, layout))
    laid_out = matrix_products._laid_out("output", x, w.t())
    assert [each.is_contiguous() for each in laid_out] == [letter == "N" for letter in layout]
    output = x.double() @ w.double().t() + b.double()
    assert_close(matrix_products.linear(x, w, b), output, length=9, roundings=2)
    assert_close(matrix_products.input_gradient(dy, w), dy.double() @ w.double(), length=10)
    gradient = dy.double().t() @ x.double()
    assert_close(matrix_products.weight_gradient(dy.t(), x), gradient, length=6)
    if precision == "fp32":
        sum_ = torch.ones(10, 8)
        matrix_products.add_product(sum_, dy.t(), x, beta=1)
        assert_close(sum_, 1.0 + gradient, length=7)


def test_every_rank_takes_the_layouts_of_rank_0() -> None:
    """Where nodes were calibrated apart, ranks would sum in different orders."""
    product = Product("output", "fp32", 16, 32, 8)
    layout = make_layout(dp=2, micro_batch_size=2)

    def work(rank: int, store: Any) -> Any:
        rows = to_rows({product: "NN" if rank == 0 else "TN"})
        context = make_context(rank, 2, store, product_layouts=rows)
        settings = TrainingSettings(
            model=SHAPE, layout=layout, seed=0, optimizer=OptimizerSettings()
        )
        open_training(settings, context)
        return to_rows(matrix_products._layouts)

    assert run_ranks(2, work, own_group=True) == [to_rows({product: "NN"})] * 2
