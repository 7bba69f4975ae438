"""Judges cold estimates by every table of a folder, and the layouts that they would choose first.

Run as `make bench-tables TABLES=DIR`, or `python -m benchmarks.bench_tables --tables DIR`; it takes
a minute. `--only simumax_a100,mpt_fsdp_a100` judges some tables, `--worst 3` also prints the rows
that are furthest off. `--save FILE` keeps the figures, and `--before FILE` prints those of another
commit beside these. `--record` writes the section "Tables" of `benchmarks/RESULTS.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.results_file import describe_machine, record, table
from benchmarks.tables import domain_levels
from benchmarks.tables.described_rows import SAID_NOW
from benchmarks.tables.judged_tables import (
    BLOCKS,
    FIRST_CHOICE,
    LACKS,
    LEAST_LAYOUTS,
    NEAR,
    NEAR_BEST,
    NEWEST,
    ChoiceScore,
    JudgedRow,
    RowFigures,
    read_folder,
)
from layout_tuner.units import GIB

Figures = Mapping[str, Any]
"""Fields of a `RowFigures`."""

UNTIMED: Final = ("megatron_golden", "megatron_golden_new")
"""Tables whose step times are of deterministic kernels and tiny models: their peaks alone count."""
HELD: Final = (0.90, 0.98)
"""Asked share of the 95 % intervals that hold the measurement."""
ACCURATE: Final = 0.08
DOMAINS: Final = ("all", "Qwen3_30B_a3B")
"""Rows of the domains of nodes that are recorded."""
WIDTHS: Final = (1.8, 2.3)
"""Asked width of intervals: of tables with a mean error up to `ACCURATE`, and of others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subset:
    """Some rows of a table, by the values of columns, and what is asked of them."""

    title: str
    where: Mapping[str, str] = field(default_factory=dict)
    """The value of each named column, or values with "|" between; empty: the column is empty or
    missing."""
    error: float | None = None
    """Mean error of the step time, at most."""
    tau: float | None = None
    """At least."""
    peak_error: float | None = None
    """Mean error of the peak, at most."""
    is_left_out: bool = False
    """Whether subsets, or intervals, of which something is asked leave some of these rows out."""

    def of(self, rows: Sequence[JudgedRow]) -> list[JudgedRow]:
        """The described rows that have these values."""
        wanted = {LACKS: "", **self.where}.items()
        return [
            row
            for row in rows
            if all((row.columns.get(name) or "") in to.split("|") for name, to in wanted)
        ]

    def asked(self, figures: RowFigures) -> str:
        """What is asked in words, with a mark where it is not reached."""
        each = (
            (self.error, figures.error, "{:.0%}", 1),
            (self.tau, figures.tau, "tau {:.1f}", -1),
            (self.peak_error, figures.peak_error, "memory {:.0%}", 1),
        )
        return ", ".join(
            f"{shown.format(bound)} ({_reached(found is not None and sign * (bound - found) >= 0)})"
            for bound, found, shown, sign in each
            if bound is not None
        )

    def is_recorded(self, figures: RowFigures) -> bool:
        """Whether the results keep the row; others are printed alone."""
        return self.is_left_out or bool(self.asked(figures))


def _reached(is_reached: bool) -> str:
    return "yes" if is_reached else "**no**"


_WIDER, _IN_BLOCKS = "bf16|fp8cs", "mxfp8|nvfp4"
_DEV: Final = "dev|dev_dgx_a100|dev_dgx_h100|dev_dgx_gb200"
_KINDS: Final = "mla|hybrid|mla mtp|mla mtp pipeline_layout recompute_modules"
"""What rows of latent attention, hybrids and multi-token prediction lacked before."""

