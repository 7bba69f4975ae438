"""How well and how fast the packer packs: a simulated allocation of 1,024 nodes of 8 devices.

Run as `make bench-packing`, or `python -m benchmarks.bench_packing --record`. It takes 15 s on one
core. `--record` writes the section "Packing" of RESULTS.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from random import Random
from statistics import fmean, median
from typing import Final

from benchmarks.arguments import count
from benchmarks.results_file import describe_machine, record, table
from benchmarks.workers.packing_simulation import (
    DEVICES_PER_NODE,
    NUM_NODES,
    Draw,
    PackedProbe,
    one_batch,
    probes,
    steady_state,
)

AT_ONCE: Final = 300
"""Probes that wait or run at any time."""
SMALL: Final = 16
"""Devices of the largest probe that counts as small."""
LARGE: Final = 256
"""Devices of the smallest that counts as large."""
SIZES: Final = {"any": False, "powers of two": True}
DEADLINES: Final[dict[str, Callable[[float], float]]] = {
    "exact": lambda duration_s: duration_s,
    "three times": lambda duration_s: 3.0 * duration_s,
    "600 s for all": lambda _: 600.0,
}
"""The duration of a probe that the packer is given."""


def steady_row(sizes: str, deadlines: str, *, ended: int, seed: int) -> tuple[str, ...]:
    """The steady state's row of one case."""
    steady = steady_state(_draw(sizes, deadlines, seed), at_once=AT_ONCE, ended=ended)
    small = _waits(steady.waits, lambda probe: probe.devices <= SMALL)
    large = _waits(steady.waits, lambda probe: probe.devices >= LARGE)
    return (
        sizes,
        deadlines,
        f"{steady.use:.1%}",
        f"{steady.held:.1%}",
        f"{steady.decisions_per_s:,.0f}",
        f"{fmean(small):.0f} s, {max(small):.0f} s",
        f"{fmean(large):.0f} s, {max(large):.0f} s",
    )


def batch_row(sizes: str, deadlines: str, *, batches: int) -> tuple[str, ...]:
    """What the batches add to the row of one case."""
    ran = [one_batch(_draw(sizes, deadlines, seed), at_once=AT_ONCE) for seed in range(batches)]
    ratios = [batch.makespan_s / batch.least_s for batch in ran]
    return (
        f"{median(batch.makespan_s for batch in ran):.0f} s",
        f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{fmean(batch.use_while_any_waits for batch in ran):.1%}",
    )


def section(*, ended: int, batches: int) -> str:
    """The section of the results."""
    cases = list(product(SIZES, DEADLINES))
    rows = [
        (*steady_row(*case, ended=ended, seed=1), *batch_row(*case, batches=batches))
        for case in cases
    ]
    header = (
        *("sizes", "deadlines", "used", "held", "decisions a second"),
        *("small waited (mean, most)", "large waited (mean, most)"),
        *("batch: makespan", "over the least", "used while any waits"),
    )
    return f"""`make bench-packing`; {describe_machine("numpy")}. A pretended allocation of {NUM_NODES:,} nodes of {DEVICES_PER_NODE} devices; sizes log-uniform from 2 to 512 devices, durations uniform from 10 to 300 s. *Deadlines*: the duration that the packer is given. Steady state: {AT_ONCE} probes wait or run at any time, counted over {ended:,} ends after the first {AT_ONCE}. *Used*: device-seconds that the probes asked for, of all; *held*: with the devices of whole nodes that a probe leaves over. *Decisions*: probes started by second of the packer's own time, on one core of a machine with other work. *Small*: at most {SMALL} devices; *large*: at least {LARGE}. One batch of {AT_ONCE} probes at once, {batches} draws: the median makespan, over what no schedule can beat (all work on all devices, or the longest probe), and how much of the device time is used until the last probe starts.

{table(header, rows)}
"""


def main() -> None:
    """Prints the section, and records it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ended", type=count, default=3000, help="probes of a steady state")
    parser.add_argument("--batches", type=count, default=5, help="of each case")
    parser.add_argument("--record", action="store_true", help="write RESULTS.md")
    asked = parser.parse_args()
    text = section(ended=asked.ended, batches=asked.batches)
    print(text)
    if asked.record:
        record("Packing", text)


def _draw(sizes: str, deadlines: str, seed: int) -> Draw:
    return probes(Random(seed), powers_of_two=SIZES[sizes], at_most_s=DEADLINES[deadlines])


def _waits(
    waits: list[tuple[PackedProbe, float]], counts: Callable[[PackedProbe], bool]
) -> list[float]:
    return [wait_s for probe, wait_s in waits if counts(probe)] or [0.0]


if __name__ == "__main__":
    main()
