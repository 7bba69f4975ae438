"""All strategies on recorded and simulated measurements, and the estimates alone.

Run as `make bench-search TABLES=DIR`, or `python -m benchmarks.bench_search --tables DIR --record`,
on a machine that does nothing else. It takes ten minutes on two cores (`--quick`: one minute). DIR
holds measurement tables; our own table, of `tiny` on two CPU cores, is always searched. Results are
printed as they come; `--record` writes the section "Search" of `benchmarks/RESULTS.md` and the
plots in `docs/plots/`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.results_file import describe_machine, record, table
from benchmarks.search.search_exams import EXAMS, cold_exam, exam_promises, exams_table, sit
from benchmarks.search.search_figures import (
    Promise,
    landscape_table,
    local_promises,
    promises_table,
    stress_promises,
    sweep_promises,
)
from benchmarks.search.search_plots import draw
from benchmarks.search.search_runs import (
    Effort,
    Landscape,
    read_tables,
    search_stress,
    search_table,
)
from benchmarks.search.search_speed import NUM_TOLD, measure_speed
from search_spaces.tables import MeasurementTable, read_table

STRATEGIES: Final = ("guided", "model-only", "deephyper", "random")
LOCAL: Final = Path(__file__).parent / "data" / "tiny_local_cpu.csv"
SWEEP: Final = "nanotron_h100"
QUICK: Final = Effort(seeds=3)
MOST_SEARCH_S: Final = 0.3


def main() -> None:
    """Prints the section, and records it where that is asked for."""
    asked = _arguments()
    started = time.monotonic()
    effort = QUICK if asked.quick else Effort(seeds=asked.seeds)
    bench = _Bench(strategies=asked.strategies.split(","), effort=effort, jobs=asked.jobs)
    tables = {} if asked.tables is None else {p.stem: t for p, t in read_tables(asked.tables)}
    if LOCAL.exists():
        bench.search("tiny_local_cpu", "our own probes of `tiny` on two cores", read_table(LOCAL))
    for name, read in tables.items():
        bench.search(name, f"{len(read.cells)} cells, {len(read.rows)} rows", read)
    bench.stress()
    bench.estimates(tables | ({LOCAL.stem: read_table(LOCAL)} if LOCAL.exists() else {}))
    bench.speed()
    section = bench.section(time.monotonic() - started)
    print(bench.promises)
    if asked.record:
        record("Search", section)
        for landscape in bench.landscapes:
            print(f"drawn: {draw(landscape)}")


class _Bench:
    """What has been run so far, and its part of the section."""

    def __init__(self, *, strategies: Sequence[str], effort: Effort, jobs: int) -> None:
        self.landscapes: list[Landscape] = []
        self._strategies = strategies
        self._effort = effort
        self._jobs = jobs
        self._promises: list[Promise] = []
        self._parts: list[str] = []

    def search(self, name: str, about: str, read: MeasurementTable) -> None:
        """A recorded table, cold, one probe at a time."""
        searched = search_table(
            name, about, read.cells, self._strategies, self._effort, jobs=self._jobs
        )
        promised = {SWEEP: sweep_promises, LOCAL.stem: local_promises}.get(name)
        self._landscape(searched, [] if promised is None else promised(searched))

    def stress(self) -> None:
        """The simulated landscape on which the estimates are wrong in form."""
        searched = search_stress(self._strategies, self._effort, jobs=self._jobs)
        self._landscape(searched, stress_promises(searched))

    def _landscape(self, searched: Landscape, promises: list[Promise]) -> None:
        self.landscapes.append(searched)
        self._promises += promises
        self._part(f"### {searched.name}\n\n{searched.about}.\n\n{landscape_table(searched)}")

    def estimates(self, tables: dict[str, MeasurementTable]) -> None:
        """The estimates alone: every table by the priors, and the exams whose tables are there."""
        exams = [exam for exam in EXAMS if set(exam.tables) <= set(tables)]
        reports = {}
        for exam in (*exams, *(cold_exam(name) for name in tables)):
            reports[exam.title] = sit(exam, tables)
            self._promises += exam_promises(exam, reports[exam.title])
        if reports:
            self._part(f"### The estimates alone\n\n{exams_table(reports)}")

    def speed(self) -> None:
        """How long a search thinks, where there is much to think of."""
        rows = []
        for strategy in self._strategies:
            speed = measure_speed(strategy)
            rows.append(
                (strategy, f"{speed.num_legal:,}", f"{speed.probe_s:.3f}", f"{speed.rebuild_s:.2f}")
            )
            if strategy == "guided":
                self._promises.append(
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
        self._part(f"### Seconds of search\n\n{table(header, rows)}")

    def _part(self, text: str) -> None:
        print(f"{text}\n", flush=True)
        self._parts.append(text)

    @property
    def promises(self) -> str:
        """What was asked beside what was measured."""
        return promises_table(self._promises)

    def section(self, took_s: float) -> str:
        """The section of the results, promises first."""
        effort = self._effort
        intro = (
            f"`make bench-search TABLES=DIR`; {describe_machine('numpy', 'scikit-learn', 'deephyper')}. "
            f"{took_s / 60:.0f} minutes with {self._jobs} jobs. {effort.seeds} seeds a cell "
            f"(fewer where a table has more than 12 cells) and as many stress landscapes, 60 probes, cold, one pending unless said otherwise. A run that "
            "misses counts 61."
        )
        return "\n\n".join([intro, self.promises, *self._parts])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=Path, help="folder of measurement tables")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--seeds", type=int, default=Effort().seeds)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="three seeds, to see that it works")
    parser.add_argument("--record", action="store_true", help="write RESULTS.md and the plots")
    asked = parser.parse_args()
    if asked.tables is not None and not asked.tables.is_dir():
        parser.error(f"--tables {asked.tables} is no folder")
    return asked


if __name__ == "__main__":
    sys.exit(main())
