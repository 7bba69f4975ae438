"""Speed of matrix products and of fused attention, interpolated between measured operators.

`operator_rates.txt`, made by `tools/operator_digest.py`, is a digest of the operators that
ai-dynamo/aiconfigurator measured (095f58a5, Apache-2.0): the fastest of the newest kernels of three
inference engines, forward alone. Of products out[m, n] = in[m, k] w[k, n] it has the whole grid in
bf16, in fp8 (each tensor scaled by one number), in fp8_block on Hopper and nvfp4 on Blackwell. Its
lines are

    product DEVICE TYPE M HEX            steps below the peak, a byte each, for all n, and of each k
    attention DEVICE SIZE LENGTH SHARE   share of the bf16 peak that causal attention reaches

What training adds is not in it. Its products multiply transposed matrices and accumulate weight
gradients in fp32: SimuMax's operators of an A100 (MooreThreads/SimuMax 3005b17c,
configs/system/a100_pcie.json) have 1.10 times the seconds of these forward and for input gradients,
and 1.15 times for weight gradients, which is what the prior of the factor `matrices` says (1.12).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from layout_tuner.array_types import Floats
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.device_peaks import DEVICE_PEAKS, known_device

DTYPES: Final = ("bf16", "fp8", "fp8_block", "nvfp4")
M_GRID: Final = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_TO_8K: Final = (512, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
NK_GRID: Final = (*_TO_8K, 10240, 12288, 16384, 51200)
STEPS_PER_OCTAVE: Final = 32
"""Steps of a byte in `operator_rates.txt` that halve the speed."""

_FILE: Final = Path(__file__).with_name("operator_rates.txt")
_FAMILIES: Final = ("GB200", "GB300", "B200", "B300", "GH200", "H200", "H100", "H800", "A100")
_MEASURED: Final[Mapping[str, str]] = {"GH200": "H200", "H800": "H100"}
"""Measured devices of the same die, for those that were not measured."""

_MEASURED_AS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("bf16", "fp16"), ("bf16",)),
    **dict.fromkeys(("fp8", "mxfp8"), ("fp8", "bf16")),
    "fp8_block": ("fp8_block", "bf16"),
    "nvfp4": ("nvfp4", "bf16"),
}
"""The measured types of a precision's products, which are as fast as in the fastest of them. Of
mxfp8 none is: for the products of a layer of 4,096 features on a B300, without casts, Transformer
Engine d0067d0d (docs/examples/gemm_profiling) has 7.16 ms, and the digest 7.13 ms in fp8; in nvfp4
they have 3.76 and 4.27 ms."""

_BLACKWELLS: Final = ("B200", "B300", "GB200", "GB300")
_GROUPED: Final[Mapping[tuple[str, str], tuple[float, float]]] = {
    ("A100", "bf16"): (1.0, 100.0),
    **dict.fromkeys((("H100", "bf16"), ("H200", "bf16")), (0.9, 250.0)),
    **dict.fromkeys((("H100", "fp8"), ("H200", "fp8")), (0.9, 200.0)),
    **dict.fromkeys((("H100", "fp8_block"), ("H200", "fp8_block")), (1.7, 75.0)),
    **dict.fromkeys(((name, "bf16") for name in _BLACKWELLS), (1.9, 100.0)),
    **{(name, dtype): (1.1, 100.0) for name in _BLACKWELLS for dtype in ("fp8", "mxfp8", "nvfp4")},
}
"""Experts' products over one product of all rows, as a (1 + b / rows of an expert): a and b by
device and type. Least mean absolute logarithm over aiconfigurator's experts with balanced routing
and 1 to 8 groups of them; A100: SimuMax's grouped products. The kernels measured in fp8 on
Blackwell are Triton's, which are slower than the library's products there; it has the numbers that
were found for TensorRT-LLM's grouped products in nvfp4."""

_FLASH_2_ON_HOPPER: Final = 0.56
"""Speed of FlashAttention-2 over that of the fastest kernels on Hopper: 35 % of the peak
(arXiv:2407.08608), where 62 % is measured with heads of 128 and 16,384 tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class ProductRates:
    """FLOP/s of products in one type on one cluster, over the grid of their shapes."""

    log2_flops_per_s: Floats
    """Shape [m, n, k]."""
    grouped: tuple[float, float]
    """See `_GROUPED`."""

    def seconds(self, m: Floats, n: Floats, k: Floats) -> Floats:
        """Seconds of out[m, n] = in[m, k] w[k, n]: linear between the logarithms of the grid.

        Below the grid a product takes as long as on its edge, and above it has the edge's speed.
        """
        m, n, k = np.maximum(m, M_GRID[0]), np.maximum(n, NK_GRID[0]), np.maximum(k, NK_GRID[0])
        (row, a), (column, b), (inner, c) = (
            _cell(at, grid) for at, grid in ((m, M_GRID), (n, NK_GRID), (k, NK_GRID))
        )
        table = self.log2_flops_per_s
        log2 = np.zeros(np.broadcast_shapes(m.shape, n.shape, k.shape))
        for up, right, deep in np.ndindex(2, 2, 2):
            weight = (a if up else 1.0 - a) * (b if right else 1.0 - b) * (c if deep else 1.0 - c)
            log2 += weight * table[row + up, column + right, inner + deep]
        return np.asarray(2.0 * m * n * k / np.exp2(log2), dtype=np.float64)

    def grouped_slowdown(self, rows: Floats) -> Floats:
        """Seconds of experts' products with so many rows each, over one product of all rows."""
        slowest, half = self.grouped
        return np.asarray(slowest * (1.0 + half / rows), dtype=np.float64)