SUBSETS: Final[Mapping[str, tuple[Subset, ...]]] = {
    "simumax_a100": (Subset(title="all", error=0.12, peak_error=0.03),),
    "megatron_golden": (
        Subset(title="12 layers and fewer", where={"hidden_size": "512"}, peak_error=0.10),
        Subset(title="7B", where={"hidden_size": "4096"}, peak_error=0.04),
    ),
    "megatron_golden_new": (
        Subset(
            title="latent attention, hybrids, MTP",
            where={"environment": _DEV, SAID_NOW: _KINDS},
            peak_error=0.10,
        ),
        Subset(
            title="the same of lts_dgx_a100, whose figure is below the model's weights",
            where={"environment": "lts_dgx_a100", SAID_NOW: _KINDS},
            is_left_out=True,
        ),
        Subset(title="experts without gate", where={SAID_NOW: "ungated_experts"}, peak_error=0.10),
    ),
    "bridge_recipes_2026": (
        Subset(title="all", where={BLOCKS: _WIDER, SAID_NOW: ""}, error=0.14),
        Subset(title="dense", where={BLOCKS: _WIDER, SAID_NOW: "", "num_experts": ""}),
        Subset(title="experts", where={BLOCKS: _WIDER, SAID_NOW: "", "num_experts": "128"}),
        Subset(
            title="not in moe_recipes, which chose constants",
            where={BLOCKS: _WIDER, SAID_NOW: "", "in_moe_recipes": "0"},
        ),
        Subset(title="mxfp8 and nvfp4", where={BLOCKS: _IN_BLOCKS, SAID_NOW: ""}, error=0.18),
        Subset(title="mxfp8", where={BLOCKS: "mxfp8", SAID_NOW: ""}),
        Subset(title="nvfp4", where={BLOCKS: "nvfp4", SAID_NOW: ""}),
        Subset(
            title="mxfp8 and nvfp4, not in moe_recipes",
            where={BLOCKS: _IN_BLOCKS, SAID_NOW: "", "in_moe_recipes": "0"},
        ),
        Subset(
            title="DeepSeek-V3 and Nemotron-3 Nano, all precisions",
            where={"model": "DeepSeekV3|Nemotron_3_Nano"},
            error=0.20,
        ),
        Subset(title="DeepSeek-V3", where={"model": "DeepSeekV3"}),
        Subset(title="Nemotron-3 Nano", where={"model": "Nemotron_3_Nano"}),
        Subset(
            title="GPT-OSS 120B, modules recomputed",
            where={SAID_NOW: "recompute_modules"},
            is_left_out=True,
        ),
        Subset(title="release 26.08", where={"release": "26.08"}),
    ),
    "torchtitan_benchmarks": (Subset(title="all", error=0.12, peak_error=0.18),),
    "primus_schedules": (
        Subset(title="all", tau=0.8, peak_error=0.10),
        Subset(title="Llama 2 7B, half", where={"model": "llama2-7b-16-layers"}),
        Subset(title="Qwen3 235B, chose a constant", where={"model": "qwen3-235b-a22b"}),
    ),
    "qwen3_235b_jobs": (
        Subset(title="all", error=0.15),
        Subset(
            title="layout alone differs",
            where={
                "dispatcher": "alltoall",
                "overlap": "",
                "global_batch_size": "2048",
                "device": "H800",
            },
            tau=0.7,
        ),
    ),
    "nanotron_h100": (
        Subset(title="all", is_left_out=True),
        Subset(title="3B near the best", where={"model": "llama-3B", NEAR: "1"}),
        Subset(title="8B near the best", where={"model": "llama-8B", NEAR: "1"}),
    ),
    "mpt_fsdp_a100": (Subset(title="all", error=0.15),),
    "moe_recipes": (
        Subset(title="all"),
        Subset(title="newest", where={NEWEST: "1"}, error=0.25),
    ),
}
"""The subsets of tables that are judged; of other tables all described rows."""

OF_INTERVALS: Final[Mapping[str, Mapping[str, str]]] = {"nanotron_h100": {NEAR: "1"}}
"""Rows on which the intervals of a table are judged, where these are not all."""

