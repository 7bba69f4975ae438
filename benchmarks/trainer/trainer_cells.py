"""The cells of the trainer's table: a layout and a precision, measured against its peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import distributed as dist

from benchmarks.side_by_side import (
    Ratio,
    Series,
    Step,
    ratio,
    refuse_different_losses,
    take_turns,
)
from benchmarks.trainer.bare_model import MODEL, OPTIMIZER, SEED, BareLoop, MixedPrecision
from benchmarks.trainer.bare_process import BareProcess
from benchmarks.workers.forked_ranks import run_ranks
from layout_tuner.search_spaces.layouts.layout import Layout, Precision
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.batches import Batch
from layout_tuner.workers.trainer.comm.mesh import build_mesh
from layout_tuner.workers.trainer.device_peak_flops import matmul_peak
from layout_tuner.workers.trainer.open_training import RankContext, TrainingSettings, open_training
from layout_tuner.workers.trainer.trainer_options import OVERLAPS, TrainerOptions
from layout_tuner.workers.trainer.training import Training

MICRO_BATCH_SIZE: Final = 2
NUM_MICROBATCHES: Final = 4
"""For every cell: the fewest with which a pipeline of two stages reaches its steady phase and keeps
it, so that a step is mostly passes, and communication over dp and the optimizer count once."""
MIXTURE: Final = replace(
    MODEL,
    name="bench-trainer-experts",
    ffn_hidden_size=MODEL.ffn_hidden_size // 2,
    num_experts=8,
    experts_per_token=2,
    moe_ffn_hidden_size=MODEL.ffn_hidden_size // 2,
)
"""The model of cells that divide experts: a token's experts do the work of a dense layer."""
NUM_WARMUP: Final = 2
LOSS_TOLERANCE: Final[dict[Precision, float]] = {"fp32": 1e-4, "bf16": 1e-2}
"""Relative; bf16 keeps three decimal digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """What is compared: the trainer under a layout, and the peers that it runs beside."""

    layout: Layout
    asked: dict[str, float]
    """Peer: how many times longer than the trainer it should take; nan where nothing is asked."""
    by_cpu_time: bool = False
    """Whether CPU seconds are compared: with more ranks than cores, wall times mean nothing."""

    @property
    def name(self) -> str:
        """tp,pp,dp, and where they are used vpp, cp, ep, tensor columns, and ZeRO above stage 1."""
        layout = self.layout
        interleaved = f" vpp {layout.vpp}" if layout.vpp > 1 else ""
        context = f" cp {layout.cp} {layout.cp_comm_type}" if layout.cp > 1 else ""
        divided = f" ep {layout.ep}" if layout.ep > 1 else ""
        divided += f" columns {layout.tp_columns}" if layout.tp_columns > 1 else ""
        sharded = f" ZeRO-{layout.zero_stage}" if layout.zero_stage > 1 else ""
        return f"{layout.tp},{layout.pp},{layout.dp}{interleaved}{context}{divided}{sharded}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CellResult:
    """What the ranks of a cell measured."""

    cell: Cell
    series: dict[str, Series]
    """By implementation; "ours" is the trainer."""
    loss_differences: dict[str, float]
    """Largest relative difference of a peer's losses from ours."""
    peak_tflops: float | None
    """Best square matrix product between the steps; None: not measured in this cell."""

    def ratio(self, peer: str, to: str = "ours") -> Ratio:
        """How many times longer the peer takes."""
        this, other = self.series[to], self.series[peer]
        if self.cell.by_cpu_time:
            return ratio(this.cpu_times_s, other.cpu_times_s)
        return ratio(this.step_times_s, other.step_times_s)

    @property
    def tflops_per_rank(self) -> float:
        """Model FLOPs of the trainer, a second and rank, in 10^12."""
        layout = self.cell.layout
        model = model_of(layout)
        tokens = layout.global_batch_size * model.seq_length
        flops = tokens * model.model_flops_per_token / layout.num_devices
        return flops / self.series["ours"].step_time_s / 1e12


def model_of(layout: Layout) -> ModelShape:
    """The model of a layout's cell."""
    return MIXTURE if layout.ep > 1 else MODEL


def make_layout(*, precision: Precision, **degrees: Any) -> Layout:
    """A cell's layout: replicas shard the optimizer's states, as the peer's ZeRO does."""
    defaults = {
        "zero_stage": 1 if degrees.get("dp", 1) * degrees.get("cp", 1) > 1 else 0,
        "micro_batch_size": MICRO_BATCH_SIZE,
        "num_microbatches": NUM_MICROBATCHES,
    }
    return Layout(precision=precision, **{**defaults, **degrees})


