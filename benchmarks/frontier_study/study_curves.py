"""Throughput against tp, pp and the batch, and of the three models beside what was published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.frontier_study.study_page import (
    COLOURS,
    StudyPart,
    counted,
    draw_estimated,
    draw_published,
    draw_simulated,
    figure,
    rows_table,
    shown,
)
from benchmarks.frontier_study.study_runs import (
    MODELS,
    PEAK_TFLOPS,
    PUBLISHED,
    RECIPES,
    StudyEffort,
    estimated,
    simulate,
    simulated,
)
from benchmarks.simulator.simulator_frontier import (
    BATCHES_22B,
    frontier_layout,
    legal_speeds,
    tflops,
)
from search_spaces.arrays import Floats
from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape

_FIXED_BATCH: Final = 128
_PER_STAGE: Final = 8
"""Micro-batches for each stage, which keep the bubble at up to a ninth of the step."""


def curves(effort: StudyEffort, _tables: Path | None) -> StudyPart:
    """The paper's curves."""
    return StudyPart(
        title="Throughput against tp, pp and the batch",
        blocks=(*_degrees(effort), *_batches(effort)),
    )


def _both(
    model: ModelShape, layouts: Sequence[Layout], effort: StudyEffort
) -> tuple[Floats, Floats]:
    """TFLOP/s of a GCD, simulated and estimated."""
    return simulated(model, layouts, effort), estimated(model, layouts)


def _degrees(effort: StudyEffort) -> list[str]:
    model, by_tp, by_pp = MODELS["22B"], (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 24, 48)
    tp = _both(model, [frontier_layout(t, 8, 1, _FIXED_BATCH) for t in by_tp], effort)
    fixed = _both(model, [frontier_layout(8, p, 1, _FIXED_BATCH) for p in by_pp], effort)
    kept = _both(model, [frontier_layout(8, p, 1, _PER_STAGE * p) for p in by_pp], effort)
    with figure("degrees", 2) as (left, right):
        draw_simulated(left, by_tp, tp[0], "simulated")
        draw_estimated(left, by_tp, tp[1], "estimated")
        for colour, (name, both) in enumerate(
            ((f"batch {_FIXED_BATCH}", fixed), (f"batch {_PER_STAGE} pp", kept))
        ):
            draw_simulated(right, by_pp, both[0], f"simulated, {name}", colour)
            draw_estimated(right, by_pp, both[1], f"estimated, {name}", colour)
        left.set(xlabel="tp (pp 8)", ylabel="TFLOP/s a GCD", ylim=(0, None))
        right.set(xlabel="pp (tp 8)", ylim=(0, None))
        counted(left, by_tp)
        counted(right, by_pp)
        left.legend()
        right.legend()
    tp_row = ("22B", *(f"{rate:.1f}" for rate in tp[0]))
    lost = [(p - 1) / (_FIXED_BATCH + p - 1) for p in by_pp]
    pp_rows = [
        (f"batch {_FIXED_BATCH}", *_rates(fixed[0])),
        ("bubble at that batch", *(f"{each:.0%}" for each in lost)),
        (f"batch {_PER_STAGE} pp", *_rates(kept[0])),
    ]
    sentence = (
        f"22B, by simulation: from tp {by_tp[0]} to {by_tp[-1]} a GCD's speed goes from {tp[0][0]:.0f} "
        f"to {tp[0][-1]:.0f} TFLOP/s; from pp {by_pp[0]} to {by_pp[-1]} it goes from {fixed[0][0]:.0f} to "
        f"{fixed[0][-1]:.0f} at a fixed batch, and from {kept[0][0]:.0f} to {kept[0][-1]:.0f} where the "
        "batch grows with the stages."
    )
    about = (
        "One replica of 22B, micro-batches of one sequence, everything recomputed: so neither the "
        "reduction of gradients nor the batch changes with the degree, but the number of GCDs does. "
        "The paper's curves are published as figures alone; their axes are kept, not their points. "
        "Simulated TFLOP/s of a GCD:"
    )
    return [
        about,
        rows_table(("simulated", *(f"tp {t}" for t in by_tp)), [tp_row]),
        rows_table(("simulated", *(f"pp {p}" for p in by_pp)), pp_rows),
        shown("degrees", sentence),
    ]


def _rates(rates: Floats) -> list[str]:
    return ["out of memory" if np.isnan(rate) else f"{rate:.1f}" for rate in rates]


def _batches(effort: StudyEffort) -> list[str]:
    counts = {"22B": (8, 16, 32, 64, 128, 256, 512), "1T": (64, 100, 200, 400, 800, 1600, 3200)}
    if effort.is_quick:
        counts["1T"] = counts["1T"][:-1]
    degrees = {"22B": (2, 8, 1), "1T": (8, 64, 6)}
    rows = []
    with figure("batches", 2) as every:
        for axes, (size, micro) in zip(every, counts.items(), strict=True):
            layouts = [frontier_layout(*degrees[size], m) for m in micro]
            batches = [each.global_batch_size for each in layouts]
            found, expected = _both(MODELS[size], layouts, effort)
            draw_simulated(axes, batches, found, "simulated")
            draw_estimated(axes, batches, expected, "estimated")
            if size in RECIPES:
                draw_published(axes, [RECIPES[size].global_batch_size], [PUBLISHED[size][1]])
            tp, pp, dp = degrees[size]
            axes.set(title=f"{size}: tp {tp}, pp {pp}, dp {dp}", ylim=(0, None))
            axes.set(xlabel="sequences a step", ylabel="TFLOP/s a GCD")
            counted(axes, batches)
            axes.legend()
            half = next(b for b, rate in zip(batches, found, strict=True) if rate > found[-1] / 2)
            rows.append((size, *(f"{b:,}: {r:.1f}" for b, r in zip(batches, found, strict=True))))
            rows[-1] = (*rows[-1], f"{half:,}")
    numbers = [f"batch {n}" for n in range(1, 8)][: len(rows[0]) - 2]
    rows = [_padded(row, len(numbers) + 2) for row in rows]
    sentence = (
        "Speed by the sequences of a step: the more micro-batches, the smaller the share of the "
        "bubble and of the reduction of gradients."
    )
    return [
        "Against the sequences of a step, by simulation (batch: TFLOP/s of a GCD). The layout of 1T "
        "is the published one; that of 22B is an assumption (tp 2, pp 8, one replica).",
        rows_table(("model", *numbers, "half of the last from"), rows),
        shown("batches", sentence),
    ]


