"""The trainer's table: what is asked, what was measured, and whether that is enough."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.results_file import table
from benchmarks.side_by_side import Ratio
from benchmarks.trainer.trainer_cells import CellResult
from layout_tuner.search_spaces.layouts.layout import Precision

NATIVE_SHARE: Final = 0.95
"""Of the bare model's speed on one rank: what torch-native must reach to be worth comparing."""
PEAK_SHARES: Final[dict[Precision, float]] = {"fp32": 0.78, "bf16": 0.35}
"""Of the core's matmul peak, on one rank; bf16's is meant of a core with AMX."""


HEADER: Final = (
    *("tp,pp,dp", "precision", "against", "asked", "medians", "pairs (quartiles)", "reached"),
    *("ours", "peer", "CPU s ours", "CPU s peer", "losses within"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number that is asked for."""

    name: str
    asked: str
    measured: str
    reached: bool | None
    """None: nothing is asked."""

    def cells(self) -> tuple[str, ...]:
        return self.name, self.asked, self.measured, verdict(self.reached)


def verdict(reached: bool | None) -> str:
    """A word for the table."""
    return "" if reached is None else "yes" if reached else "**no**"


def cells_table(results: Sequence[CellResult]) -> str:
    """What is printed: a row a cell and peer."""
    return table(HEADER, [row for result in results for row in _rows(result)])


def recorded_cells(results: Sequence[CellResult]) -> str:
    """What is recorded: rows of which something is asked, and the pairs of the others."""
    rows = [row for result in results for row in _rows(result)]
    asked = table(HEADER, [row for row in rows if row[3]])
    others = [
        f"{cell} {kind} {peer} {pairs}" for cell, kind, peer, ask, _, pairs, *_ in rows if not ask
    ]
    return f"{asked}\n\nNothing is asked of (pairs): {'; '.join(others)}."


def _rows(result: CellResult) -> list[tuple[str, ...]]:
    rows, ours = [], result.series["ours"]
    for peer, asked in result.cell.asked.items():
        found, series = result.ratio(peer), result.series[peer]
        nothing = math.isnan(asked)
        rows.append(
            (
                result.cell.name,
                result.cell.layout.precision,
                peer + (" (CPU s)" if result.cell.by_cpu_time else ""),
                "" if nothing else f"{asked:.2f}",
                f"{found.of_medians:.3f}",
                spread(found),
                verdict(None if nothing else found.of_pairs >= asked),
                f"{ours.step_time_s * 1e3:.0f} ms",
                f"{series.step_time_s * 1e3:.0f} ms",
                f"{ours.cpu_time_s:.2f}",
                # Its own process's time is not among what the ranks counted.
                "" if peer.endswith("own process") else f"{series.cpu_time_s:.2f}",
                f"{result.loss_differences[peer]:.0e}",
            )
        )
    return rows


def spread(found: Ratio) -> str:
    """The median of the pairs between their quartiles."""
    return f"{found.of_pairs:.3f} ({found.q25:.3f} to {found.q75:.3f})"


def single_rank_figures(result: CellResult) -> list[Figure]:
    """Figures of cell 1,1,1 beside its ratios: the share of the peak, and whether peers compare."""
    precision, figures = result.cell.layout.precision, []
    if result.peak_tflops is not None:
        share, asked = result.tflops_per_rank / result.peak_tflops, PEAK_SHARES[precision]
        figures.append(
            Figure(
                name=f"{precision} on one rank, of the best square matmul of the run",
                asked=f"{asked:.0%}" + (" of an AMX peak" if precision == "bf16" else ""),
                measured=f"{share:.1%}: {result.tflops_per_rank * 1e3:.1f} of "
                f"{result.peak_tflops * 1e3:.1f} GFLOP/s",
                reached=share >= asked,
            )
        )
    for peer in ("torch-native", "torch-native, autocast"):
        if peer in result.series:
            speed = 1.0 / result.ratio(peer, to="bare").of_pairs
            figures.append(
                Figure(
                    name=f"{peer} on one rank, {precision}: its speed over the bare model's",
                    asked=f"{NATIVE_SHARE}, or its rows are void",
                    measured=f"{speed:.3f}",
                    reached=speed >= NATIVE_SHARE,
                )
            )
    return figures


def memory_figure(bytes_of: Mapping[Precision, tuple[Sequence[int], Sequence[int]]]) -> Figure:
    """Optimizer bytes of the fullest rank under ZeRO stages 0 and 1."""
    shares = {name: max(sharded) / max(whole) for name, (whole, sharded) in bytes_of.items()}
    (dp,) = {len(whole) for whole, _ in bytes_of.values()}
    return Figure(
        name=f"ZeRO-1 optimizer bytes a rank over ZeRO-0's, dp={dp}",
        asked=f"1/{dp} within 2 %",
        measured=", ".join(f"{share:.4f} in {name}" for name, share in shares.items()),
        reached=all(abs(share * dp - 1.0) <= 0.02 for share in shares.values()),
    )


def render(results: Sequence[CellResult], figures: Sequence[Figure], note: str) -> str:
    """The section of the results file."""
    numbers = table(("figure", "asked", "measured", "reached"), [f.cells() for f in figures])
    return "\n\n".join((note, recorded_cells(results), numbers))