def _cell(at: Floats, grid: tuple[int, ...]) -> tuple[Floats, Floats]:
    """The place of values in a grid: the point below, and the share of the way to the next."""
    place = np.interp(np.log(at), np.log(grid), np.arange(len(grid)))
    low = np.minimum(place.astype(np.int64), len(grid) - 2)
    return low, place - low


def product_rates(cluster: Cluster, precision: str) -> ProductRates | None:
    """The rates of products on a cluster; None where its device or the precision has no rates.

    They are in proportion to the cluster's peak. Constants that were measured on the cluster itself
    are the product's rate already. A product in a narrow type is not slower than in bf16.
    """
    measured, family = _MEASURED_AS.get(precision, ()), _family(cluster)
    if family is None or precision not in DEVICE_PEAKS[family]:
        return None
    if not measured or (family, measured[0]) not in _rates().products:
        return None
    tables = [_rates().products[family, dtype] for dtype in measured]
    scale = _peak_share(cluster, family, precision)
    log2 = np.max(tables, axis=0) + np.log2(scale)
    grouped = "bf16" if precision == "fp16" else precision
    return ProductRates(log2, _GROUPED[family, grouped])


def attention_flops_per_s(cluster: Cluster, head_size: int, seq_length: int) -> float | None:
    """FLOP/s of the two products of causal attention's forward pass; None where not measured.

    Half of the products is counted. The head size is the nearest measured one. The rate of longer
    sequences is that of the longest measured one; below the shortest it falls on as between the
    first two.
    """
    family = _family(cluster)
    if family is None:
        return None
    shares = _rates().attention[family]
    nearest = min(shares, key=lambda size: abs(np.log(size / head_size)))
    lengths, reached = (np.log(each) for each in zip(*sorted(shares[nearest].items()), strict=True))
    length = float(np.log(seq_length))
    log_share = float(np.interp(length, lengths, reached))
    slope = float((reached[1] - reached[0]) / (lengths[1] - lengths[0]))
    log_share += slope * min(length - float(lengths[0]), 0.0)
    peak = DEVICE_PEAKS[family]["bf16"] * _peak_share(cluster, family, "bf16")
    return float(np.exp(log_share)) * peak


def flash_2_share(cluster: Cluster) -> float:
    """Speed of FlashAttention-2 over that of the fastest kernels for the device."""
    return _FLASH_2_ON_HOPPER if _family(cluster) in ("H100", "H200") else 1.0


def _family(cluster: Cluster) -> str | None:
    """The measured device that a cluster's devices are like, or None."""
    if cluster.is_measured:
        return None
    name = next((name for name in _FAMILIES if name in cluster.device), None)
    return None if name is None else _MEASURED.get(name, name)


def _peak_share(cluster: Cluster, family: str, precision: str) -> float:
    """The cluster's peak over that of the measured device."""
    measured = DEVICE_PEAKS[family][precision]
    sheet = DEVICE_PEAKS.get(known_device(cluster.device) or family, {}).get(precision, measured)
    return cluster.peak_flops_per_s.get(precision, sheet) / measured


@dataclass(frozen=True, slots=True, eq=False)
class _OperatorRates:
    products: Mapping[tuple[str, str], Floats]
    """log2 of FLOP/s by device and type; shape [m, n, k]."""
    attention: Mapping[str, Mapping[int, Mapping[int, float]]]
    """Shares of the bf16 peak by device, head size and sequence length."""


@cache
def _rates() -> _OperatorRates:
    products: dict[tuple[str, str], list[Floats]] = {}
    attention: dict[str, dict[int, dict[int, float]]] = {}
    for line in _FILE.read_text().splitlines():
        match line.split():
            case ["product", device, dtype, _, steps]:
                below = np.frombuffer(bytes.fromhex(steps), dtype=np.uint8) / STEPS_PER_OCTAVE
                plane = np.log2(DEVICE_PEAKS[device.upper()][dtype]) - below
                plane = plane.reshape(len(NK_GRID), len(NK_GRID))
                products.setdefault((device.upper(), dtype), []).append(plane)
            case ["attention", device, size, length, share]:
                sizes = attention.setdefault(device.upper(), {})
                sizes.setdefault(int(size), {})[int(length)] = float(share)
    stacked = {key: np.stack(planes) for key, planes in products.items()}
    return _OperatorRates(stacked, attention)
