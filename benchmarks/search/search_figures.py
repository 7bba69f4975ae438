"""The tables of `bench_search`: what each strategy needed, and targets beside measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from benchmarks.results_file import table
from benchmarks.search.search_record import Promise
from benchmarks.search.search_runs import Landscape
from layout_tuner.cli.predictions.replay_report import summarize
from layout_tuner.tuner.replay.run import by_strategy

HEADER: Final = (
    "strategy",
    "runs",
    "to 5 % (quartiles)",
    "to 2 %",
    "to 0 %",
    "mean to 5 / 2 %",
    "reached 5 / 2 %",
    "failed to 5 %",
    "worst cell's mean",
    "regret after 1 / 3 / 5 / 10 / 20",
    "search s/probe",
)


STRATEGIES: Final = (
    "guided",
    "model-only",
    "communication",
    "deephyper",
    "deephyper+memory",
    "random",
)
RECORDED: Final = (
    *("searched", "of", "runs", "mean to 5 / 2 %: guided", *STRATEGIES[1:]),
    *(f"guided: {HEADER[2]}", *HEADER[3:5], *HEADER[6:], "measured"),
)
"""Header of the recorded table of all strategies."""


def landscape_row(landscape: Landscape) -> tuple[str, ...]:
    """What is recorded: the mean probes of each strategy, and all else of `guided`; no date yet."""
    groups = by_strategy(landscape.runs)
    rows = {name: _row(name, landscape, runs) for name, runs in groups.items()}
    none = ("-",) * len(HEADER)
    means = [rows.get(name, none)[5] for name in STRATEGIES]
    guided = rows.get("guided", none)
    searched = (landscape.name, landscape.about, guided[1])
    return (*searched, *means, *guided[2:5], *guided[6:])


def landscape_table(landscape: Landscape) -> str:
    """What is printed: a row a strategy."""
    groups = by_strategy(landscape.runs)
    return table(HEADER, [_row(name, landscape, groups[name]) for name in groups])


def _row(name: str, landscape: Landscape, runs: Sequence[Any]) -> tuple[str, ...]:
    summary = summarize(runs)
    to = summary["probes_to"]
    five, two, best = to["0.05"], to["0.02"], to["0"]
    regrets = " / ".join(f"{100 * regret:.3g}" for regret in summary["regret_after"].values())
    return (
        name,
        f"{len(runs)}",
        f"{five['median']:g} ({five['q25']:g} to {five['q75']:g})",
        f"{two['median']:g}",
        f"{best['median']:g}",
        f"{five['mean']:.1f} / {two['mean']:.1f}",
        f"{five['reached']:.0%} / {two['reached']:.0%}",
        f"{summary['failed_share_to']['0.05']:.1%}",
        f"{worst_cell_mean(landscape, name):.1f}",
        f"{regrets} %",
        f"{summary['seconds_per_probe']:.3f}",
    )


def worst_cell_mean(landscape: Landscape, strategy: str) -> float:
    """The largest mean over seeds of the probes to 5 %, over cells."""
    of_strategy = [run for run in landscape.runs if run.strategy == strategy]
    means = []
    for cell in {run.cell for run in of_strategy}:
        runs = [run for run in of_strategy if run.cell == cell]
        means.append(float(summarize(runs)["probes_to"]["0.05"]["mean"]))
    return max(means)


def overall(landscape: Landscape, strategy: str) -> dict[str, Any] | None:
    """`summarize` of one strategy's runs; None where it was not run."""
    runs = by_strategy(landscape.runs).get(strategy)
    return summarize(runs) if runs else None


def sweep_promises(sweep: Landscape) -> list[Promise]:
    """What is asked of a cold search of the H100 sweep."""
    ours, peer = overall(sweep, "guided"), overall(sweep, "deephyper")
    if ours is None:
        return []
    to, where = ours["probes_to"], f"{sweep.name}, cold, 1 pending"
    found = [
        Promise(
            what=f"{where}: probes to {share} %, {figure}",
            asked=f"{most}",
            measured=to[f"{share / 100:g}"][figure],
            most=most,
        )
        for figure, share, most in (
            ("median", 5, 2),
            ("median", 2, 4),
            ("mean", 5, 1.7),
            ("mean", 2, 2.2),
        )
    ]
    found.append(
        Promise(
            what=f"{where}: mean probes to 5 % in the worst cell",
            asked="4",
            measured=worst_cell_mean(sweep, "guided"),
            most=4,
        )
    )
    found.append(_failures(where, ours))
    return found if peer is None else found + _beside_deephyper(where, ours, peer)


def _beside_deephyper(where: str, ours: dict[str, Any], peer: dict[str, Any]) -> list[Promise]:
    names = {"0.05": "5 %", "0.02": "2 %"}
    return [
        Promise(
            what=f"{where}: share of deephyper's median probes to {name}",
            asked="a third",
            measured=ours["probes_to"][target]["median"] / peer["probes_to"][target]["median"],
            most=1 / 3,
            shown="{:.2f}",
        )
        for target, name in names.items()
    ]


def _failures(where: str, ours: dict[str, Any]) -> Promise:
    return Promise(
        what=f"{where}: failed among the probes up to 5 %",
        asked="5 %",
        measured=ours["failed_share_to"]["0.05"],
        most=0.05,
        shown="{:.1%}",
    )


def stress_promises(stress: Landscape) -> list[Promise]:
    """What is asked where the model is wrong in form."""
    ours = overall(stress, "guided")
    if ours is None:
        return []
    to, where = ours["probes_to"], "stress landscape, 8 pending"
    return [
        *_no_worse(where, ours, (16.1, 23.3)),
        Promise(
            what=f"{where}: probes to 5 %, median",
            asked="15",
            measured=to["0.05"]["median"],
            most=15,
        ),
        Promise(
            what=f"{where}: probes to 2 %, median",
            asked="30",
            measured=to["0.02"]["median"],
            most=30,
        ),
        Promise(
            what=f"{where}: runs that miss 5 %",
            asked="10 %",
            measured=1 - to["0.05"]["reached"],
            most=0.1 + 1e-9,
            shown="{:.0%}",
        ),
        _failures(where, ours),
    ]


def small_promises(small: Landscape) -> list[Promise]:
    """What is asked on many small cells."""
    ours = overall(small, "guided")
    return [] if ours is None else _no_worse(small.name, ours, (1.4, 1.5))


def _no_worse(where: str, ours: dict[str, Any], before: tuple[float, float]) -> list[Promise]:
    """Mean probes to 5 and 2 %: no more than they once were, as rounded to a tenth."""
    return [
        Promise(
            what=f"{where}: probes to {share} %, mean",
            asked=f"{most}, as before",
            measured=ours["probes_to"][f"{share / 100:g}"]["mean"],
            most=most + 0.05,
        )
        for share, most in zip((5, 2), before, strict=True)
    ]


def local_promises(local: Landscape) -> list[Promise]:
    """What is asked on probes of this project's own, on CPU cores."""
    ours, chance = overall(local, "guided"), overall(local, "random")
    if ours is None or chance is None:
        return []
    median = ours["probes_to"]["0.05"]["median"]
    return [
        Promise(what="real CPU probes: probes to 5 %, median", asked="6", measured=median, most=6),
        Promise(
            what="real CPU probes: share of random's median",
            asked="half",
            measured=median / chance["probes_to"]["0.05"]["median"],
            most=0.5,
            shown="{:.2f}",
        ),
    ]