_A100: Final = ("vtrain_a100_small", "vtrain_a100_multi", "published_recipes", "simumax_a100")
SHARED: Final = (
    (0.95, (*_A100, "mpt_fsdp_a100"), (*_A100, "mpt_fsdp_a100")),
    (0.95, ("qwen3_235b_jobs",), (*_A100[1:], "primus_schedules")),
    (0.90, ("bridge_recipes_2026",), ("moe_recipes",)),
)
"""Shares of the prior's spread: how many of the choosing rows are to hold, the tables that are
judged, and those that choose, without the judged one. Rows of bridge_recipes_2026 that are in
moe_recipes do not count here."""

HEADER: Final = (
    "table, rows",
    "rows",
    "asked",
    "time: error",
    "signed",
    "tau in cells",
    "95 % hold",
    "width",
    "peaks",
    "memory: error",
    "signed",
    "GiB",
    "80 % hold",
)
SHARES_HEADER: Final = ("table", "rows", "share", "95 % hold", "width")
PRECISIONS_HEADER: Final = ("precision", "machine", "recipes", "mean error", "signed", "tau")


def main() -> None:
    """Prints the tables of figures and of choices, and records them where that is asked for."""
    asked = _arguments()
    tables = dict(read_folder(asked.tables, asked.only.split(",") if asked.only else ()))
    figures, rows, recorded = {}, [], []
    before: Mapping[str, Any] = json.loads(asked.before.read_text()) if asked.before else {}
    for title, subset, chosen in judged_subsets(tables):
        figures[title] = found = RowFigures.of(chosen)
        rows.append(_row(title, subset.asked(found), found, before.get("figures", {}).get(title)))
        if subset.is_recorded(found):
            recorded.append(rows[-1])
        for line in furthest(chosen, asked.worst):
            print(line)
    scores = {name: ChoiceScore.of(own) for name, own in tables.items() if name not in UNTIMED}
    choices = score_rows(scores, before.get("scores", {}))
    domains = domain_levels.domain_rows(asked.tables)
    shares = shares_rows(tables)
    text = _section(recorded, intervals_rows(tables), shares, domains, choices, asked.note)
    print(text)
    for header, every in (
        (HEADER, rows),
        (SHARES_HEADER, shares),
        (domain_levels.HEADER, domains),
        (PRECISIONS_HEADER, precision_rows(tables.get("bridge_recipes_2026", ()))),
    ):
        print(f"{table(header, every)}\n")
    if asked.save:
        kept = {
            "figures": {title: asdict(each) for title, each in figures.items()},
            "scores": {name: asdict(score) for name, score in scores.items()},
        }
        asked.save.write_text(json.dumps(kept))
    if asked.record:
        record("Tables", text)


def judged_subsets(
    tables: Mapping[str, Sequence[JudgedRow]],
) -> Iterator[tuple[str, Subset, list[JudgedRow]]]:
    """Titles, subsets and rows of what is judged; rows that are not described are apart."""
    for name, rows in tables.items():
        every = [_untimed(row) for row in rows] if name in UNTIMED else rows
        subsets = SUBSETS.get(name, (Subset(title="all"),))
        found = [(each, each.of(every)) for each in subsets]
        apart = [row for row in every if not row.is_described]
        is_asked = any(each.asked(RowFigures(rows=0)) for each in subsets)
        lacking = Subset(title=f"named in `{LACKS}`", is_left_out=is_asked)
        for subset, chosen in (*found, (lacking, apart)):
            if chosen:
                yield f"{name}: {subset.title}", subset, chosen


def _untimed(row: JudgedRow) -> JudgedRow:
    return replace(row, step_time_s=None)


def intervals_rows(tables: Mapping[str, Sequence[JudgedRow]]) -> list[tuple[str, ...]]:
    """Held intervals and their widths by table, with what is asked, and all tables together."""
    rows, every = [], []
    for name, own in tables.items():
        chosen = _of_intervals(name, own)
        found = RowFigures.of(chosen)
        if found.error is None:
            continue
        every += chosen
        widest = WIDTHS[found.error > ACCURATE]
        rows.append(
            (
                name,
                f"{found.rows}",
                f"{found.error:.1%}",
                f"{found.held:.0%}",
                f"{found.width:.2f}",
                f"{widest} ({_reached((found.width or 0.0) <= widest)})",
            )
        )
    if every:
        found = RowFigures.of(every)
        is_held = HELD[0] <= (found.held or 0.0) <= HELD[1]
        all_held = f"{found.held:.1%} ({_reached(is_held)})"
        rows.append(("all", f"{found.rows}", f"{found.error:.1%}", all_held, "", ""))
    return rows


