"""Matrix products: the same numbers by either library, and the same layouts on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from layout_tuner.search_spaces.layouts.layout import Precision
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.model import matrix_products
from layout_tuner.workers.trainer.model.precision import COMPUTE_DTYPES
from layout_tuner.workers.trainer.open_training import TrainingSettings, open_training
from layout_tuner.workers.trainer.product_layouts import (
    LAYOUTS,
    OWN_LAYOUTS,
    Product,
    fastest_layouts,
    products_of,
    to_rows,
)
from layout_tuner.workers.trainer.training import Training
from tests.workers.trainer.cases import ADAMW, LATENT, make_layout, make_shape
from tests.workers.trainer.parallel_layers import drawn
from tests.workers.trainer.ranks import make_context, run_ranks
from tests.workers.trainer.tolerances import assert_close

pytestmark = pytest.mark.ranks

SHAPE = make_shape("llama")


@pytest.fixture(autouse=True)
def _forget_the_processor() -> Iterator[None]:
    """The choice is kept for the life of a process: what a test has made it goes with the test."""
    choices = matrix_products.prefers_onednn, matrix_products.has_fast_16_bit_products
    for choice in choices:
        choice.cache_clear()
    yield
    for choice in choices:
        choice.cache_clear()
    matrix_products.use_layouts({})


@pytest.mark.parametrize("way", ["mkl", "onednn", *LAYOUTS])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_products_are_the_dense_ones_by_either_library_and_in_every_layout(
    precision: Precision, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix_products, "prefers_onednn", lambda: way == "onednn")
    monkeypatch.setattr(matrix_products, "has_fast_16_bit_products", lambda: True)
    x, w, b, dy = (drawn(*s, seed=i) for i, s in enumerate([(6, 8), (10, 8), (10,), (6, 10)]))
    x, w, b, dy = (each.to(COMPUTE_DTYPES[precision]) for each in (x, w, b, dy))
    if way in LAYOUTS:
        sizes = {"output": (6, 10, 8), "input_gradient": (6, 8, 10), "weight_gradient": (10, 8, 6)}
        products = [Product(kind, precision, *size) for kind, size in sizes.items()]
        matrix_products.use_layouts(dict.fromkeys(products, way))
        laid_out = matrix_products._laid_out("output", x, w.t())
        assert [each.is_contiguous() for each in laid_out] == [letter == "N" for letter in way]
    exact = {
        "output": x.double() @ w.double().t(),
        "input": dy.double() @ w.double(),
        "weight": dy.double().t() @ x.double(),
    }
    # A bias may be added to a product that has been rounded.
    for found, expected, length, roundings in (
        (matrix_products.linear(x, w), exact["output"], 8, 1),
        (matrix_products.linear(x, w, b), exact["output"] + b.double(), 9, 2),
        (matrix_products.input_gradient(dy, w), exact["input"], 10, 1),
        (matrix_products.weight_gradient(dy.t(), x), exact["weight"], 6, 1),
    ):
        assert found.dtype == x.dtype
        assert found.is_contiguous()
        assert_close(found, expected, length=length, roundings=roundings)
    if precision == "fp32":
        sum_ = torch.ones(10, 8)
        matrix_products.add_product(sum_, dy.t(), x, beta=1)
        assert_close(sum_, 1.0 + exact["weight"], length=7)


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_products_are_the_dense_ones_where_they_are_computed_in_fp32(
    dtype: torch.dtype, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more features than are converted at once, whole and by experts of 0, 4 and 2 rows."""
    monkeypatch.setattr(matrix_products, "has_fast_16_bit_products", lambda: is_fast)
    shapes = [(6, 8), (1100, 8), (1100,), (6, 1100)]
    x, w, b, dy = (drawn(*s, seed=i).to(dtype) for i, s in enumerate(shapes))
    assert matrix_products.multiplies_in_fp32(x) is not is_fast
    found = {
        "output": matrix_products.linear(x, w, b),
        "input gradient": matrix_products.input_gradient(dy, w),
        "experts": matrix_products.grouped_products(
            x, torch.stack([w, w + 1, w * 2]).mT, torch.tensor([0, 4, 6], dtype=torch.int32)
        ),
    }
    experts = torch.cat(
        [x[:4].double() @ (w + 1).double().t(), x[4:].double() @ (w * 2).double().t()]
    )
    expected = {
        "output": x.double() @ w.double().t() + b.double(),
        "input gradient": dy.double() @ w.double(),
        "experts": experts,
    }
    for name, length, roundings in (
        ("output", 9, 2),
        ("input gradient", 1100, 1),
        ("experts", 8, 1),
    ):
        assert found[name].dtype == dtype
        assert_close(found[name], expected[name], length=length, roundings=roundings)
    sum_ = torch.ones(1100, 8)
    matrix_products.add_product(sum_, dy.t(), x, beta=1)
    assert_close(sum_, 1.0 + dy.double().t() @ x.double(), length=7)


