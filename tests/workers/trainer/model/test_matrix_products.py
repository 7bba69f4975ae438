"""Matrix products: the same numbers by either library, and the same library on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from search_spaces.spec.layout import Precision
from tests.workers.trainer.parallel_layers import drawn
from tests.workers.trainer.tolerances import assert_close
from workers.trainer.model import matrix_products
from workers.trainer.model.precision import COMPUTE_DTYPES
from workers.trainer.products import LAYOUTS, Product


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
    ("cpu_info", "by_onednn"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\n", True),
        ("processor\t: 0\nvendor_id\t: GenuineIntel\n", False),
        (None, False),
    ],
    ids=["amd", "intel", "no-name"],
)
def test_the_processors_name_decides_and_no_trial_does(
    cpu_info: str | None, by_onednn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    if cpu_info is not None:
        (tmp_path / "cpuinfo").write_text(cpu_info)
    monkeypatch.setattr(matrix_products, "_CPU_INFO", tmp_path / "cpuinfo")
    assert matrix_products.prefers_onednn() is by_onednn


@pytest.mark.parametrize(
    ("cpu_info", "is_fast"),
    [
        ("vendor_id\t: AuthenticAMD\nflags\t\t: avx2 avx512_bf16\n", True),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: avx2\n", False),
        ("vendor_id\t: GenuineIntel\nflags\t\t: avx512_bf16 amx_bf16\n", True),
        ("vendor_id\t: GenuineIntel\nflags\t\t: avx512_bf16\n", False),
        ("", False),
    ],
)
def test_16_bit_products_are_fast_where_the_processor_has_units_for_them(
    cpu_info: str, is_fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(cpu_info)
    monkeypatch.setattr(matrix_products, "_CPU_INFO", tmp_path / "cpuinfo")
    assert matrix_products.has_fast_16_bit_products() is is_fast
