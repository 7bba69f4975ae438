"""Whether the 95 % intervals of leaderboards hold the truth, and how wide they are: simulated runs.

Run as `make bench-intervals`, or `python -m benchmarks.bench_intervals --record`. It takes two
minutes on one core. The runs are simulated: their true spread is known, which no machine tells.
They are ranked, and their intervals computed, by the code of the leaderboard. `--record` writes the
section "Intervals" of RESULTS.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, product
from random import Random
from statistics import median
from typing import Final

from benchmarks.results_file import describe_machine, record, table
from layout_tuner.predictions.statistics.run_spread import RunSpread
from layout_tuner.results_db.leaderboard.intervals import Intervals, run_errors
from layout_tuner.results_db.leaderboard.rank_layouts import Leaderboard, RankingRules, rank_layouts

NUM_LAYOUTS: Final = 12
APART: Final = 0.02
"""Of the best layout's speed, from each layout to the next."""
BEST: Final = 3
"""Layouts that are repeated, by their first runs."""
SPREADS: Final = (0.01, 0.03, 0.10)
REPEATS: Final = (0, 1, 2, 4)
DISTURBED: Final = math.log(1.3)
"""How much slower a disturbed run is, as a logarithm."""
EARLIER: Final = 40
"""Repeats in earlier campaigns."""

