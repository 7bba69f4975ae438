"""Weak and strong scaling of 175B and 1T."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from benchmarks.frontier_study import study_page as page
from benchmarks.frontier_study.study_runs import MODELS, StudyEffort, estimated, simulated
from benchmarks.simulator.simulator_frontier import CONSUMED, frontier_layout
from layout_tuner.search_spaces.layouts.layout import Layout

_DEGREES: Final = {"175B": (4, 16), "1T": (8, 64)}
_REPLICAS: Final = {"175B": (2, 4, 8, 16), "1T": (1, 2, 3, 6)}
"""To 1,024 and 3,072 GCDs."""
_WEAK: Final = {"175B": 640, "1T": 1600}
"""Sequences a replica, published."""
_STRONG: Final = {"175B": (8000, 89.93), "1T": (8016, 87.05)}
"""Published batch, and efficiency in per cent."""
_CONSUMED: Final = (
    "the log of theirs whose peaks are in the part Memory claims 150 TFLOP/s of a GCD, four times "
    "what its step times allow, since the engine consumed a quarter of the samples that the flags "
    "stated"
)


def scaling(effort: StudyEffort, _tables: Path | None) -> page.StudyPart:
    """Efficiencies by number of GCDs."""
    with page.figure("scaling", 2) as (left, right):
        weak = [_weak(left, colour, size, effort) for colour, size in enumerate(_REPLICAS)]
        strong = [_strong(right, colour, size, effort) for colour, size in enumerate(_REPLICAS)]
        for axes, words in ((left, "GCDs"), (right, "GCDs of the base (assumed)")):
            axes.set(xlabel=words, ylabel="efficiency, %", ylim=(50, 105))
            page.counted(
                axes, [128, 256, 512, 1024, 3072] if axes is left else [128, 256, 512, 1024]
            )
            axes.legend(fontsize=7)
    sentence = (
        "Efficiency of more GCDs: on the left weak scaling at a fixed batch a replica, on the right "
        "strong scaling to 1,024 (175B) and 3,072 (1T) GCDs from each assumed base, with the stated "
        "batch and with a quarter of it."
    )
    header = ("model, batch", "GCDs", "base", "published", "simulated", "estimated")
    return page.StudyPart(
        title="Scaling",
        blocks=(
            "Weak scaling: speed of a GCD over that of the smallest run, at the published layout "
            f"and {_WEAK['175B']} (175B) and {_WEAK['1T']:,} (1T) sequences a replica.",
            page.rows_table(("model", "GCDs", "published", "simulated", "estimated"), weak),
            "Strong scaling: the speed of a GCD at the largest number over that at the base, at the "
            "same batch. The base is not published, and the efficiency depends on it: every base of "
            "whole replicas from an eighth (175B) or a sixth (1T) to a half is shown. Nor is it "
            f"sure which batch ran: {_CONSUMED}. So both batches are shown, the stated one and "
            "a quarter of it. With the stated batch the simulated loss is the bubble of 1F1B, a few "
            "per cent; with a quarter the bubble is four times as long.",
            page.rows_table(header, [row for rows, _ in strong for row in rows]),
            *(miss for _, miss in strong),
            page.shown("scaling", sentence),
        ),
    )


def _layouts(size: str, num_sequences: int) -> list[Layout]:
    """By number of replicas, with so many sequences in all; 0: as many a replica as published."""
    return [
        frontier_layout(*_DEGREES[size], dp, num_sequences // dp if num_sequences else _WEAK[size])
        for dp in _REPLICAS[size]
    ]


def _weak(axes: Any, colour: int, size: str, effort: StudyEffort) -> tuple[str, ...]:
    layouts = _layouts(size, 0)
    devices = [each.num_devices for each in layouts]
    walked, guessed = simulated(MODELS[size], layouts, effort), estimated(MODELS[size], layouts)
    ours, guesses = 100 * walked / walked[0], 100 * guessed / guessed[0]
    page.draw_simulated(axes, devices, ours, f"{size}, simulated", colour)
    page.draw_estimated(axes, devices, guesses, f"{size}, estimated", colour)
    page.draw_published(axes, devices[-1:], [100], None if colour else "published")
    ends = f"{devices[0]:,} to {devices[-1]:,}"
    return size, ends, "100 %", f"{ours[-1]:.2f} %", f"{guesses[-1]:.2f} %"


def _strong(
    axes: Any, colour: int, size: str, effort: StudyEffort
) -> tuple[list[tuple[str, ...]], str]:
    """Rows by base for the stated and the smaller batch; how far the nearest base is off."""
    stated, level = _STRONG[size]
    rows: list[tuple[str, ...]] = []
    nearest = []
    for batch in (stated, stated // CONSUMED):
        *bases, largest = layouts = _layouts(size, batch)
        walked, guessed = simulated(MODELS[size], layouts, effort), estimated(MODELS[size], layouts)
        ours, guesses = 100 * walked[-1] / walked[:-1], 100 * guessed[-1] / guessed[:-1]
        places = [base.num_devices for base in bases]
        rows += [
            (
                f"{size}, {batch:,}",
                f"{place:,} to {largest.num_devices:,}",
                f"1/{largest.num_devices // place}",
                f"{level} %",
                f"{ours[at]:.2f} %",
                f"{guesses[at]:.2f} %",
            )
            for at, place in enumerate(places)
        ]
        page.draw_simulated(
            axes, places, ours, f"{size}, {batch:,} a step, simulated", colour + 2 * len(nearest)
        )
        at = int(abs(ours - level).argmin())
        nearest.append(f"{ours[at] - level:+.1f} points off from a base of {places[at]:,} GCDs")
    page.draw_published(axes, places, [level] * len(places), f"published, {size}: {level} %")
    return rows, (
        f"{size}, at its nearest: with the stated batch {nearest[0]}, with a quarter of it "
        f"{nearest[1]}."
    )