def shares_rows(tables: Mapping[str, Sequence[JudgedRow]]) -> list[tuple[str, ...]]:
    """For each table: the share of the prior's spread that others choose, and what it holds."""
    rows = []
    of_table = {name: _of_intervals(name, own) for name, own in tables.items()}
    for holding, judged_names, choosing in SHARED:
        for name in judged_names:
            judged = [
                row for row in of_table.get(name, ()) if row.columns.get("in_moe_recipes") != "1"
            ]
            others = [
                row.least_share
                for other in choosing
                if other != name
                for row in of_table.get(other, ())
            ]
            if others and judged:
                share = float(np.quantile(others, holding, method="lower"))
                scaled = [replace(r, log_sd=r.log_sd * share / r.share) for r in judged]
                found = RowFigures.of(scaled)
                rows.append(
                    (
                        name,
                        f"{len(judged)}",
                        f"{share:.2f}",
                        f"{found.held:.0%}",
                        f"{found.width:.2f}",
                    )
                )
    return rows


def precision_rows(rows: Sequence[JudgedRow]) -> list[tuple[str, ...]]:
    """Recipes by precision and machine; tau is over all recipes of the machine."""
    groups: dict[tuple[str, str], list[JudgedRow]] = {}
    for row in rows:
        if row.is_described and row.columns.get(BLOCKS):
            key = row.columns[BLOCKS], row.columns["cluster"]
            groups.setdefault(key, []).append(replace(row, cell=key[1]))
    found = {key: RowFigures.of(own) for key, own in sorted(groups.items())}
    return [
        (
            *key,
            f"{each.rows}",
            f"{each.error:.1%}",
            f"{each.signed:+.1%}",
            "" if each.tau is None else f"{each.tau:.2f}",
        )
        for key, each in found.items()
    ]


def _of_intervals(name: str, rows: Sequence[JudgedRow]) -> list[JudgedRow]:
    """The rows of a table on which its intervals are judged."""
    chosen = Subset(title=name, where=OF_INTERVALS.get(name, {})).of(rows)
    return [row for row in chosen if row.step_time_s is not None and name not in UNTIMED]


def furthest(rows: Sequence[JudgedRow], count: int) -> Iterator[str]:
    """Lines about the rows whose step times, and whose peaks, are furthest off."""
    timed = [row for row in rows if row.step_time_s is not None]
    for row in sorted(timed, key=lambda row: -abs(row.time_error))[:count]:
        yield f"{row.step_time_s:9.3f} s  {row.time_error:+5.0%}  {row.cell}  {row.layout}"
    peaks = [row for row in rows if row.peak_bytes is not None]
    for row in sorted(peaks, key=lambda row: -abs(row.peak_error))[:count]:
        gib = (row.peak_bytes or 0.0) / GIB
        yield f"{gib:7.2f} GiB  {row.peak_error:+5.0%}  {row.cell}  {row.layout}"


def _row(title: str, asked: str, found: RowFigures, before: Figures | None) -> tuple[str, ...]:
    now = asdict(found)

    def shown(name: str, pattern: str) -> str:
        each = [now[name]] if before is None else [before.get(name), now[name]]
        if now[name] is None:
            return ""
        return ", ".join("-" if value is None else pattern.format(value) for value in each)

    return (
        title,
        f"{found.rows or ''}",
        asked,
        shown("error", "{:.1%}"),
        shown("signed", "{:+.1%}"),
        shown("tau", "{:.2f}"),
        shown("held", "{:.0%}"),
        shown("width", "{:.2f}"),
        f"{found.peaks or ''}",
        shown("peak_error", "{:.1%}"),
        shown("peak_signed", "{:+.1%}"),
        shown("peak_gib", "{:.2f}"),
        shown("peaks_held", "{:.0%}"),
    )


