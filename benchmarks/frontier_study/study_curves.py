"""Throughput against tp, pp and the batch, and of the three models beside what was published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.frontier_study import study_page as page
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
    rate_of_1t_where_less_was_consumed,
)
from layout_tuner.array_types import Floats
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape

_FIXED_BATCH: Final = 128
_PER_STAGE: Final = 8
"""Micro-batches for each stage, which keep the bubble at up to a ninth of the step."""


def curves(effort: StudyEffort, _tables: Path | None) -> page.StudyPart:
    """The paper's curves."""
    return page.StudyPart(
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
    words = f"batch {_FIXED_BATCH}", f"batch {_PER_STAGE} pp"
    with page.figure("degrees", 2) as (left, right):
        _draw(left, by_tp, tp, "", 0)
        for colour, (name, both) in enumerate(zip(words, (fixed, kept), strict=True)):
            _draw(right, by_pp, both, f", {name}", colour)
        left.set(xlabel="tp (pp 8)", ylabel="TFLOP/s a GCD")
        right.set(xlabel="pp (tp 8)")
    lost = [(p - 1) / (_FIXED_BATCH + p - 1) for p in by_pp]
    pp_rows = [
        (words[0], *_rates(fixed[0])),
        ("bubble at that batch", *(f"{each:.0%}" for each in lost)),
        (words[1], *_rates(kept[0])),
    ]
    ends = [f"{each[0][0]:.0f} to {each[0][-1]:.0f}" for each in (tp, fixed, kept)]
    sentence = (
        f"22B, by simulation: from tp {by_tp[0]} to {by_tp[-1]} a GCD's speed goes from {ends[0]} "
        f"TFLOP/s; from pp {by_pp[0]} to {by_pp[-1]} it goes from {ends[1]} at a fixed batch, and "
        f"from {ends[2]} where the batch grows with the stages."
    )
    about = (
        "One replica of 22B, micro-batches of one sequence, everything recomputed: so neither the "
        "reduction of gradients nor the batch changes with the degree, but the number of GCDs does. "
        "The paper's curves are published as figures alone; their axes are kept, not their points. "
        "Simulated TFLOP/s of a GCD:"
    )
    return [
        about,
        page.rows_table(("simulated", *(f"tp {t}" for t in by_tp)), [("22B", *_rates(tp[0]))]),
        page.rows_table(("simulated", *(f"pp {p}" for p in by_pp)), pp_rows),
        page.shown("degrees", sentence),
    ]


def _draw(
    axes: Any, at: Sequence[int], both: tuple[Floats, Floats], what: str, colour: int
) -> None:
    page.draw_simulated(axes, at, both[0], f"simulated{what}", colour)
    page.draw_estimated(axes, at, both[1], f"estimated{what}", colour)
    page.counted(axes, at)
    page.from_zero(axes)
    axes.legend()


def _rates(rates: Floats) -> list[str]:
    return ["out of memory" if np.isnan(rate) else f"{rate:.1f}" for rate in rates]


def _batches(effort: StudyEffort) -> list[str]:
    counts = {"22B": (8, 16, 32, 64, 128, 256, 512), "1T": (64, 100, 200, 400, 800, 1600)}
    degrees = {"22B": (2, 8, 1), "1T": (8, 64, 6)}
    tables = []
    with page.figure("batches", 2) as every:
        for axes, (size, micro) in zip(every, counts.items(), strict=True):
            layouts = [frontier_layout(*degrees[size], m) for m in micro]
            batches = [each.global_batch_size for each in layouts]
            found, expected = _both(MODELS[size], layouts, effort)
            if size in RECIPES:
                page.draw_published(axes, [RECIPES[size].global_batch_size], [PUBLISHED[size][1]])
            tp, pp, dp = degrees[size]
            axes.set(title=f"{size}: tp {tp}, pp {pp}, dp {dp}")
            axes.set(xlabel="sequences a step", ylabel="TFLOP/s a GCD")
            _draw(axes, batches, (found, expected), "", 0)
            rows = [("simulated", *_rates(found)), ("estimated", *_rates(expected))]
            tables.append(
                page.rows_table((f"{size}, sequences", *(f"{b:,}" for b in batches)), rows)
            )
    sentence = (
        "Speed by the sequences of a step: the more micro-batches, the smaller the share of the "
        "bubble and of the reduction of gradients."
    )
    return [
        "TFLOP/s of a GCD against the sequences of a step. The layout of 1T is the published one; "
        "that of 22B is an assumption (tp 2, pp 8, one replica).",
        *tables,
        page.shown("batches", sentence),
    ]


def throughput(effort: StudyEffort, _tables: Path | None) -> page.StudyPart:
    """The three models beside their published speeds, and where their steps go."""
    rows = [_legal_row(nodes, batch) for nodes, batch in BATCHES_22B]
    costs: dict[str, dict[str, float]] = {}
    first = 0.0
    for size, layout in RECIPES.items():
        model, (share, rate) = MODELS[size], PUBLISHED[size]
        [found], [expected] = _both(model, [layout], effort)
        [run] = simulate(model, [layout], effort)
        assert run.step_s is not None, "the published layout runs out of memory"
        first = first or float(found)
        costs[size] = {n: s / run.step_s * first / found for n, s in run.parts_s.items()}
        is_constant = ", a constant of the simulator" if size == "175B" else ""
        rows.append(
            (
                f"{size}, tp {layout.tp}, pp {layout.pp}, dp {layout.dp}",
                f"{rate} ({share} %)",
                f"{found:.1f} ({100 * found / PEAK_TFLOPS:.2f} %{is_constant})",
                f"{found / rate - 1:+.0%}",
                f"{expected:.1f}",
                f"{expected / rate - 1:+.0%}",
            )
        )
    header = ("model", "published", "simulated", "error", "estimated", "error")
    return page.StudyPart(
        title="Throughput of the three models",
        blocks=(
            f"TFLOP/s of a GCD, recomputation included, and the share of {PEAK_TFLOPS} TFLOP/s. The "
            "layout and the batch of 22B are not published: shown are the median and the best of "
            "its legal layouts that fit (micro-batches to 16, no interleaving, everything "
            "recomputed) on assumed nodes and batches.",
            page.rows_table(header, rows),
            *_why_slower(costs),
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


def _why_slower(costs: Mapping[str, Mapping[str, float]]) -> list[str]:
    """By the time that each part of a step takes for one FLOP, 175B's whole step being 1."""
    small, large = costs["175B"], costs["1T"]
    names = [name for name in small if max(small[name], large[name]) > 1e-3]
    words = [name.removesuffix("_s") for name in names]
    more = {word: large[name] - small[name] for word, name in zip(words, names, strict=True)}
    with page.figure("parts", height=1.8) as axes:
        for at, each in enumerate(costs.values()):
            left = 0.0
            for colour, (name, word) in enumerate(zip(names, words, strict=True)):
                share, label = 100 * each[name], None if at else word
                axes.barh(at, share, left=left, color=page.COLOURS[colour], label=label)
                left += share
        axes.set_yticks(range(len(costs)), list(costs))
        axes.set(xlabel="time for a FLOP, simulated; 175B's step: 100")
        axes.legend(ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    rows = [(size, *(f"{100 * each[n]:.1f}" for n in names)) for size, each in costs.items()]
    rows.append(("difference", *(f"{100 * more[word]:+.1f}" for word in words)))
    most = max(more, key=lambda word: more[word])
    recipes = RECIPES["175B"], RECIPES["1T"]
    idle = [(each.pp - 1) / (each.num_microbatches + each.pp - 1) for each in recipes]
    return [
        f"Why 1T is slower, by simulation: the time that a GCD takes for one FLOP differs by "
        f"{sum(more.values()):+.1%} from 175B's, {100 * more[most]:+.1f} points of it in `{most}`. `pp` is waiting for and "
        f"transfers between stages, {recipes[1].pp} instead of {recipes[0].pp}: of a pipeline's slots "
        f"{idle[1]:.1%} instead of {idle[0]:.1%} are idle by (pp - 1) / (m + pp - 1). `tp` is the sums "
        f"over {recipes[1].tp} GCDs instead of {recipes[0].tp}. The published difference is "
        f"{PUBLISHED['175B'][1] / PUBLISHED['1T'][1] - 1:+.1%}. If both runs consumed a quarter of "
        "the stated samples (see Scaling), a simulator that is fitted to 175B so gives 1T "
        f"{rate_of_1t_where_less_was_consumed():.1f} TFLOP/s, for {PUBLISHED['1T'][1]} published. "
        "What is beyond that is not explained here.",
        page.rows_table(("time for a FLOP, simulated", *words), rows),
        page.shown(
            "parts", "Where the time for a FLOP goes in a simulated step of 175B and of 1T."
        ),
    ]