@pytest.mark.parametrize(
    ("cpu_info", "by_onednn", "is_fast"),
    [
        ("vendor_id\t: AuthenticAMD\nflags\t\t: avx2 avx512_bf16\n", True, True),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: avx2\n", True, False),
        ("vendor_id\t: GenuineIntel\nflags\t\t: avx512_bf16 amx_bf16\n", False, True),
        ("vendor_id\t: GenuineIntel\nflags\t\t: avx512_bf16\n", False, False),
        (None, False, False),
    ],
)
def test_the_processors_name_and_units_decide_and_no_trial_does(
    cpu_info: str | None,
    by_onednn: bool,
    is_fast: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if cpu_info is not None:
        (tmp_path / "cpuinfo").write_text(cpu_info)
    monkeypatch.setattr(matrix_products, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert matrix_products.prefers_onednn() is by_onednn
    assert matrix_products.has_fast_16_bit_products() is is_fast


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


def opened(rank: int, store: Any, dp: int, shape: ModelShape = SHAPE, **context: Any) -> Training:
    layout = make_layout(dp=dp, micro_batch_size=2)
    settings = TrainingSettings(model=shape, layout=layout, seed=0, optimizer=ADAMW)
    return open_training(settings, make_context(rank, dp, store, **context))


@pytest.mark.parametrize("shape", [SHAPE, make_shape(**LATENT)], ids=["llama", "latent"])
def test_the_products_of_a_model_are_those_that_its_training_computes(
    shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one rank with whole layers, at a micro-batch of two."""
    asked: set[tuple[Any, ...]] = set()
    lay_out = matrix_products._laid_out

    def watched(kind: Any, left: torch.Tensor, right: torch.Tensor) -> Any:
        asked.add((kind, len(left), right.shape[1], len(right)))
        return lay_out(kind, left, right)

    monkeypatch.setattr(matrix_products, "_laid_out", watched)

    def work(rank: int, store: Any) -> set[tuple[Any, ...]]:
        training = opened(rank, store, dp=1, shape=shape)
        training.step(training.batch(0))
        return asked

    [found] = run_ranks(1, work, own_group=True)
    listed = set(products_of(shape, devices_per_node=2, precision="fp32"))
    assert {(kind, *shape) for kind, _, *shape in listed} >= found
    assert {kind for kind, *_ in found} == set(OWN_LAYOUTS)


def test_every_rank_takes_the_layouts_of_rank_0() -> None:
    """Where nodes were calibrated apart, ranks would sum in different orders."""
    product = Product("output", "fp32", 16, 32, 8)

    def work(rank: int, store: Any) -> Any:
        rows = to_rows({product: "NN" if rank == 0 else "TN"})
        opened(rank, store, dp=2, product_layouts=rows)
        return to_rows(matrix_products._layouts)

    assert run_ranks(2, work, own_group=True) == [to_rows({product: "NN"})] * 2
