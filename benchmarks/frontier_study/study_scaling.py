"""Weak and strong scaling of 175B and 1T."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.frontier_study import study_page as page
from benchmarks.frontier_study.study_runs import MODELS, StudyEffort, estimated, simulated
from benchmarks.simulator.simulator_frontier import frontier_layout
from search_spaces.arrays import Floats
from search_spaces.spec.layout import Layout

_DEGREES: Final = {"175B": (4, 16), "1T": (8, 64)}
_REPLICAS: Final = {"175B": (2, 4, 8, 16), "1T": (1, 2, 3, 6)}
"""To 1,024 and 3,072 GCDs."""
_WEAK: Final = {"175B": 640, "1T": 1600}
"""Sequences a replica, published."""
_STRONG: Final = {"175B": (8000, 89.93), "1T": (8016, 87.05)}
"""Published batch, and efficiency in per cent."""


def scaling(effort: StudyEffort, _tables: Path | None) -> page.StudyPart:
    """Efficiencies by number of GCDs."""
    weak = {s: [_layout(s, dp, _WEAK[s]) for dp in dps] for s, dps in _REPLICAS.items()}
    strong = {
        s: [_layout(s, dp, _STRONG[s][0] // dp) for dp in dps] for s, dps in _REPLICAS.items()
    }
    with page.figure("scaling", 2) as (left, right):
        weak_rows = []
        for colour, (size, layouts) in enumerate(weak.items()):
            walked, guessed = _rates(size, layouts, effort)
            devices = [each.num_devices for each in layouts]
            ours = [100 * rate / walked[0] for rate in walked]
            page.draw_simulated(left, devices, ours, f"{size}, simulated", colour)
            guesses = [100 * rate / guessed[0] for rate in guessed]
            page.draw_estimated(left, devices, guesses, f"{size}, estimated", colour)
            page.draw_published(left, devices[-1:], [100], None if colour else "published")
            weak_rows.append(
                (size, f"{devices[0]:,} to {devices[-1]:,}", "100 %", f"{ours[-1]:.2f} %",
                 f"{guesses[-1]:.2f} %")
            )  # fmt: skip
        strong_rows, misses = [], []
        for colour, (size, layouts) in enumerate(strong.items()):
            rows, bases = _strong(size, layouts, effort)
            strong_rows += rows
            gaps = [each - _STRONG[size][1] for each in bases]
            least = min(gaps, key=abs)
            base = layouts[gaps.index(least)].num_devices
            more = ", more than the 5 that were asked of the simulator" if abs(least) > 5 else ""
            misses.append(
                f"{size}: from the base that comes nearest, {base:,} GCDs, the simulated efficiency is "
                f"{least:+.1f} points off the published one{more}."
            )
            places = [base.num_devices for base in layouts[: len(bases)]]
            right.plot(
                places, bases, color=page.COLOURS[colour], marker="o", linestyle=":",
                label=f"{size}, simulated",
            )  # fmt: skip
            level = _STRONG[size][1]
            page.draw_published(
                right, places, [level] * len(places), f"published, {size}: {level} %"
            )
        every = sorted({each.num_devices for some in weak.values() for each in some})
        page.counted(left, every)
        page.counted(right, every[:-2])
        for axes, words in ((left, "GCDs"), (right, "GCDs of the base (assumed)")):
            axes.set(xlabel=words, ylabel="efficiency, %", ylim=(60, 105))
            axes.tick_params(axis="x", labelsize=7)
            axes.legend(fontsize=7)
    sentence = (
        "Efficiency of more GCDs: on the left weak scaling at a fixed batch a replica, on the right "
        "strong scaling to 1,024 (175B) and 3,072 (1T) GCDs from each assumed base."
    )
    return page.StudyPart(
        title="Scaling",
        blocks=(
            "Weak scaling: speed of a GCD over that of the smallest run, at the published layout "
            f"and {_WEAK['175B']} (175B) and {_WEAK['1T']:,} (1T) sequences a replica.",
            page.rows_table(("model", "GCDs", "published", "simulated", "estimated"), weak_rows),
            "Strong scaling: the speed of a GCD at the largest number over that at the base, at the "
            "same batch. The base is not published, and the efficiency depends on it: every base of "
            "whole replicas from an eighth (175B) or a sixth (1T) to a half is shown.",
            page.rows_table(
                ("model, batch", "GCDs", "base", "published", "simulated", "estimated"), strong_rows
            ),
            *misses,
            page.shown("scaling", sentence),
        ),
    )


def _layout(size: str, dp: int, num_microbatches: int) -> Layout:
    return frontier_layout(*_DEGREES[size], dp, num_microbatches)


def _rates(size: str, layouts: Sequence[Layout], effort: StudyEffort) -> tuple[Floats, Floats]:
    """Speeds of a GCD, simulated and estimated."""
    return simulated(MODELS[size], layouts, effort), estimated(MODELS[size], layouts)


def _strong(
    size: str, layouts: Sequence[Layout], effort: StudyEffort
) -> tuple[list[tuple[str, ...]], list[float]]:
    """Rows by base, and simulated efficiencies in per cent."""
    walked, guessed = _rates(size, layouts, effort)
    batch, level = _STRONG[size]
    rows: list[tuple[str, ...]] = []
    found: list[float] = []
    for at, base in enumerate(layouts[:-1]):
        found.append(100 * walked[-1] / walked[at])
        rows.append(
            (
                f"{size}, {batch:,}",
                f"{base.num_devices:,} to {layouts[-1].num_devices:,}",
                f"1/{layouts[-1].num_devices // base.num_devices}",
                f"{level} %",
                f"{found[-1]:.2f} %",
                f"{100 * guessed[-1] / guessed[at]:.2f} %",
            )
        )
    return rows, found
