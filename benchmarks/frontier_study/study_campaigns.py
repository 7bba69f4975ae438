"""The layouts of both spaces of each model, the best of them, and what they save."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.frontier_study import study_page as page
from benchmarks.frontier_study.study_runs import (
    MODELS,
    PUBLISHED,
    RECIPES,
    StudyEffort,
    simulate,
    words,
)
from benchmarks.frontier_study.study_spaces import (
    BATCHES,
    NODES,
    ROOMY,
    TABLE_V,
    WIDE,
    StudyLandscape,
    landscape,
    rate,
    table_v,
)
from layout_tuner.units import GIB

_SHOWN: Final = 3
_TOKENS: Final = 20e12
_FLOORS: Final = (1, 2, 4, 8, 12, 16)
"""Stages of table V."""


def campaigns(effort: StudyEffort, _tables: Path | None) -> page.StudyPart:
    """Every layout of both spaces, and the best beside the published recipes."""
    found = {(size, name): landscape(size, name, effort) for size in MODELS for name in _NAMES}
    rows = [_space_row(each, effort) for each in found.values()]
    header = ("space", "legal layouts", "fit", "median", "best", "best over the recipe", "roomy")
    _draw(found, effort)
    sentence = (
        "Every legal layout that fits, fastest first: of table V and of the wider space, beside the "
        "published speed and the simulated one of the published recipe."
    )
    return page.StudyPart(
        title="Campaigns over the paper's space and a wider one",
        blocks=(
            _about(),
            page.rows_table(header, rows),
            page.shown("campaigns", sentence),
            "The best layouts, by simulation; the published recipes among them, in the same units:",
            _best_table(found, effort),
            *_why_not_table_v(found, effort),
        ),
    )


_NAMES: Final = (TABLE_V, WIDE)


def _about() -> str:
    nodes = ", ".join(f"{size} {count} nodes" for size, count in NODES.items())
    batches = ", ".join(f"{size} {count:,}" for size, count in BATCHES.items())
    return (
        "Table V of the paper is the space of its search for 175B: pp 1 to 16, tp 1 to 8, "
        "micro-batches of 4 to 20 sequences, 5 or 10 of them, ZeRO-1 or none, 12 or 16 nodes; "
        "everything is recomputed. It is applied to all three models, to 1T on the nodes of its "
        "recipe. The wider space fixes the batch and lets the accumulation follow from it: "
        "micro-batches from one sequence, interleaving, ZeRO stages 0 to 3 with one or two copies, "
        "recomputation of nothing, attention or everything, sequence parallelism, tensor columns, "
        f"both orders of the axes. Nodes: {nodes}; sequences a step: {batches} (of 22B both are "
        "assumptions, of the others those of the recipes). Layouts compare by tokens/s of a GCD, "
        "whatever they recompute. Roomy is the best of those that leave "
        f"{1 - ROOMY:.0%} of the fullest GCD free: the published run reserved up to as much more than "
        "is simulated (see Memory). The batches of table V follow from its knobs, so that its layouts "
        "differ in batch."
    )


def recipe_rate(size: str, effort: StudyEffort) -> float:
    """Tokens/s of a GCD of the published recipe, simulated; NaN: there is none."""
    if size not in RECIPES:
        return float("nan")
    [run] = simulate(MODELS[size], [RECIPES[size]], effort)
    return rate(MODELS[size], RECIPES[size], run)


def _space_row(each: StudyLandscape, effort: StudyEffort) -> tuple[str, ...]:
    own = each.rates[~np.isnan(each.rates)]
    speeds = ("-", "-", "-", "-")
    if len(own):
        recipe, roomy = recipe_rate(each.size, effort), each.roomy_best()
        gain = "-" if np.isnan(recipe) else f"{own.max() / recipe - 1:+.1%}"
        best = "-" if roomy is None else f"{each.rates[roomy]:.1f}"
        speeds = (f"{np.median(own):.1f}", f"{own.max():.1f}", gain, best)
    fit = f"{each.num_fitting:,} ({each.num_fitting / len(each.layouts):.0%})"
    return f"{each.size}, {each.name}", f"{len(each.layouts):,}", fit, *speeds


def _draw(found: dict[tuple[str, str], StudyLandscape], effort: StudyEffort) -> None:
    with page.figure("campaigns", len(MODELS)) as every:
        for axes, size in zip(every, MODELS, strict=True):
            for colour, name in enumerate(_NAMES):
                rates = np.sort(found[size, name].rates)[::-1]
                own = rates[~np.isnan(rates)]
                if len(own):
                    share = np.linspace(0, 100, len(own))
                    label = f"simulated, {name}"
                    axes.plot(share, own, color=page.COLOURS[colour], label=label)
            if size in RECIPES:
                axes.axhline(
                    recipe_rate(size, effort), color=page.INK, linewidth=0.9, linestyle=":",
                    label="recipe, simulated",
                )  # fmt: skip
            flops = MODELS[size].hardware_flops_per_token("full")
            page.draw_published(axes, [0], [1e12 * PUBLISHED[size][1] / flops])
            axes.set(title=size, xlabel="% of the layouts that fit")
            page.from_zero(axes)
            axes.legend(fontsize=7)
        every[0].set_ylabel("tokens/s a GCD")


def _best_table(found: dict[tuple[str, str], StudyLandscape], effort: StudyEffort) -> str:
    rows = []
    for (size, name), each in found.items():
        if name == WIDE and size in RECIPES:
            [run] = simulate(MODELS[size], [RECIPES[size]], effort)
            recipe = rate(MODELS[size], RECIPES[size], run)
            peak = f"{run.peak_bytes / GIB:.0f} GiB"
            rows.append(
                (f"{size}, **published recipe**", words(RECIPES[size]), f"{recipe:.1f}", peak)
            )
        for at in each.best(_SHOWN):
            layout, peak = each.layouts[at], f"{each.runs[at].peak_bytes / GIB:.0f} GiB"
            nodes = f", {layout.num_nodes} nodes" if name == TABLE_V else ""
            rows.append((f"{size}, {name}", words(layout) + nodes, f"{each.rates[at]:.1f}", peak))
    header = ("space", "layout", "tokens/s a GCD, simulated", "fullest GCD, simulated")
    return page.rows_table(header, rows)


def _why_not_table_v(
    found: dict[tuple[str, str], StudyLandscape], effort: StudyEffort
) -> list[str]:
    rows = [
        (f"{m} micro-batches", *(f"{(pp - 1) / (m + pp - 1):.0%}" for pp in _FLOORS))
        for m in (5, 10)
    ]
    recipe = RECIPES["175B"]
    is_held = table_v("175B").holds(recipe, 8)
    reached = {
        size: found[size, TABLE_V].rates[found[size, TABLE_V].best()[0]] / recipe_rate(size, effort)
        for size in RECIPES
        if found[size, TABLE_V].num_fitting
    }
    best = "; ".join(
        f"the best layout of table V for {size} reaches {share:.0%} of the recipe, by simulation"
        for size, share in reached.items()
    )
    empty = [size for size in MODELS if not found[size, TABLE_V].num_fitting]
    none = f" For {' and '.join(empty)} none of its layouts fits." if empty else ""
    return [
        f"Why table V cannot hold the best recipe: with 5 or 10 micro-batches this share of a "
        f"pipeline's slots is idle, (pp - 1) / (m + pp - 1), whatever the machine. The recipe of 175B "
        f"has {recipe.num_microbatches} micro-batches of {recipe.micro_batch_size} sequence on "
        f"{recipe.pp} stages: {(recipe.pp - 1) / (recipe.num_microbatches + recipe.pp - 1):.1%} idle; "
        f"table V holds it: {'yes' if is_held else 'no'}. Few stages need a large tp or do not fit: "
        f"{best}.{none}",
        page.rows_table(("idle slots", *(f"pp {pp}" for pp in _FLOORS)), rows),
    ]


def savings(effort: StudyEffort, _tables: Path | None) -> page.StudyPart:
    """Node-hours and days to train 1T: with the tuned layout, the published and the median one."""
    size = "1T"
    each = landscape(size, WIDE, effort)
    devices = RECIPES[size].num_devices
    rates = {
        "median legal layout that fits": float(np.nanmedian(each.rates)),
        "the paper's recipe": recipe_rate(size, effort),
    }
    roomy = each.roomy_best()
    if roomy is not None:
        rates["tuned, roomy"] = float(each.rates[roomy])
    rates["tuned layout"] = float(each.rates[each.best()[0]])
    days = {name: _TOKENS / (speed * devices) / 86400 for name, speed in rates.items()}
    _draw_days(days)
    header = (size, "tokens/s a GCD", "days", "node-hours", "the tuned layout saves", "share")
    sentence = (
        f"Days to train 1T on {_TOKENS / 1e12:.0f} trillion tokens with {NODES[size]} nodes, by "
        "simulation, with the median layout, the paper's recipe and the tuned layouts."
    )
    return page.StudyPart(
        title="What a tuned layout saves",
        blocks=(
            f"1T parameters on {_TOKENS / 1e12:.0f} trillion tokens with {devices:,} GCDs at "
            f"{BATCHES[size]:,} sequences a step, by simulation; failures, checkpoints and queues are "
            "left out. The tuned layout is the best of the wider space that fits: "
            f"{words(each.layouts[each.best()[0]])}."
            + ("" if roomy is None else f" The roomy one, as above: {words(each.layouts[roomy])}."),
            page.rows_table(header, _saving_rows(rates, days)),
            page.shown("savings", sentence),
        ),
    )


def _saving_rows(rates: Mapping[str, float], days: Mapping[str, float]) -> list[tuple[str, ...]]:
    tuned = days["tuned layout"]
    return [
        (
            name,
            f"{rates[name]:.1f}",
            f"{number:,.0f}",
            f"{number * 24 * NODES['1T'] / 1e6:.2f} million",
            "-" if number == tuned else f"{number - tuned:,.0f} days",
            "-" if number == tuned else f"{1 - tuned / number:.0%}",
        )
        for name, number in days.items()
    ]


def _draw_days(days: Mapping[str, float]) -> None:
    places = range(len(days))
    with page.figure("savings", height=1.9) as axes:
        axes.barh(places, list(days.values()), color=page.COLOURS[0])
        axes.set_yticks(places, list(days))
        axes.invert_yaxis()
        axes.set(xlabel=f"days on {NODES['1T']} nodes, simulated")