def _padded(row: tuple[str, ...], length: int) -> tuple[str, ...]:
    return (*row[:-1], *[""] * (length - len(row)), row[-1])


def throughput(effort: StudyEffort, _tables: Path | None) -> StudyPart:
    """The three models beside their published speeds, and where their steps go."""
    rows, parts = [], []
    for size, layout in RECIPES.items():
        model, (share, rate) = MODELS[size], PUBLISHED[size]
        [run] = simulate(model, [layout], effort)
        assert run.step_s is not None, "the published layout runs out of memory"
        found = tflops(model, layout, run.step_s)
        expected = float(estimated(model, [layout])[0])
        is_constant = " (a constant of the simulator)" if size == "175B" else ""
        rows.append(
            (
                f"{size}, tp {layout.tp}, pp {layout.pp}, dp {layout.dp}",
                f"{rate} ({share} %)",
                f"{found:.1f} ({found / PEAK_TFLOPS:.2%}){is_constant}",
                f"{found / rate - 1:+.0%}",
                f"{expected:.1f}",
                f"{expected / rate - 1:+.0%}",
            )
        )
        parts.append((size, layout, run.step_s, dict(run.parts_s)))
    rows[:0] = [_legal_row(nodes, batch) for nodes, batch in BATCHES_22B]
    header = ("model", "published", "simulated", "error", "estimated", "error")
    return StudyPart(
        title="Throughput of the three models",
        blocks=(
            f"TFLOP/s of a GCD, recomputation included, and the share of {PEAK_TFLOPS} TFLOP/s. The "
            "layout and the batch of 22B are not published: shown are the median and the best of "
            "its legal layouts (micro-batches to 16, no interleaving, everything recomputed) on "
            "assumed nodes and batches.",
            rows_table(header, rows),
            *_why_slower(parts),
        ),
    )


def _legal_row(nodes: int, batch: int) -> tuple[str, ...]:
    """Median and best of 22B's legal layouts that fit."""
    found, (share, rate) = legal_speeds(nodes, batch), PUBLISHED["22B"]
    median, best = float(np.median(found)), float(found.max())
    return (
        f"22B, {nodes} nodes, batch {batch} ({len(found)} layouts)",
        f"{rate} ({share} %)",
        f"{median:.1f} to {best:.1f}",
        f"{median / rate - 1:+.0%} to {best / rate - 1:+.0%}",
        "-",
        "-",
    )


def _why_slower(parts: Sequence[tuple[str, Layout, float, dict[str, Any]]]) -> list[str]:
    names = [name for name in parts[0][3] if any(each[3][name] > 1e-3 * each[2] for each in parts)]
    rows = [
        (size, f"{step_s:,.1f} s", *(f"{found[name] / step_s:.1%}" for name in names))
        for size, _, step_s, found in parts
    ]
    (_, small, small_s, first), (_, large, large_s, second) = parts
    gains = {name: second[name] / large_s - first[name] / small_s for name in names}
    most = max(gains, key=lambda name: gains[name])
    idle = [(each.pp - 1) / (each.num_microbatches + each.pp - 1) for each in (small, large)]
    with figure("parts", height=1.8) as axes:
        for at, (_, _, step_s, found) in enumerate(parts):
            left = 0.0
            for colour, name in enumerate(names):
                share = 100 * found[name] / step_s
                label = name.removesuffix("_s") if not at else None
                axes.barh(at, share, left=left, color=COLOURS[colour], label=label)
                left += share
        axes.set_yticks(range(len(parts)), [each[0] for each in parts])
        axes.set(xlabel="% of a step, simulated")
        axes.legend(ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    word = most.removesuffix("_s")
    sentence = (
        f"Where the time of a simulated step goes: the share that grows most from 175B to 1T is "
        f"`{word}`, by {100 * gains[most]:.1f} points."
    )
    return [
        f"Why 1T is slower, by simulation: the share of the step that grows most is `{word}`, from "
        f"{first[most] / small_s:.1%} of 175B's to {second[most] / large_s:.1%} of 1T's. Its "
        f"tensor-parallel groups have {large.tp} GCDs instead of {small.tp}. `pp` is all waiting and "
        f"transfers between {large.pp} stages instead of {small.pp}; of the pipelines' slots "
        f"{idle[0]:.1%} and {idle[1]:.1%} are idle by the formula (pp - 1) / (m + pp - 1).",
        rows_table(("model", "step", *(name.removesuffix("_s") for name in names)), rows),
        shown("parts", sentence),
    ]
