"""The service under load, over HTTP, in processes of its own: pages, outcomes, live events, start.

Run as `make bench-service`, or `python -m benchmarks.bench_service --record`, on a machine with
nothing else on it. `--only` chooses a part. `--record` writes a section of `benchmarks/RESULTS.md`
for each part.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.arguments import count, refuse
from benchmarks.results_file import describe_machine, record, table
from benchmarks.service.large_leaderboard import (
    LARGE_LEADERBOARD_NOTES,
    measure_large_leaderboard,
)
from benchmarks.service.live_service import WaitedInVainError
from benchmarks.service.service_flood import FLOOD_NOTES, measure_flood
from benchmarks.service.service_leaderboard import LEADERBOARD_NOTES, measure_leaderboard
from benchmarks.service.service_load import LOAD_NOTES, measure_load
from benchmarks.service.service_start import measure_start
from benchmarks.trainer.trainer_table import Figure

SCALE: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkPart:
    """A part of the benchmark."""

    title: str
    """Of its section."""
    measure: Callable[[Path, int], list[Figure]]
    """Given an empty folder and a scale, of which `SCALE` is the whole."""
    notes: str
    """What a reader of its figures must know."""


PARTS: Final[dict[str, BenchmarkPart]] = {
    "leaderboard": BenchmarkPart(
        title="Pages of the leaderboard", measure=measure_leaderboard, notes=LEADERBOARD_NOTES
    ),
    "large": BenchmarkPart(
        title="Lists of a campaign of 100,000 layouts",
        measure=measure_large_leaderboard,
        notes=LARGE_LEADERBOARD_NOTES,
    ),
    "load": BenchmarkPart(title="Outcomes and live events", measure=measure_load, notes=LOAD_NOTES),
    "flood": BenchmarkPart(
        title="One submitter floods the service", measure=measure_flood, notes=FLOOD_NOTES
    ),
    "start": BenchmarkPart(
        title="An api process",
        measure=measure_start,
        notes="On a database that is there already, everything in the page cache.",
    ),
}


def main() -> None:
    """Prints, and records, what was asked for."""
    arguments = _arguments()
    if arguments.record and arguments.scale != SCALE:
        refuse("bench-service", "--record is for the whole of a part; leave --scale away")
    machine = describe_machine("fastapi", "sqlalchemy", "psycopg")
    print(machine, end="\n\n", flush=True)
    try:
        for name in arguments.only or PARTS:
            figures = measure(name, arguments.scale)
            if arguments.record:
                record(PARTS[name].title, _section(PARTS[name], machine, figures))
    except WaitedInVainError as error:
        sys.exit(str(error))


def measure(name: str, scale: int) -> list[Figure]:
    """Measures a part, and prints what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        figures = PARTS[name].measure(Path(folder), scale)
    for figure in figures:
        print(" | ".join(figure.cells()), flush=True)
    return figures


def _section(part: BenchmarkPart, machine: str, figures: Sequence[Figure]) -> str:
    """The figures of which something is asked; the others are printed alone."""
    rows = [figure.cells() for figure in figures if figure.asked]
    numbers = table(("figure", "asked", "measured", "reached"), rows)
    return f"`make bench-service`; {machine}.\n\n{numbers}\n\n{part.notes}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-service", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(PARTS), help="repeatable")
    parser.add_argument(
        "--scale", type=count, default=SCALE, help=f"how much of it; {SCALE} is all [{SCALE}]"
    )
    parser.add_argument("--record", action="store_true", help="write benchmarks/RESULTS.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