def score_rows(
    scores: Mapping[str, ChoiceScore], before: Mapping[str, Mapping[str, int]]
) -> list[tuple[str, ...]]:
    """A row a table with cells that count, and one of all together."""
    pairs = [
        (name, ChoiceScore(**before[name]) if name in before else None, score)
        for name, score in scores.items()
        if score.cells
    ]
    earlier = [each for _, each, _ in pairs if each]
    whole = sum((score for _, _, score in pairs), start=ChoiceScore())
    pairs.append(("all", sum(earlier, start=ChoiceScore()) if earlier else None, whole))
    rows = []
    for name, old, new in pairs:
        known = [each for each in (old, new) if each and each.cells]
        first = ", ".join(f"{each.first / each.cells:.1%}" for each in known)
        three = ", ".join(f"{each.first_three / each.cells:.1%}" for each in known)
        rows.append((name, f"{new.cells}", first, three))
    return rows


def _section(
    rows: list[tuple[str, ...]],
    intervals: list[tuple[str, ...]],
    shares: list[tuple[str, ...]],
    domains: list[tuple[str, ...]],
    scores: list[tuple[str, ...]],
    note: str,
) -> str:
    how = "; ".join(filter(None, (describe_machine("numpy", "scipy"), note)))
    widths = ("table", "rows", "mean error", "95 % hold", "width", "asked")
    choices = ("table", "cells", "first", "one of the first three")
    held = sorted((int(row[3].removesuffix("%")), row[0]) for row in shares)
    least = f"{held[0][0]}% ({held[0][1]}) to {held[-1][0]}%" if held else "-"
    domains_of = [
        f"{model}, {count} rows: {level} ({node}; {trays})"
        for model, count, node, level, trays in domains
        if model in DOMAINS
    ]
    return f"""`make bench-tables TABLES=DIR`; {how}. Cold: only layout, model, cluster and trainer are known. Two figures in a field are before and now. *Width*: median of upper over lower end of the 95 % interval. Rows named in `{LACKS}` have what the estimates cannot know; no other row counts them. Here are the rows of which something is asked, and those that these leave out; a run prints more. Of {" and ".join(UNTIMED)} the peaks alone count: their step times are of deterministic kernels.

{table(HEADER, rows)}

### Intervals of the step time

Asked: {HELD[0]:.0%} to {HELD[1]:.0%} of all hold; width {WIDTHS[0]} at most where the mean error is up to {ACCURATE:.0%}, else {WIDTHS[1]}. Of nanotron_h100 rows within {NEAR_BEST} times the best of their cell count.

{table(widths, intervals)}

With the share of the prior's spread that other tables of the same trainers choose (with it {SHARED[0][0]:.0%} of their rows hold, of recipes of Megatron-Bridge {SHARED[-1][0]:.0%}), of the intervals of a table {least} hold.

### Domains of nodes

Mean error on machines with NVLink domains, with the domain as a level (as a node; trays alone): {", ".join(domains_of)}. Asked of Qwen3 30B with the domain as a level: 21 % at most.

### First choices

How often the layout that is predicted first, or one of the first three, is within {FIRST_CHOICE:.0%} of the best; cells with {LEAST_LAYOUTS} measured layouts or more.

{table(choices, scores)}
"""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=Path, required=True, help="folder of tables")
    parser.add_argument("--only", default="", metavar="TABLE[,TABLE...]", help="only these tables")
    parser.add_argument("--worst", type=int, default=0, help="rows to print of each subset")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the figures as JSON")
    parser.add_argument("--before", type=Path, metavar="FILE", help="figures to print beside these")
    parser.add_argument("--note", default="", help="a few words for the record")
    parser.add_argument("--record", action="store_true", help="write RESULTS.md")
    asked = parser.parse_args()
    if not asked.tables.is_dir():
        parser.error(f"--tables {asked.tables} is no folder")
    return asked


if __name__ == "__main__":
    sys.exit(main())
