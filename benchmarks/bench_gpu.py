"""The trainer on one device beside a plain eager and a compiled loop.

Run as `make bench-gpu` on a machine with a GPU: it needs torch, numpy and `search_spaces` alone.
`--device cpu --models tiny` runs the same code anywhere. Prints tokens/s, MFU and memory of each;
`--record` writes the section "One GPU" of `benchmarks/RESULTS.md`.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import distributed as dist

from benchmarks.arguments import count, refuse
from benchmarks.results_file import describe_machine, record, table
from benchmarks.side_by_side import (
    LossesDifferError,
    Series,
    Step,
    ratio,
    refuse_different_losses,
    take_turns,
)
from benchmarks.trainer.bare_model import BareLoop
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.throughput import Throughput
from layout_tuner.workers.trainer.device_peak_flops import matmul_peak
from layout_tuner.workers.trainer.open_training import RankContext, TrainingSettings, open_training
from layout_tuner.workers.trainer.parallel.optimizer import OptimizerSettings
from layout_tuner.workers.trainer.trainer_options import TrainerOptions
from layout_tuner.workers.trainer.training import Training

OPTIMIZER: Final = OptimizerSettings(learning_rate=1e-4)
SEED: Final = 0
LOSS_TOLERANCE: Final = 1e-2
"""Relative; bf16 keeps three decimal digits."""
_NUM_WARMUP: Final = 3
"""The first compiles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model, and the batch that one device takes of it."""

    shape: ModelShape
    layout: Layout


def _workload(
    name: str,
    *,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    seq: int,
    sequences: int,
    vocab: int = 32000,
) -> Workload:
    shape = ModelShape(
        name=name,
        family="llama",
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_heads=heads,
        num_kv_heads=kv_heads,
        seq_length=seq,
        vocab_size=vocab,
        tied_embeddings=False,
    )
    layout = Layout(micro_batch_size=sequences, num_microbatches=4, precision="bf16")
    return Workload(shape=shape, layout=layout)


WORKLOADS: Final = {
    workload.shape.name: workload
    for workload in (
        _workload(
            "125m",
            layers=12,
            hidden=768,
            ffn=2048,
            heads=12,
            kv_heads=12,
            seq=2048,
            sequences=8,
        ),
        _workload(
            "1b",
            layers=22,
            hidden=2048,
            ffn=5632,
            heads=32,
            kv_heads=4,
            seq=2048,
            sequences=4,
        ),
        _workload(
            "7b-layers",
            layers=4,
            hidden=4096,
            ffn=11008,
            heads=32,
            kv_heads=32,
            seq=4096,
            sequences=2,
        ),
        _workload(
            "tiny",
            layers=2,
            hidden=64,
            ffn=128,
            heads=4,
            kv_heads=2,
            seq=32,
            sequences=2,
            vocab=256,
        ),
    )
}
"""125M; TinyLlama's 1.1B; four layers of Llama 2's 7B; and one for machines without a GPU."""
GPU_MODELS: Final = ("125m", "1b", "7b-layers")


def main() -> None:
    """Prints, and records, a table of the chosen models."""
    arguments = _arguments()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        refuse(
            "bench-gpu",
            f"torch {torch.__version__} sees no GPU here; run it where there is one, or try the "
            "code with --device cpu --models tiny",
        )
    torch.set_num_threads(1)
    machine = f"{describe_machine('torch', 'numpy')}, {_device_name(arguments.device)}"
    print(machine, end="\n\n", flush=True)
    rows = []
    try:
        for name in arguments.models:
            for peer in arguments.peers:
                rows += _compare(WORKLOADS[name], peer, arguments.device, arguments.rounds)
                print("\n".join(" | ".join(row) for row in rows[-2:]), flush=True)
                if arguments.json is not None:  # it stays where a later model fails
                    documents = [dict(zip(_HEADER, row, strict=True)) for row in rows]
                    arguments.json.write_text(json.dumps(documents))
    except (LossesDifferError, torch.OutOfMemoryError) as error:
        sys.exit(f"bench-gpu: {error}")
    text = table(_HEADER, rows)
    print(f"\n{text}")
    if arguments.record:
        record("One GPU", f"`make bench-gpu`; {machine}. {_NOTE}\n\n{text}")


_HEADER: Final = ("model", "side", "tokens/s", "TFLOP/s", "MFU", "peak memory", "ours over it")
_NOTE: Final = (
    "Four micro-batches a step, bf16 with fp32 master weights and gradients, fused AdamW; steps of "
    "both sides of a pair alternate on the same batches; beside the compiled loop the trainer "
    "compiles, too. MFU: model FLOPs over the device's peak. "
    "Memory: the allocator's peak while that side alone is there. Last column: how many times "
    "longer the peer takes, median of pairs with quartiles."
)


def _compare(workload: Workload, peer: str, device: str, rounds: int) -> list[tuple[str, ...]]:
    """The rows of the trainer and of a peer, which take turns; both compiled, or neither."""
    is_compiled = peer == "compiled"
    training = _open(workload, device, compiled=is_compiled)
    try:
        peak_tflops, _ = matmul_peak(device, workload.layout.precision)
        makers: dict[str, Callable[[], Step]] = {
            "ours": lambda: _our_step(training),
            peer: lambda: _peer_step(workload, peer, training.device),
        }
        peaks, sides = {}, {}
        for side, make in makers.items():
            before = _allocated(training.device) if sides else 0
            sides[side] = make()
            peaks[side] = _peak_bytes(sides[side], training) - before
        series = take_turns(
            sides,
            lambda index: training.batch(index + 2),
            num_rounds=rounds,
            num_warmup=_NUM_WARMUP,
            device=training.device,
        )
    finally:
        dist.destroy_process_group()
    what = f"{workload.shape.name} on {device}"
    refuse_different_losses(series, tolerance=LOSS_TOLERANCE, what=what)
    found = ratio(series["ours"].step_times_s, series[peer].step_times_s)
    said = f"{found.of_pairs:.3f} ({found.q25:.3f} to {found.q75:.3f})"
    return [
        _row(workload, name, series[side], peak_tflops, peaks[side], remark)
        for side, name, remark in (
            ("ours", "ours, compiled" if is_compiled else "ours", ""),
            (peer, peer, said),
        )
    ]


def _open(workload: Workload, device: str, *, compiled: bool) -> Training:
    _empty_cache(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    context = RankContext(
        rank=0,
        world_size=1,
        local_rank=0,
        store=dist.HashStore(),
        device=device,
        oversubscribed=False,
        peak_tflops_per_device=None,
        peak_source="",
    )
    settings = TrainingSettings(
        model=workload.shape,
        layout=workload.layout,
        seed=SEED,
        optimizer=OPTIMIZER,
        options=TrainerOptions(compile=compiled),
    )
    return open_training(settings, context)


def _our_step(training: Training) -> Step:
    return lambda batch: training.step(batch).loss


def _peer_step(workload: Workload, peer: str, device: torch.device) -> Step:
    loop = BareLoop(
        workload.shape,
        precision=workload.layout.precision,
        seed=SEED,
        settings=OPTIMIZER,
        device=device,
        compiled=peer == "compiled",
    )
    return loop.step


def _peak_bytes(step: Step, training: Training) -> int:
    """The allocator's peak in a second step: the first one makes the optimizer's states."""
    device = training.device
    step(training.batch(0))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step(training.batch(1))
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _empty_cache(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _row(
    workload: Workload, side: str, series: Series, peak_tflops: float, peak_bytes: int, said: str
) -> tuple[str, ...]:
    layout = workload.layout
    tokens = layout.global_batch_size * workload.shape.seq_length
    speed = Throughput(
        model=workload.shape,
        layout=layout,
        tokens_per_s=tokens / series.step_time_s,
        peak_tflops_per_device=peak_tflops,
    )
    return (
        workload.shape.name,
        side,
        f"{speed.tokens_per_s:,.0f}",
        f"{speed.model_tflops_per_device:.4g}",
        f"{speed.mfu:.1%}",
        f"{peak_bytes / 2**30:.2f} GiB" if peak_bytes else "not on a CPU",
        said,
    )


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "on the CPU, one thread"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--models", type=_names(tuple(WORKLOADS)), default=GPU_MODELS, help="separated by commas"
    )
    peers = ("eager", "compiled")
    parser.add_argument("--peers", type=_names(peers), default=peers, help="separated by commas")
    parser.add_argument("--rounds", type=count, default=20, help="timed steps of each side")
    parser.add_argument("--json", type=Path, help="file that the rows are written to, too")
    parser.add_argument("--record", action="store_true", help="write benchmarks/RESULTS.md")
    return parser.parse_args()


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return names

    return read


if __name__ == "__main__":
    main()
