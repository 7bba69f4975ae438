"""A training job, under any launcher that sets the usual variables (torchrun, srun)."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from workers.trainer.capabilities import refuse_unsupported
from workers.trainer.collectives import barrier
from workers.trainer.context import RankContext
from workers.trainer.errors import TrainerError
from workers.trainer.job import TrainJob, read_job
from workers.trainer.mesh import refuse_wrong_world
from workers.trainer.optimizer import OptimizerSettings
from workers.trainer.progress import print_event
from workers.trainer.session import SessionSettings, open_training, peak_of
from workers.trainer.throughput import Throughput
from workers.trainer.timing import TimedStep, timed_step

__all__ = ["RankContext", "TrainJob", "main", "print_event", "run_train"]

Report = Callable[[dict[str, Any]], None]


def run_train(job: TrainJob, ctx: RankContext, report: Report) -> dict[str, Any] | None:
    """Runs one rank of a training job; rank 0 reports each step and returns the result.

    The steps are those that a probe times, so that tokens/s agree with its measurement.

    Raises:
        LayoutUnsupportedError: the trainer cannot run the layout.
        LossDivergedError: the loss or the gradient norm is not finite.
        TokenFileInvalidError: the token file is gone, or holds an id outside the vocabulary.
    """
    optimizer = OptimizerSettings(
        learning_rate=job.learning_rate,
        weight_decay=job.weight_decay,
        clip_grad_norm=job.clip_grad_norm,
    )
    settings = SessionSettings(
        model=job.model,
        layout=job.layout,
        seed=job.seed,
        optimizer=optimizer,
        source=job.open_token_file(),
    )
    training = open_training(settings, ctx)
    peak_tflops, peak_source = peak_of(ctx, job.layout)
    steps: list[TimedStep] = []
    for index in range(job.steps):
        steps.append(timed_step(training, index))
        if ctx.rank == 0:
            report(_step_event(job, index, steps[-1], peak_tflops))
    barrier(training.device)
    return _result(job, steps, ctx, peak_tflops, peak_source) if ctx.rank == 0 else None


def _step_event(job: TrainJob, index: int, step: TimedStep, peak_tflops: float) -> dict[str, Any]:
    return {
        "event": "step",
        "index": index,
        "loss": step.stats.loss,
        "grad_norm": None if step.stats.is_skipped else step.stats.grad_norm,
        "loss_scale": step.stats.loss_scale,
        "tokens_per_s": step.tokens_per_s,
        "mfu": _throughput(job, step.tokens_per_s, peak_tflops).mfu,
    }


def _result(
    job: TrainJob,
    steps: list[TimedStep],
    ctx: RankContext,
    peak_tflops: float,
    peak_source: str,
) -> dict[str, Any]:
    step_time_s = statistics.median(step.step_time_s for step in steps[job.warmup :])
    speed = _throughput(job, steps[-1].stats.num_tokens / step_time_s, peak_tflops)
    return {
        "tokens_per_s": speed.tokens_per_s,
        "tokens_per_s_per_device": speed.tokens_per_s_per_device,
        "step_time_s": step_time_s,
        "tokens_per_step": steps[-1].stats.num_tokens,
        "mfu": speed.mfu,
        "peak_tflops_per_device": peak_tflops,
        "peak_source": peak_source,
        "steps": len(steps),
        "warmup": job.warmup,
        "oversubscribed": ctx.oversubscribed,
        "first_loss": steps[0].stats.loss,
        "final_loss": steps[-1].stats.loss,
        "layout": job.layout.to_mapping(),
        "model": job.model.name,
    }


def _throughput(job: TrainJob, tokens_per_s: float, peak_tflops: float) -> Throughput:
    return Throughput(
        model=job.model,
        layout=job.layout,
        tokens_per_s=tokens_per_s,
        peak_tflops_per_device=peak_tflops,
    )


def context_from_environment() -> RankContext:
    """This rank's place as torchrun and srun wrappers state it; alone, where nothing does."""
    cuda = torch.cuda.is_available()
    store: Store
    if "RANK" in os.environ:
        store, rank, world_size = next(iter(rendezvous("env://")))
    else:
        store, rank, world_size = HashStore(), 0, 1
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    devices = torch.cuda.device_count() if cuda else len(os.sched_getaffinity(0))
    return RankContext(
        rank=rank,
        world_size=world_size,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        store=store,
        device="cuda" if cuda else "cpu",
        oversubscribed=local_ranks > devices,
        peak_tflops_per_device=None,
        peak_source="",
    )


def main(arguments: list[str] | None = None) -> int:
    """`python -m workers.trainer.train --config job.json [--steps N] [--warmup N] [--json]`.

    A line a step, the median and a last line of JSON; with --json that line alone, and the others
    on stderr. Exit codes: 0 done, 2 bad usage; whatever fails later is raised, so that the launcher
    shows it.
    """
    options = _parser().parse_args(arguments)
    try:
        job = read_job(options.config, steps=options.steps, warmup=options.warmup)
        refuse_unsupported(job.layout, job.model)
        job.refuse_unusable()
        ctx = context_from_environment()
        refuse_wrong_world(job.layout, ctx.world_size)
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    stream = sys.stderr if options.as_json else sys.stdout
    result = run_train(job, ctx, lambda event: print_event(event, stream=stream))
    if result is not None:
        print_event(result, stream=stream)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m workers.trainer.train")
    parser.add_argument("--config", type=Path, required=True, help="the exported job.json")
    parser.add_argument("--steps", type=int, help="steps to take instead of the job's")
    parser.add_argument("--warmup", type=int, help="first steps that do not count, likewise")
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="print JSON alone; progress on stderr"
    )
    return parser


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Tearing a gloo group down can hang once the job is done; its results are out.
    os._exit(status)
