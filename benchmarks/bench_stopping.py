"""What stopping probes early saves and costs: simulated noise on recorded medians.

Run as `make bench-stopping TABLES=DIR`, or `python -m benchmarks.bench_stopping --tables DIR
--record`. It takes two minutes on one core. DIR holds measurement tables; our own table, of `tiny`
on two CPU cores, is always included. Probes end by the code that the trainer runs. `--record`
writes the section "Stopping" of RESULTS.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Final

from benchmarks.results_file import describe_machine, record, table
from benchmarks.search.search_runs import read_tables, searchable
from layout_tuner.predictions.statistics.early_stop import LEAST_TIMED, shows_enough
from layout_tuner.predictions.statistics.pooling import pooled_reach
from layout_tuner.predictions.statistics.run_spread import RunSpread
from layout_tuner.search_spaces.probe_defaults import DEFAULT_ITERATIONS, DEFAULT_WARMUP
from layout_tuner.search_spaces.tables import TableCell, read_table

LOCAL: Final = Path(__file__).parent / "data" / "tiny_local_cpu.csv"
MOST_LAYOUTS: Final = 30
"""That a campaign tries; all of them where the cell has fewer."""
EQUALS: Final = 10_000
"""Probes of a layout that is exactly as good as the best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """How step times of one layout differ; all by their logarithms, normal."""

    iterations: float
    """Standard deviation between iterations of a run."""
    runs: float = 0.0
    """Standard deviation between runs."""
    carried: float = 0.0
    """Correlation of an iteration with the one before."""

    def run(self, step_time_s: float, dice: Random) -> list[float]:
        """The timed iterations of a probe that nothing stops."""
        level = math.log(step_time_s) + dice.gauss(0.0, self.runs)
        fresh = self.iterations * math.sqrt(1.0 - self.carried**2)
        off = [dice.gauss(0.0, self.iterations)]
        while len(off) < DEFAULT_ITERATIONS:
            off.append(self.carried * off[-1] + dice.gauss(0.0, fresh))
        return [math.exp(level + each) for each in off]


