"""Fits the simulator's constants of collectives to a table of measured ones.

Run as `python -m benchmarks.simulator.fit_collectives TABLE`, TABLE being the bus bandwidths of
all-gathers and reduce-scatters on Frontier and Perlmutter from the AxoNN authors' logs. It prints
`workers.simulation.fabrics.MEASURED`.

A ring of n ranks takes n - 1 steps of one share each, so that a step of b bytes at a bus bandwidth
B takes b / B. The table has groups that fill their nodes. Of all group sizes with the same share,
rounded to a power of two, the median counts.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Final

DEVICES_PER_NODE: Final = {"frontier": 8, "perlmutter": 4}
LEAST_SHARE: Final = 1 << 13
"""Smaller shares are rare in the table."""


def main() -> None:
    """Prints the constants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    steps = steps_us(parser.parse_args().table)
    for (machine, place, kind), by_share in sorted(steps.items()):
        print(f"{machine} {kind} {place}:")
        print("    ", ", ".join(f"{share >> 10}: {us:.4g}" for share, us in by_share.items()))


def steps_us(table: Path) -> dict[tuple[str, str, str], dict[int, float]]:
    """Microseconds of a ring's step by machine, place (inside or across nodes), kind and share."""
    found: dict[tuple[str, str, str], dict[int, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    with table.open() as lines:
        for row in csv.DictReader(lines):
            if row["library"] != "nccl":  # RCCL on Frontier
                continue
            ranks, size_bytes = int(row["gpus"]), float(row["message_mb"]) * 1e6
            # The logs state the whole message of a gather, and the share of a scatter.
            is_gather = row["collective"] == "all-gather"
            share = size_bytes / ranks if is_gather else size_bytes
            place = "inside" if ranks <= DEVICES_PER_NODE[row["machine"]] else "across"
            if share >= LEAST_SHARE / 1.5:
                rounded = 1 << round(math.log2(share))
                kind = "gather" if is_gather else "scatter"
                step_us = float(row["time_ms"]) * 1e3 / (ranks - 1) * rounded / share
                found[row["machine"], place, kind][rounded].append(step_us)
    return {
        key: {share: statistics.median(by_share[share]) for share in sorted(by_share)}
        for key, by_share in found.items()
    }


if __name__ == "__main__":
    main()
