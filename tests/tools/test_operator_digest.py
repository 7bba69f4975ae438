"""The digest of measured operators, made from a small table."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from layout_tuner.predictions.estimates import products
from layout_tuner.predictions.estimates.products import M_GRID, NK_GRID
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS

GEMM = ("device", "dtype", "m", "n", "k", "us")
ATTENTION = (
    *("device", "dtype", "batch", "seq_length", "num_heads", "head_dim", "attention_window"),
    "us",
)
PEAK = 312e12


def flops_per_s(m: int, n: int, k: int) -> float:
    return PEAK * 0.8 * m / (m + 700) * n / (n + 300) * k / (k + 500)


def table(path: Path, header: tuple[str, ...], rows: list[tuple[object, ...]]) -> Path:
    with path.open("w", newline="") as lines:
        csv.writer(lines).writerows([header, *rows])
    return path


def digest(folder: Path, *, skipped: int = 0) -> subprocess.CompletedProcess[str]:
    shapes = [(m, n, k) for m in M_GRID for n in NK_GRID for k in NK_GRID]
    gemm = [
        ("a100", "bf16", *shape, 2 * np.prod(np.float64(shape)) / flops_per_s(*shape) * 1e6)
        for shape in shapes[skipped:]
    ]
    gemm.append(("a100", "nvfp4", 1, 1, 1, 1.0))
    whole_s = [2.0 * 2048**2 * 64 * 128 / (share * PEAK) for share in (0.4, 0.5, 0.6)]
    attention = [("a100", "bf16", 2, 2048, 32, 128, "", each * 1e6) for each in whole_s]
    longer_s = 2.0 * 4096**2 * 64 * 128 / (0.6 * PEAK)
    attention.append(("a100", "bf16", 2, 4096, 32, 128, "", longer_s * 1e6))
    # A window, a few heads, and head sizes without kernels of their own are left out.
    attention += [("a100", "bf16", 1, 2048, 32, 128, 128, 1.0)]
    attention += [
        ("a100", "bf16", 1, 2048, 4, 128, "", 1e6),
        ("a100", "bf16", 2, 2048, 32, 192, "", 1),
    ]
    paths = [
        table(folder / "gemm.csv", GEMM, gemm),
        table(folder / "attention.csv", ATTENTION, attention),
    ]
    command = [sys.executable, "-m", "tools.operator_digest", *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_estimate_reads_the_rates_of_the_table_from_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = digest(tmp_path)
    assert made.returncode == 0, made.stderr
    file = tmp_path / "rates.txt"
    file.write_text(made.stdout)
    monkeypatch.setattr(products, "_FILE", file)
    products._rates.cache_clear()
    try:
        cluster = CLUSTER_PRESETS["a100-sxm"]
        rates = products.product_rates(cluster, "bf16")
        assert rates is not None
        for shape in ((512, 512, 512), (4096, 6144, 1536), (32768, 51200, 51200)):
            m, n, k = (np.array(float(each)) for each in shape)
            reached = 2 * m * n * k / rates.seconds(m, n, k)
            assert float(reached) == pytest.approx(flops_per_s(*shape), rel=0.011)
        found = [products.attention_flops_per_s(cluster, 128, each) for each in (2048, 4096)]
        assert found == pytest.approx([0.5 * PEAK, 0.6 * PEAK], rel=1e-3)
    finally:
        products._rates.cache_clear()


def test_a_table_that_lacks_a_shape_is_refused_with_the_shape(tmp_path: Path) -> None:
    made = digest(tmp_path, skipped=1)
    assert made.returncode == 1
    assert made.stderr == "a100 bf16: no row with m, n, k = (512, 512, 512)\n"
    assert made.stdout == ""
