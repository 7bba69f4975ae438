"""Layouts of matrix products in memory: which is chosen, where, and what they compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.workers.trainer.cases import make_layout, make_shape
from tests.workers.trainer.ranks import make_context, run_ranks
from workers.trainer.model import matrix_products
from workers.trainer.open_training import TrainingSettings, open_training
from workers.trainer.parallel.optimizer import OptimizerSettings
from workers.trainer.products import OWN_LAYOUTS, Product, fastest_layouts, products_of, to_rows

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
