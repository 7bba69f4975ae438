"""The study of Frontier: writes `docs/frontier-study.md` and its figures.

Run as `make frontier-study TABLES=DIR`, or `python -m benchmarks.frontier_study.study`; `--quick`
is smaller in every part, `--only memory,curves` runs some parts. DIR holds published measurements;
without it, what needs them is left out. Simulated steps and finished searches are kept in
`build/frontier-study/`, so that a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from benchmarks.arguments import count
from benchmarks.frontier_study.study_axonn import axonn
from benchmarks.frontier_study.study_campaigns import campaigns, savings
from benchmarks.frontier_study.study_curves import curves, throughput
from benchmarks.frontier_study.study_memory import memory
from benchmarks.frontier_study.study_page import PAGE, StudyPart
from benchmarks.frontier_study.study_runs import StudyEffort
from benchmarks.frontier_study.study_scaling import scaling
from benchmarks.frontier_study.study_search import importance, search

PARTS: Final[Mapping[str, Callable[[StudyEffort, Path | None], StudyPart]]] = {
    "memory": memory,
    "curves": curves,
    "throughput": throughput,
    "scaling": scaling,
    "campaigns": campaigns,
    "savings": savings,
    "search": search,
    "axonn": axonn,
    "importance": importance,
}
"""By name, in the order of the page."""


def main() -> None:
    """Runs the parts that are asked for, and writes each when it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=Path, help="folder with published measurements")
    parser.add_argument("--quick", action="store_true", help="less of everything, in ten minutes")
    parser.add_argument("--only", help=f"some parts: {','.join(PARTS)}")
    parser.add_argument("--jobs", type=count, default=2, help="processes side by side")
    asked = parser.parse_args()
    effort = StudyEffort(is_quick=asked.quick, jobs=asked.jobs)
    chosen = asked.only.split(",") if asked.only else list(PARTS)
    if unknown := [name for name in chosen if name not in PARTS]:
        sys.exit(f"--only {','.join(unknown)}: choose from {', '.join(PARTS)}")
    for name in chosen:
        began = time.perf_counter()
        part = PARTS[name](effort, asked.tables)
        options = (" QUICK=1" if asked.quick else "") + (" TABLES=DIR" if asked.tables else "")
        part.write(f"`make frontier-study{options}`, part `{name}`")
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