def measure_cell(cell: Cell, *, num_rounds: int) -> CellResult:
    """Forks the ranks of a cell, and lets the implementations take turns in them.

    Raises:
        RankFailedError: a rank failed.
        LossesDifferError: the implementations do not train the same model.
    """

    def work(ctx: RankContext) -> tuple[dict[str, Series], float]:
        return _run_sides(cell, ctx, num_rounds)

    series, peak_tflops = run_ranks(cell.layout.num_devices, work)[0]
    precision = cell.layout.precision
    what = f"cell {cell.name} in {precision}"
    differences = refuse_different_losses(series, tolerance=LOSS_TOLERANCE[precision], what=what)
    return CellResult(
        cell=cell,
        series=series,
        loss_differences=differences,
        peak_tflops=peak_tflops or None,
    )


def _run_sides(cell: Cell, ctx: RankContext, num_rounds: int) -> tuple[dict[str, Series], float]:
    training = open_our_training(cell.layout, ctx)
    sides: dict[str, Step] = {"ours": _our_step(training)}
    for name in cell.asked:
        sides[name] = PEERS[name](cell.layout)
    best = 0.0

    def measure_peak() -> None:
        nonlocal best
        if ctx.world_size == 1:
            best = max(best, matmul_peak("cpu", cell.layout.precision)[0])

    series = take_turns(
        sides, training.batch, num_rounds=num_rounds, num_warmup=NUM_WARMUP, between=measure_peak
    )
    return series, best


def open_our_training(layout: Layout, ctx: RankContext) -> Training:
    """The trainer as a probe opens it."""
    model = model_of(layout)
    settings = TrainingSettings(
        model=model,
        layout=layout,
        seed=SEED,
        optimizer=OPTIMIZER,
        balanced_routing=model.num_experts > 0,
    )
    return open_training(settings, ctx)


def _our_step(training: Training) -> Step:
    def step(batch: Batch) -> float:
        # Every rank knows the loss of the global batch.
        return training.step(batch).loss / training.mesh.layout.num_devices

    return step


def _ours_with(*, waits_for: str = "", **changes: Any) -> Callable[[Layout], Step]:
    """The trainer with other knobs, or without one overlap of communication and computation."""

    def make(layout: Layout) -> Step:
        mesh = build_mesh(
            dist.get_rank(),
            replace(layout, **changes),
            tied_embeddings=MODEL.tied_embeddings,
            options=TrainerOptions(**({waits_for: False} if waits_for else {})),
        )
        device = torch.device("cpu")
        return _our_step(Training(MODEL, mesh, seed=SEED, device=device, settings=OPTIMIZER))

    return make


def _bare(mixed: MixedPrecision) -> Callable[[Layout], Step]:
    def make(layout: Layout) -> Step:
        loop = BareLoop(
            MODEL, precision=layout.precision, seed=SEED, settings=OPTIMIZER, mixed=mixed
        )
        return loop.step

    return make


def _native(**options: Any) -> Callable[[Layout], Step]:
    def make(layout: Layout) -> Step:
        from benchmarks.trainer.torch_native import (
            NativeLoop,  # a second of imports, in its ranks alone
        )

        return NativeLoop(model_of(layout), layout, seed=SEED, settings=OPTIMIZER, **options).step

    return make


PEERS: Final[dict[str, Callable[[Layout], Step]]] = {
    "bare": _bare("masters"),
    "bare, autocast": _bare("autocast"),
    "bare, own process": lambda layout: BareProcess(layout).step,
    "ours, ZeRO-1": _ours_with(zero_stage=1),
    "ours, 1F1B": _ours_with(schedule="1f1b"),
    **{
        f"ours, {name.removeprefix('overlap_')} awaited": _ours_with(waits_for=name)
        for name in OVERLAPS
    },
    "FSDP2": _native(),
    "torch-native": _native(),
    "torch-native, autocast": _native(mixed="autocast"),
    "torch-native, plain plan": _native(plan="plain"),
    "torch-native, sequence plan": _native(plan="sequence"),
}
"""What the trainer can run beside."""


def optimizer_bytes(layout: Layout) -> list[int]:
    """Bytes of optimizer states of each rank."""

    def work(ctx: RankContext) -> int:
        training = open_our_training(layout, ctx)
        return sum(state.nbytes for state in training.optimizer.state_tensors)

    return run_ranks(layout.num_devices, work)