_RULES: Final = RankingRules(
    objective="tokens_per_s",
    objectives=("tokens_per_s",),
    max_peak_memory_bytes=None,
    device_memory_bytes=None,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of leaderboard."""

    spread: float
    """True standard deviation of the logarithm of a run's step time."""
    repeats: int
    """Of each of the best layouts."""
    is_disturbed: bool = False
    """Whether one run, any of them, is slower by `DISTURBED`."""
    has_earlier: bool = False
    """Whether earlier campaigns on the same cluster repeated layouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedRun:
    """What ranking reads of a run."""

    id: int
    layout_key: str
    step_time_s: float
    tokens_per_s: float
    num_nodes: int = 1
    shortened: bool = False
    hfu: float | None = None
    others_share: float | None = None
    throttled: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderboardRow:
    """A row of a leaderboard, beside the truth."""

    holds: bool
    half_width: float
    """Half of the interval over the value; that of the logarithm where it is not symmetric."""
    is_first: bool
    is_disturbed: bool


def rows(kind: Kind, dice: Random) -> Iterator[LeaderboardRow]:
    """One leaderboard."""
    truth = {str(place): 1.0 / (1.0 - APART * place) for place in range(NUM_LAYOUTS)}
    ids = count(1)

    def run(key: str) -> SimulatedRun:
        seconds = truth[key] * math.exp(dice.gauss(0.0, kind.spread))
        return SimulatedRun(
            id=next(ids), layout_key=key, step_time_s=seconds, tokens_per_s=1 / seconds
        )

    runs = [run(key) for key in dice.sample(list(truth), NUM_LAYOUTS)]
    best = sorted(runs, key=lambda each: each.step_time_s)[:BEST]
    runs += [run(each.layout_key) for _ in range(kind.repeats) for each in best]
    disturbed = None
    if kind.is_disturbed:
        place = dice.randrange(len(runs))
        disturbed = runs[place].layout_key
        seconds = runs[place].step_time_s * math.exp(DISTURBED)
        runs[place] = replace(runs[place], step_time_s=seconds, tokens_per_s=1 / seconds)
    board = rank_layouts(runs, _RULES)
    intervals = intervals_of(board, runs, kind, dice)
    for layout in board.layouts:
        low, high = intervals.ends(layout)
        key = layout.first.layout_key
        yield LeaderboardRow(
            holds=low <= 1.0 / truth[key] <= high,
            half_width=math.sqrt(high / low) - 1.0,
            is_first=layout.rank == 1,
            is_disturbed=key == disturbed,
        )


def intervals_of(
    board: Leaderboard, runs: Sequence[SimulatedRun], kind: Kind, dice: Random
) -> Intervals:
    """Its intervals; ten equal iterations a run, so that only the spread of runs counts."""
    prior = RunSpread.prior()
    if kind.has_earlier:
        prior = prior.updated(
            [[math.exp(dice.gauss(0.0, kind.spread)) for _ in range(2)] for _ in range(EARLIER)]
        )
    timed = {run.id: [run.step_time_s] * 10 for run in runs}
    return Intervals(board, run_errors(board, prior), timed)


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedKind:
    """What leaderboards of one kind show; rows that were disturbed do not count."""

    kind: Kind
    holds: float
    """Share of the rows whose interval holds the truth."""
    first_holds: float
    """The same of the rows that are first."""
    half_width: float
    """Median."""
    num_rows: int


def judged(kind: Kind, boards: int) -> JudgedKind:
    """Leaderboards of one kind."""
    dice = Random(f"{kind}")
    found = [row for _ in range(boards) for row in rows(kind, dice) if not row.is_disturbed]
    first = [row for row in found if row.is_first]
    return JudgedKind(
        kind=kind,
        holds=sum(row.holds for row in found) / len(found),
        first_holds=sum(row.holds for row in first) / len(first),
        half_width=median(row.half_width for row in found),
        num_rows=len(found),
    )


def section(boards: int) -> str:
    """The section of the results."""
    kinds = [
        Kind(spread=spread, repeats=repeats, is_disturbed=is_disturbed)
        for spread, repeats, is_disturbed in product(SPREADS, REPEATS, (False, True))
    ]
    earlier = [Kind(spread=spread, repeats=0, has_earlier=True) for spread in SPREADS]
    each = [judged(kind, boards) for kind in kinds]
    every = sum(one.holds * one.num_rows for one in each) / sum(one.num_rows for one in each)
    lines = []
    for repeats, is_disturbed in product(REPEATS, (False, True)):
        alike = [
            one
            for one in each
            if (one.kind.repeats, one.kind.is_disturbed) == (repeats, is_disturbed)
        ]
        lines.append(
            (
                f"{repeats}{', one run disturbed' if is_disturbed else ''}",
                " / ".join(f"{one.holds:.1%}" for one in alike),
                " / ".join(f"{one.first_holds:.1%}" for one in alike),
                " / ".join(f"{one.half_width:.1%}" for one in alike),
            )
        )
    known = [judged(kind, boards) for kind in earlier]
    lines.append(
        (
            f"0, {EARLIER} earlier",
            " / ".join(f"{one.holds:.1%}" for one in known),
            "-",
            " / ".join(f"{one.half_width:.1%}" for one in known),
        )
    )
    over = " / ".join(f"{one.half_width / math.expm1(1.96 * one.kind.spread):.2f}" for one in known)
    header = ("repeats", "holds the truth", "the first row's", "half width")
    spreads = " / ".join(f"{spread:.0%}" for spread in SPREADS)
    return f"""`make bench-intervals`; {describe_machine("numpy")}. Simulated runs: {boards} leaderboards of each kind, {NUM_LAYOUTS} layouts {APART:.0%} apart; the best {BEST} by their first runs are repeated. The true standard deviation of runs is {spreads}. *Disturbed*: slower by 30 %; that layout's row does not count. *Half width*: median. *Earlier*: repeats in earlier campaigns on the cluster; the half width is then {over} times that where the spread is known. All other rows together: {every:.1%} hold the truth; the worst kind: {min(one.holds for one in each):.1%}.

{table(header, lines)}
"""


def main() -> None:
    """Prints the section, and records it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--boards", type=int, default=500, help="leaderboards of each kind")
    parser.add_argument("--record", action="store_true", help="write RESULTS.md")
    asked = parser.parse_args()
    text = section(asked.boards)
    print(text)
    if asked.record:
        record("Intervals", text)


if __name__ == "__main__":
    main()