NOISES: Final = tuple(
    Noise(iterations=of_one, runs=runs) for of_one, runs in ((0.02, 0), (0.02, 0.01), (0.05, 0.02))
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """One campaign, with stopping and without, under the same noise."""

    asked: int
    """Iterations without stopping, warm-up included."""
    spent: int
    """Iterations with it."""
    loss: float
    """How much slower than the best that was tried the winner is, by the recorded step times."""
    loss_in_full: float
    """The same without stopping."""
    as_good: tuple[int, int]
    """Probes of layouts recorded at least as good as the best so far, and how many stopped."""


def to_beat_s(timed: Sequence[float]) -> float:
    """The step time to beat, of a best that was run once: where its throughput's interval begins.

    The service takes it from the leaderboard's standing, which comes from the same estimate.
    """
    return median(timed) * math.exp(pooled_reach([timed], RunSpread.prior()))


def timed_until_stopped(timed: Sequence[float], than_s: float) -> int:
    """After how many timed iterations the probe ends; nobody looks after the last."""
    looks = range(LEAST_TIMED, len(timed))
    return next((done for done in looks if shows_enough(timed[:done], than_s)), len(timed))


def campaign(step_times_s: Sequence[float], noise: Noise, dice: Random) -> Stopped:
    """Probes these layouts one after the other; the best is the best median of a full probe."""
    runs = [noise.run(step_time_s, dice) for step_time_s in step_times_s]
    best, timed, as_good, stopped = 0, len(runs[0]), 0, 0
    than_s = to_beat_s(runs[best])
    for place, run in enumerate(runs[1:], start=1):
        done = timed_until_stopped(run, than_s)
        timed += done
        if step_times_s[place] <= step_times_s[best]:
            as_good += 1
            stopped += done < len(run)
        if done == len(run) and median(run) < median(runs[best]):
            best = place
            than_s = to_beat_s(run)
    in_full = min(range(len(runs)), key=lambda place: median(runs[place]))
    return Stopped(
        asked=len(runs) * (DEFAULT_WARMUP + DEFAULT_ITERATIONS),
        spent=len(runs) * DEFAULT_WARMUP + timed,
        loss=step_times_s[best] / min(step_times_s) - 1.0,
        loss_in_full=step_times_s[in_full] / min(step_times_s) - 1.0,
        as_good=(as_good, stopped),
    )


def campaigns(cells: Sequence[TableCell], noise: Noise, seeds: int) -> Iterator[Stopped]:
    """Every cell with every seed, its layouts in random order."""
    for cell, seed in product(cells, range(seeds)):
        rows = [row.step_time_s for row in cell.merged if row.step_time_s is not None]
        dice = Random(f"{cell.key} {seed}")
        if rows:
            yield campaign(dice.sample(rows, min(len(rows), MOST_LAYOUTS)), noise, dice)


def campaigns_row(name: str, cells: Sequence[TableCell], seeds: int) -> tuple[str, ...]:
    """A table's row of the section; its cells have a figure for each noise of `NOISES`."""
    ran = [list(campaigns(cells, noise, seeds)) for noise in NOISES]
    figures = zip(*(_figures(each) for each in ran), strict=True)
    return (name, f"{len(ran[0]):,}", *(" / ".join(each) for each in figures))


def _figures(ran: Sequence[Stopped]) -> tuple[str, ...]:
    as_good, stopped = (sum(counts) for counts in zip(*(each.as_good for each in ran), strict=True))
    return (
        f"{1 - sum(each.spent for each in ran) / sum(each.asked for each in ran):.1%}",
        f"{fmean(each.loss for each in ran):.2%}",
        f"{fmean(each.loss_in_full for each in ran):.2%}",
        f"{stopped:,} of {as_good:,}",
    )


def share_stopped(noise: Noise, *, is_known: bool, probes: int = EQUALS) -> float:
    """Of probes of a layout exactly as good as the best, which is known or was measured once."""
    dice = Random(f"{noise} {is_known}")
    stopped = 0
    for _ in range(probes):
        than_s = 1.0 if is_known else to_beat_s(noise.run(1.0, dice))
        stopped += timed_until_stopped(noise.run(1.0, dice), than_s) < DEFAULT_ITERATIONS
    return stopped / probes


def equals_row(noise: Noise) -> tuple[str, ...]:
    """How often an equal layout is stopped."""
    shares = [f"{share_stopped(noise, is_known=is_known):.1%}" for is_known in (True, False)]
    return (f"{noise.iterations:.0%}, {noise.runs:.0%}", f"{noise.carried:g}", *shares)


def section(tables: dict[str, Sequence[TableCell]], seeds: int) -> str:
    """The section of the results."""
    ran = [campaigns_row(name, cells, seeds) for name, cells in tables.items()]
    header = ("table", "campaigns", "saved", "loss", "loss in full", "stopped as good")
    noises = " / ".join(f"{noise.iterations:.0%}, {noise.runs:.0%}" for noise in NOISES)
    equals = [equals_row(noise) for noise in (*NOISES, Noise(iterations=0.02, carried=0.5))]
    equals_header = ("noise", "autocorrelation", "best known", "best measured once")
    return f"""`make bench-stopping TABLES=DIR`; {describe_machine("numpy")}. {seeds} seeds a cell; up to {MOST_LAYOUTS} of its layouts in random order, {DEFAULT_WARMUP} warm-up and {DEFAULT_ITERATIONS} timed iterations each. Simulated noise between iterations, and between runs: {noises} (normal on the logarithm). *Saved*: of all iterations, warm-up included. *Loss*: how much slower than the best that was tried the winner is, on average; *in full*: if nothing is stopped. *Stopped as good*: of the layouts at least as good as the best so far.

{table(header, ran)}

How often a layout exactly as good as the best is stopped, where the best's step time is known (5 % are allowed), and where it was measured once; {EQUALS:,} probes each.

{table(equals_header, equals)}
"""


def main() -> None:
    """Prints the section, and records it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=Path, help="folder of measurement tables")
    parser.add_argument("--seeds", type=int, default=20, help="of each cell")
    parser.add_argument("--record", action="store_true", help="write RESULTS.md")
    asked = parser.parse_args()
    tables: dict[str, Sequence[TableCell]] = {LOCAL.stem: read_table(LOCAL).cells}
    if asked.tables is not None and not asked.tables.is_dir():
        parser.error(f"--tables {asked.tables} is no folder")
    if asked.tables is not None:
        tables |= {p.stem: tuple(searchable(t.cells)) for p, t in read_tables(asked.tables)}
    text = section(tables, asked.seeds)
    print(text)
    if asked.record:
        record("Stopping", text)


if __name__ == "__main__":
    main()
