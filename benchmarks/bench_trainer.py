"""The trainer beside its peers: a bare single-process model, and a torch-native composition.

Run as `make bench-trainer`, or `python -m benchmarks.bench_trainer --record`: ten minutes on two
cores. It prints as it goes; `--record` writes the section "Trainer" of `benchmarks/RESULTS.md`.
`--cell` and `--precision` choose a part, for work on the trainer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.arguments import count, refuse
from benchmarks.results_file import describe_machine, record
from benchmarks.side_by_side import LossesDifferError
from benchmarks.trainer.bare_model import MODEL
from benchmarks.trainer.trainer_cells import (
    MICRO_BATCH_SIZE,
    MIXTURE,
    NUM_MICROBATCHES,
    Cell,
    make_layout,
    measure_cell,
    optimizer_bytes,
)
from benchmarks.trainer.trainer_start import (
    ProbeNotCompletedError,
    breakdown_figure,
    start_figures,
    warm_launcher,
)
from benchmarks.trainer.trainer_table import (
    Figure,
    cells_table,
    memory_figure,
    render,
    single_rank_figures,
)
from benchmarks.workers.forked_ranks import RankFailedError, restart_with_rank_environment
from layout_tuner.errors import SearchSpaceError
from layout_tuner.search_spaces.layouts.layout import CP_COMM_TYPES, KNOBS, Precision

PRECISIONS: Final[tuple[Precision, ...]] = ("fp32", "bf16")
NOTHING: Final = float("nan")

_TENSOR_PARALLEL: Final = (
    "torch-native",
    "torch-native, plain plan",
    "torch-native, sequence plan",
)
ASKED: Final[dict[str, dict[Precision, dict[str, float]]]] = {
    "1,1,1": {
        "fp32": {"bare": 1.05, "bare, own process": NOTHING, "torch-native": NOTHING},
        "bf16": {
            "bare": 1.05,
            "bare, own process": NOTHING,
            "torch-native": NOTHING,
            "torch-native, autocast": NOTHING,
        },
    },
    "2,1,1": {
        "fp32": dict.fromkeys(_TENSOR_PARALLEL, 1.35) | {"ours, all_reduce awaited": 1.03},
        "bf16": dict.fromkeys(_TENSOR_PARALLEL, 1.6) | {"ours, all_reduce awaited": 1.03},
    },
    "1,2,1": {"fp32": {"torch-native": 1.05}, "bf16": {"torch-native": 1.05}},
    "1,2,1,schedule=zero_bubble": {
        precision: {"torch-native": 1.05, "ours, 1F1B": NOTHING} for precision in PRECISIONS
    },
    "1,1,1,tp_columns=2": {
        precision: {"torch-native": 1.2, "ours, all_reduce awaited": 1.03}
        for precision in PRECISIONS
    },
    "1,1,2": {
        precision: {"torch-native": 1.03, "ours, scatter awaited": 1.03} for precision in PRECISIONS
    },
    "1,1,2,1,2": {"fp32": {"ours, ZeRO-1": 0.97}, "bf16": {"ours, ZeRO-1": 0.97}},
    "1,1,2,ep=2": {"fp32": {"torch-native": 1.1}, "bf16": {"torch-native": 1.1}},
    "1,1,2,1,3": {
        precision: {
            "FSDP2": 1.05,
            "ours, ZeRO-1": NOTHING,
            "ours, scatter awaited": 1.03,
            "ours, gather awaited": 1.03,
        }
        for precision in PRECISIONS
    },
    **{
        f"1,1,1,1,2,{comm_type}": {
            "fp32": {"torch-native": 1.05 if comm_type == "all_gather" else NOTHING},
            "bf16": {"torch-native": 1.05 if comm_type == "all_gather" else NOTHING},
        }
        for comm_type in CP_COMM_TYPES
    },
}
"""By cell, by precision, by peer: how many times longer the peer should take."""

ALL_CELLS: Final[dict[Precision, dict[str, int]]] = {
    "fp32": {
        "1,1,1": 6,
        "2,1,1": 6,
        "1,2,1": 10,
        "1,2,1,schedule=zero_bubble": 8,
        "1,1,1,tp_columns=2": 8,
        "1,1,2": 8,
        "1,1,2,1,2": 8,
        "1,1,2,1,3": 8,
        "1,1,2,ep=2": 8,
        "1,2,1,2": 6,
        "2,2,1": 3,
        "2,1,2": 3,
        "1,2,2": 3,
        **{f"1,1,1,1,2,{comm_type}": 6 for comm_type in CP_COMM_TYPES},
    },
    "bf16": {
        "1,1,1": 6,
        "2,1,1": 5,
        "1,2,1": 8,
        "1,2,1,schedule=zero_bubble": 8,
        "1,1,1,tp_columns=2": 8,
        "1,1,2": 6,
        "1,1,2,1,2": 8,
        "1,1,2,1,3": 6,
        "1,1,2,ep=2": 8,
        "1,1,1,1,2,all_gather": 6,
    },
}
"""Rounds of each cell of the whole table."""


def main() -> None:
    """Prints, and records, what was asked for."""
    arguments = _arguments()
    chosen = bool(arguments.cell or arguments.precision)
    if arguments.record and (chosen or arguments.rounds):
        refuse(
            "bench-trainer",
            "--record is for the whole table; leave --cell, --precision and --rounds away",
        )
    try:
        cells = _cells(arguments)
    except (SearchSpaceError, ValueError) as error:
        refuse("bench-trainer", str(error))
    restart_with_rank_environment()
    machine = describe_machine("torch", "numpy")
    print(machine, end="\n\n", flush=True)
    try:
        text = _measure(cells, everything=not chosen)
    except (RankFailedError, LossesDifferError, ProbeNotCompletedError) as error:
        sys.exit(str(error))
    if arguments.record:
        record("Trainer", f"`make bench-trainer`; {machine}.\n\n{text}")


def _cells(arguments: argparse.Namespace) -> list[tuple[Cell, int]]:
    cells = []
    for precision in arguments.precision or PRECISIONS:
        for name in arguments.cell or ALL_CELLS[precision]:
            rounds = arguments.rounds or ALL_CELLS[precision].get(name, 6)
            cells.append((make_cell(name, precision), rounds))
    return cells


def make_cell(name: str, precision: Precision) -> Cell:
    """The cell of tp,pp,dp[,vpp[,zero_stage]][,KNOB=VALUE], or of tp,pp,dp,vpp,cp,cp_comm_type.

    Raises:
        ValueError: the name is not such numbers.
        SearchSpaceError: they make no layout.
    """
    parts = name.split(",")
    knob, is_set, value = parts[-1].partition("=")
    more: dict[str, Any] = {}
    if is_set and knob in KNOBS:
        parts.pop()
        more[knob] = int(value) if value.isdecimal() else value
    if len(parts) not in range(3, 7) or not all(part.isdecimal() for part in parts[:5]):
        raise ValueError(
            f"cell {name!r} is not tp,pp,dp[,vpp[,zero]][,KNOB=VALUE] or tp,pp,dp,vpp,cp,comm_type, "
            "such as 2,1,1"
        )
    tp, pp, dp, vpp = map(int, [*parts, "1"][:4])
    if len(parts) == 5:
        more |= {"zero_stage": int(parts[4])}
    elif len(parts) == 6:
        more |= {"cp": int(parts[4]), "cp_comm_type": parts[5]}
    asked = ASKED.get(name, {}).get(precision, {"torch-native": NOTHING})
    layout = make_layout(tp=tp, pp=pp, dp=dp, vpp=vpp, precision=precision, **more)
    return Cell(layout=layout, asked=asked, by_cpu_time=layout.num_devices > 2)


def _measure(cells: Sequence[tuple[Cell, int]], *, everything: bool) -> str:
    """Measures one thing after the other, and prints each as soon as it is known."""
    results, figures = [], []

    def add(figure: Figure) -> None:
        figures.append(figure)
        print(" | ".join(figure.cells()), flush=True)

    for cell, rounds in cells:
        result = measure_cell(cell, num_rounds=rounds)
        header, rule, *rows = cells_table([result]).splitlines()
        print("\n".join(rows if results else [header, rule, *rows]), flush=True)
        results.append(result)
        if cell.layout.num_devices == 1:
            for figure in single_rank_figures(result):
                add(figure)
    if everything:
        bytes_of = {
            precision: (_optimizer_bytes(precision, 0), _optimizer_bytes(precision, 1))
            for precision in PRECISIONS
        }
        add(memory_figure(bytes_of))
        with warm_launcher() as launcher:
            for figure in (*start_figures(launcher, MODEL), breakdown_figure(launcher)):
                add(figure)
    return render(results, figures, _NOTE)


def _optimizer_bytes(precision: Precision, zero_stage: int) -> Sequence[int]:
    return optimizer_bytes(make_layout(precision=precision, dp=2, zero_stage=zero_stage))


_NOTE: Final = (
    f"Llama, {MODEL.num_layers} layers, hidden {MODEL.hidden_size}, {MODEL.num_heads} heads, FFN "
    f"{MODEL.ffn_hidden_size}, vocabulary {MODEL.vocab_size}, sequence {MODEL.seq_length}, with ep "
    f"{MIXTURE.num_experts} experts of width {MIXTURE.moe_ffn_hidden_size}, {MIXTURE.experts_per_token} "
    f"a token; {NUM_MICROBATCHES} micro-batches of {MICRO_BATCH_SIZE} a replica. Ratios: how many times "
    "longer the peer takes ([which and how](../docs/explanation/trainer.md#speed)); what is asked is "
    "held against the pairs' median."
)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-trainer", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cell",
        action="append",
        metavar="TP,PP,DP[,VPP[,ZERO]][,KNOB=VALUE]",
        help="this cell alone; repeatable",
    )
    parser.add_argument("--precision", action="append", choices=PRECISIONS)
    parser.add_argument("--rounds", type=count, help="timed steps of each implementation")
    parser.add_argument("--record", action="store_true", help="write benchmarks/RESULTS.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
