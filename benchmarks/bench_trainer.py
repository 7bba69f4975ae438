"""The trainer beside its peers: a bare single-process model, and a torch-native composition.

Run as `make bench-trainer`, or `python -m benchmarks.bench_trainer`. It prints as it goes; with
`--record` it writes the section "Trainer" of `benchmarks/RESULTS.md`. `--cell` and `--precision`
choose a part, for work on the trainer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Final, NoReturn

from benchmarks.forked_ranks import RankFailedError, restart_with_rank_environment
from benchmarks.results_file import describe_machine
from benchmarks.side_by_side import LossesDifferError, Ratio
from benchmarks.trainer_cells import Cell, CellResult, make_layout, measure_cell
from search_spaces.errors import SearchSpaceError
from search_spaces.layout import Precision

PRECISIONS: Final[tuple[Precision, ...]] = ("fp32", "bf16")
NAN: Final = float("nan")
_ROUNDS: Final[dict[Precision, int]] = {"fp32": 8, "bf16": 10}

ASKED: Final[dict[str, dict[Precision, dict[str, float]]]] = {
    "1,1,1": {
        "fp32": {"bare": 1.05, "torch-native": NAN},
        "bf16": {"bare": 1.05, "bare, autocast": NAN, "torch-native": NAN},
    },
    "2,1,1": {"fp32": {"torch-native": 1.35}, "bf16": {"torch-native": 1.6}},
    "1,2,1": {"fp32": {"torch-native": 1.05}, "bf16": {"torch-native": 1.05}},
    "1,1,2": {"fp32": {"torch-native": 1.03}, "bf16": {"torch-native": 1.03}},
}
"""By tp,pp,dp, by precision, by peer: how many times longer the peer should take."""


def main() -> None:
    """Prints what was asked for."""
    restart_with_rank_environment()
    arguments = _arguments()
    try:
        cells = [
            make_cell(name, precision)
            for precision in arguments.precision or PRECISIONS
            for name in arguments.cell or ASKED
        ]
    except (SearchSpaceError, ValueError) as error:
        _refuse(str(error))
    print(describe_machine("torch", "numpy"), flush=True)
    try:
        for cell in cells:
            rounds = arguments.rounds or _ROUNDS[cell.layout.precision]
            for line in describe(measure_cell(cell, num_rounds=rounds)):
                print(line, flush=True)
    except (RankFailedError, LossesDifferError) as error:
        sys.exit(str(error))


def make_cell(name: str, precision: Precision) -> Cell:
    """The cell of tp,pp,dp or tp,pp,dp,vpp.

    Raises:
        ValueError: the name is not such numbers.
        SearchSpaceError: they make no layout.
    """
    parts = name.split(",")
    if len(parts) not in (3, 4) or not all(part.isdecimal() for part in parts):
        raise ValueError(f"cell {name!r} is not tp,pp,dp or tp,pp,dp,vpp, such as 2,1,1")
    tp, pp, dp, vpp = map(int, [*parts, "1"][:4])
    asked = ASKED.get(name, {}).get(precision, {"torch-native": NAN})
    layout = make_layout(tp=tp, pp=pp, dp=dp, vpp=vpp, precision=precision)
    return Cell(layout=layout, asked=asked, by_cpu_time=tp * pp * dp > 2)


def describe(result: CellResult) -> Iterator[str]:
    """A cell's result for people, one line a peer."""
    cell, ours = result.cell, result.series["ours"]
    peak = ""
    if result.peak_tflops:
        share = result.tflops_per_rank / result.peak_tflops
        peak = f" of {result.peak_tflops * 1e3:.1f}, {share:.1%}"
    yield (
        f"{cell.name} {cell.layout.precision}: ours {ours.step_time_s * 1e3:.0f} ms a step, "
        f"{ours.cpu_time_s:.2f} CPU s, {result.tflops_per_rank * 1e3:.1f} GFLOP/s a rank{peak}"
    )
    for peer in cell.asked:
        found, series = result.ratio(peer), result.series[peer]
        yield (
            f"  {peer}: {series.step_time_s * 1e3:.0f} ms, {series.cpu_time_s:.2f} CPU s; "
            f"{shown(found)}; losses within {result.loss_differences[peer]:.0e}"
        )


def shown(found: Ratio) -> str:
    return (
        f"{found.of_medians:.3f} (pairs {found.of_pairs:.3f}, {found.q25:.3f} to {found.q75:.3f})"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-trainer", description=__doc__.splitlines()[0])
    parser.add_argument("--cell", action="append", metavar="TP,PP,DP", help="This cell alone.")
    parser.add_argument("--precision", action="append", choices=PRECISIONS)
    parser.add_argument("--rounds", type=_count, help="Timed steps of each implementation.")
    return parser.parse_args()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return int(text)


def _refuse(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
