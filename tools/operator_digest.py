"""Writes the digest of measured operators that the step-time estimate reads.

`python -m tools.operator_digest GEMM.csv ATTENTION.csv > FILE`, FILE being
layout_tuner/predictions/estimates/operator_rates.txt. GEMM.csv has the columns device, dtype, m, n,
k and us (microseconds of out[m, n] = in[m, k] w[k, n]). ATTENTION.csv has device, dtype, batch,
seq_length, num_heads, head_dim, attention_window and us (causal, forward). `products` in
`predictions.estimates` describes what the lines of the digest mean.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from layout_tuner.predictions.estimates.products import DTYPES, M_GRID, NK_GRID, STEPS_PER_OCTAVE
from layout_tuner.search_spaces.clusters.device_peaks import DEVICE_PEAKS

SOURCE: Final = """\
# Rates of measured operators: digest of ai-dynamo/aiconfigurator 095f58a5 (Apache-2.0), made by
# tools/operator_digest.py. products.py, beside this file, says what the lines mean.
"""
LEAST_HEADS: Final = 32
"""Heads of all sequences of a batch from which attention counts as filling the device."""
LEFT_OUT: Final = (192,)
"""Head sizes for which the measured kernels are not made: four times slower than 128 and 256."""

Row = Mapping[str, str]


class OperatorsIncompleteError(Exception):
    """A table of operators lacks points of the grid; the message names the first one."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="operator-digest", description=__doc__.splitlines()[0])
    parser.add_argument("gemm", type=Path)
    parser.add_argument("attention", type=Path)
    chosen = parser.parse_args()
    try:
        lines = [*product_lines(read(chosen.gemm)), *attention_lines(read(chosen.attention))]
    except OperatorsIncompleteError as problem:
        sys.exit(str(problem))
    sys.stdout.write(SOURCE + "".join(f"{line}\n" for line in lines))


def read(path: Path) -> list[Row]:
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def product_lines(rows: Sequence[Row]) -> Iterator[str]:
    """One line for each device, type and m: steps below the peak by n, and for each n by k."""
    rates: dict[tuple[str, str], dict[tuple[int, int, int], float]] = defaultdict(dict)
    for row in rows:
        if row["dtype"] in DTYPES and row["dtype"] in DEVICE_PEAKS[row["device"].upper()]:
            m, n, k = int(row["m"]), int(row["n"]), int(row["k"])
            flops_per_s = 2.0 * m * n * k / float(row["us"]) * 1e6
            rates[row["device"], row["dtype"]][m, n, k] = flops_per_s
    for (device, dtype), found in sorted(rates.items()):
        peak = DEVICE_PEAKS[device.upper()][dtype]
        for m in M_GRID:
            shapes = [(m, n, k) for n in NK_GRID for k in NK_GRID]
            if missing := [shape for shape in shapes if shape not in found]:
                message = f"{device} {dtype}: no row with m, n, k = {missing[0]}"
                raise OperatorsIncompleteError(message)
            steps = (_steps(peak, found[shape]) for shape in shapes)
            yield f"product {device} {dtype} {m} {bytes(steps).hex()}"


def _steps(peak: float, flops_per_s: float) -> int:
    return min(max(round(STEPS_PER_OCTAVE * math.log2(peak / flops_per_s)), 0), 255)


def attention_lines(rows: Sequence[Row]) -> Iterator[str]:
    """One line for each device, head size and sequence: the median share of the bf16 peak.

    Under a causal mask half of the two products is done.
    """
    shares: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for row in rows:
        batch, length, heads, size = (
            int(row[name]) for name in ("batch", "seq_length", "num_heads", "head_dim")
        )
        if row["dtype"] != "bf16" or row["attention_window"] or size in LEFT_OUT:
            continue
        if batch * heads >= LEAST_HEADS:
            flops = 2.0 * batch * length**2 * heads * size
            peak = DEVICE_PEAKS[row["device"].upper()]["bf16"]
            shares[row["device"], size, length].append(flops / float(row["us"]) * 1e6 / peak)
    for (device, size, length), found in sorted(shares.items()):
        yield f"attention {device} {size} {length} {statistics.median(found):.3f}"


if __name__ == "__main__":
    main()
