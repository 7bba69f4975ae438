"""All strategies on recorded and simulated measurements, and the estimates alone.

Run as `make bench-search TABLES=DIR`, or `python -m benchmarks.bench_search --tables DIR --record`,
on a machine that does nothing else. DIR holds measurement tables; our own table, of `tiny` on two
CPU cores, is always searched. `--only first-probe,coverage` runs some parts, `--quick` all of them
with three seeds. Results are printed as they come; `--record` writes them, part by part, into the
section "Search" of `benchmarks/RESULTS.md`, and the plots into `docs/plots/`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.results_file import describe_machine, table
from benchmarks.search.search_cells import cells_table
from benchmarks.search.search_conditions import (
    eight_pending,
    first_probe,
    slow_node,
    slow_probe,
    wrong_constants,
)
from benchmarks.search.search_coverage import coverage
from benchmarks.search.search_exams import EXAMS, cold_exam, exam_promises, exams_table, sit
from benchmarks.search.search_figures import (
    RECORDED,
    STRATEGIES,
    landscape_row,
    landscape_table,
    local_promises,
    small_promises,
    stress_promises,
    sweep_promises,
)
from benchmarks.search.search_knobs import job_knobs
from benchmarks.search.search_known import known_cells
from benchmarks.search.search_large import frontier_175b
from benchmarks.search.search_plans import plans
from benchmarks.search.search_plots import draw
from benchmarks.search.search_recipes import near_top, recipes
from benchmarks.search.search_record import Part, Promise, SearchRecord, promises_table
from benchmarks.search.search_runs import (
    SIMULATED,
    Effort,
    Landscape,
    read_tables,
    search_simulated,
    search_table,
)
from benchmarks.search.search_speed import NUM_TOLD, measure_speed
from benchmarks.search.search_unknown import unknown_trainer
from layout_tuner.search_spaces.tables import MeasurementTable, read_table
from layout_tuner.tuner.replay.run import by_strategy

LOCAL: Final = Path(__file__).parent / "data" / "tiny_local_cpu.csv"
SWEEP: Final = "nanotron_h100"
NEED_SWEEP: Final = (
    "first-probe",
    "eight-pending",
    "known-cells",
    "slow-probe",
    "slow-node",
    "wrong-constants",
)
QUICK_SEEDS: Final = 3
INTRO: Final = (
    "`make bench-search TABLES=DIR`. By default 20 seeds a cell (fewer where a table has more than "
    "12 cells) and as many simulated landscapes, 60 probes, cold, one pending unless said "
    "otherwise. A run that misses counts 61. The Llama 3B and 8B cells of nanotron_h100 are the two "
    "halves: constants are chosen on one and judged on the other. A run also prints tables by cell, "
    "and those of the parts that only the table of promises names "
    "([what they measure](../docs/explanation/search.md#results-of-all-strategies))."
)
MOST_SEARCH_S: Final = 0.3


def main() -> None:
    """Prints the parts that are asked for, and records them where that is asked for."""
    asked = _arguments()
    effort = Effort(seeds=QUICK_SEEDS if asked.quick else asked.seeds, jobs=asked.jobs)
    tables = {} if asked.tables is None else {p.stem: t for p, t in read_tables(asked.tables)}
    if LOCAL.exists():
        tables = {LOCAL.stem: read_table(LOCAL), **tables}
    strategies = asked.strategies.split(",")
    bench = _Bench(
        strategies=strategies,
        effort=effort,
        tables=tables,
        folder=asked.tables,
    )
    chosen = asked.only.split(",") if asked.only else list(bench.parts)
    unknown = [name for name in chosen if name not in bench.parts]
    if unknown:
        sys.exit(f"--only {','.join(unknown)}: choose from {', '.join(bench.parts)}")
    machine = describe_machine("numpy", "scikit-learn", "deephyper")
    how = "; ".join(filter(None, (machine, f"{effort.seeds} seeds", asked.note)))
    section = SearchRecord(intro=INTRO, header=RECORDED, how=how)
    if asked.only:
        section = SearchRecord.read(INTRO, RECORDED)
    promises: list[Promise] = []
    for name in chosen:
        started = time.monotonic()
        part = bench.parts[name]()
        print("\n\n".join(filter(None, (f"### {part.title}", part.text, part.details))) + "\n")
        print(f"{how}; {(time.monotonic() - started) / 60:.1f} minutes\n", flush=True)
        promises += part.promises
        section.add(part, how)
        if asked.record:
            section.write()
    print(promises_table(promises))
    for landscape in bench.landscapes if asked.record else ():
        print(f"drawn: {draw(landscape)}")


class _Bench:
    """The parts of the section by name, each a function that runs it."""

    def __init__(
        self,
        *,
        strategies: Sequence[str],
        effort: Effort,
        tables: dict[str, MeasurementTable],
        folder: Path | None,
    ) -> None:
        self.landscapes: list[Landscape] = []
        self._strategies = strategies
        self._effort = effort
        self._tables = tables
        self.parts: dict[str, Callable[[], Part]] = {
            **{name: partial(self._search, name) for name in tables},
            **{name: partial(self._simulated, name) for name in SIMULATED},
            "first-probe": partial(first_probe, tables, effort),
            "eight-pending": partial(eight_pending, tables, effort),
            "known-cells": partial(known_cells, tables, effort),
            "slow-probe": partial(slow_probe, tables, effort),
            "slow-node": partial(slow_node, tables, effort),
            "wrong-constants": partial(wrong_constants, tables, effort),
            "unknown-trainer": partial(unknown_trainer, tables, effort),
            "plans": partial(plans, tables),
            "near-top": partial(near_top, tables),
            "recipes": partial(recipes, folder),
            "coverage": partial(coverage, tables, effort),
            "frontier-175b": partial(frontier_175b, effort),
            "job-knobs": partial(job_knobs, effort),
            "estimates": self._estimates,
            "speed": self._speed,
        }
        if SWEEP not in tables:
            for name in NEED_SWEEP:
                del self.parts[name]

    def _search(self, name: str) -> Part:
        """A recorded table, cold, one probe at a time."""
        read = self._tables[name]
        about = f"{len(read.cells)} cells, {len(read.rows)} rows"
        if name == LOCAL.stem:
            about = "our own probes of `tiny` on two cores"
        searched = search_table(name, about, read.cells, self._strategies, self._effort)
        promised = {
            SWEEP: sweep_promises,
            LOCAL.stem: local_promises,
            "vtrain_a100_small": small_promises,
        }.get(name)
        return self._landscape(searched, [] if promised is None else promised(searched))

    def _simulated(self, name: str) -> Part:
        """A simulated landscape on which the estimates are wrong in form."""
        searched = search_simulated(name, self._strategies, self._effort)
        promised = stress_promises(searched) if name == "stress" else []
        return self._landscape(searched, promised)

    def _landscape(self, searched: Landscape, promises: list[Promise]) -> Part:
        self.landscapes.append(searched)
        details = landscape_table(searched)
        if guided := by_strategy(searched.runs).get("guided"):
            details += f"\n\n`guided` by cell:\n\n{cells_table(guided)}"
        row = landscape_row(searched)
        return Part(title=searched.name, row=row, details=details, promises=tuple(promises))

    def _estimates(self) -> Part:
        """The estimates alone: every table by the priors, and the exams whose tables are there."""
        exams = [exam for exam in EXAMS if set(exam.tables) <= set(self._tables)]
        reports, promises = {}, []
        for exam in (*exams, *(cold_exam(name) for name in self._tables)):
            reports[exam.title] = sit(exam, self._tables)
            promises += exam_promises(exam, reports[exam.title])
        return Part(
            title="The estimates alone", text=exams_table(reports), promises=tuple(promises)
        )

    def _speed(self) -> Part:
        """How long a search thinks, where there is much to think of."""
        rows, promises = [], []
        for strategy in self._strategies:
            speed = measure_speed(strategy)
            rows.append(
                (strategy, f"{speed.num_legal:,}", f"{speed.probe_s:.3f}", f"{speed.rebuild_s:.2f}")
            )
            if strategy == "guided":
                promises.append(
                    Promise(
                        what=f"search seconds a probe, {speed.num_legal:,} layouts, {NUM_TOLD} told",
                        asked=f"{MOST_SEARCH_S}",
                        measured=speed.probe_s,
                        most=MOST_SEARCH_S,
                        shown="{:.3f}",
                    )
                )
        header = (
            "strategy",
            "legal layouts",
            "s a probe (tell, ask)",
            "s to rebuild from 500 tells",
        )
        return Part(title="Seconds of search", text=table(header, rows), promises=tuple(promises))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=Path, help="folder of measurement tables")
    parser.add_argument("--only", default="", metavar="PART[,PART...]", help="only these parts")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--seeds", type=int, default=Effort().seeds)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="three seeds, to see that it works")
    parser.add_argument("--note", default="", help="how it was run, as a few words for the record")
    parser.add_argument("--record", action="store_true", help="write RESULTS.md and the plots")
    asked = parser.parse_args()
    if asked.tables is not None and not asked.tables.is_dir():
        parser.error(f"--tables {asked.tables} is no folder")
    return asked


if __name__ == "__main__":
    sys.exit(main())
