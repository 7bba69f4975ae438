"""A training job, under any launcher that sets the usual variables (torchrun, srun)."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from workers.trainer.capabilities import refuse_unsupported
from workers.trainer.collectives import barrier
from workers.trainer.context import RankContext
from workers.trainer.errors import TrainerError
from workers.trainer.job import TrainJob, read_job
from workers.trainer.job_checkpoints import JobCheckpoints, Report
from workers.trainer.launch import context_from_environment
from workers.trainer.mesh import refuse_wrong_world
from workers.trainer.optimizer import OptimizerSettings
from workers.trainer.progress import Progress
from workers.trainer.session import SessionSettings, open_training, peak_of
from workers.trainer.throughput import Throughput
from workers.trainer.timing import TimedStep, timed_step

__all__ = ["RankContext", "TrainJob", "main", "run_train"]


def run_train(job: TrainJob, ctx: RankContext, report: Report) -> dict[str, Any] | None:
    """Runs one rank of a training job; rank 0 reports what happens and returns the result.

    The steps are those that a probe times, so that tokens/s agree with its measurement. Where the
    job saves checkpoints, it goes on from the newest one.

    Raises:
        LayoutUnsupportedError: the trainer cannot run the layout.
        CompilerMissingError: the job is to be compiled, and torch has nothing to compile with.
        LossDivergedError: the loss or the gradient norm is not finite.
        TokenFileInvalidError: the token file is gone, or holds an id outside the vocabulary.
        CheckpointInvalidError: the newest checkpoint, or the directory, can't be used by this job.
        CheckpointFailedError: a checkpoint could not be read or written.
    """
    training = open_training(_settings(job), ctx)
    peak_tflops, peak_source = peak_of(ctx, job.layout)
    checkpoints, first_step, first_sample = None, 0, 0
    if job.checkpoint is not None:
        checkpoints = JobCheckpoints(job, job.checkpoint, training, report)
        first_step, first_sample = checkpoints.resume()
    tokens = job.open_token_file(first_step=first_step, first_sample=first_sample)
    if tokens is not None:
        training.source = tokens
    steps: list[TimedStep] = []
    for index in range(first_step, job.steps):
        steps.append(timed_step(training, index))
        if ctx.rank == 0:
            report(_step_event(job, index, steps[-1], peak_tflops))
        if checkpoints is not None:
            checkpoints.save_if_due(index + 1)
    barrier(training.device)
    if ctx.rank > 0:
        return None
    return _result(job, steps, ctx, first_step, peak_tflops, peak_source)


def _settings(job: TrainJob) -> SessionSettings:
    optimizer = OptimizerSettings(
        learning_rate=job.learning_rate,
        weight_decay=job.weight_decay,
        clip_grad_norm=job.clip_grad_norm,
    )
    return SessionSettings(
        model=job.model,
        layout=job.layout,
        seed=job.seed,
        optimizer=optimizer,
        compile=job.compile,
    )


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
    first_step: int,
    peak_tflops: float,
    peak_source: str,
) -> dict[str, Any]:
    return {
        **_speed(job, steps, peak_tflops),
        "tokens_per_step": steps[-1].stats.num_tokens if steps else None,
        "peak_tflops_per_device": peak_tflops,
        "peak_source": peak_source,
        "first_step": first_step,
        "steps": len(steps),
        "warmup": job.warmup,
        "skipped_steps": sum(step.stats.is_skipped for step in steps),
        "oversubscribed": ctx.oversubscribed,
        "first_loss": steps[0].stats.loss if steps else None,
        "final_loss": steps[-1].stats.loss if steps else None,
        "layout": job.layout.to_mapping(),
        "model": job.model.name,
    }


def _speed(job: TrainJob, steps: list[TimedStep], peak_tflops: float) -> dict[str, float | None]:
    """The median of the steps after the warm-up; None where a job that resumed had no such step."""
    timed = steps[job.warmup :]
    if not timed:
        names = ("tokens_per_s", "tokens_per_s_per_device", "step_time_s", "mfu")
        return dict.fromkeys(names)
    step_time_s = statistics.median(step.step_time_s for step in timed)
    speed = _throughput(job, timed[-1].stats.num_tokens / step_time_s, peak_tflops)
    return {
        "tokens_per_s": speed.tokens_per_s,
        "tokens_per_s_per_device": speed.tokens_per_s_per_device,
        "step_time_s": step_time_s,
        "mfu": speed.mfu,
    }


def _throughput(job: TrainJob, tokens_per_s: float, peak_tflops: float) -> Throughput:
    return Throughput(
        model=job.model,
        layout=job.layout,
        tokens_per_s=tokens_per_s,
        peak_tflops_per_device=peak_tflops,
    )


def main(arguments: list[str] | None = None) -> int:
    """`python -m workers.trainer.train --config job.json [--log FILE] [--json]`, and more options.

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
        stream = sys.stderr if options.as_json else sys.stdout
        progress = Progress(stream=stream, log=options.log if ctx.rank == 0 else None)
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    result = run_train(job, ctx, progress)
    if result is not None:
        progress(result)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m workers.trainer.train")
    parser.add_argument("--config", type=Path, required=True, help="the exported job.json")
    parser.add_argument("--steps", type=int, help="steps to take instead of the job's")
    parser.add_argument("--warmup", type=int, help="first steps that do not count, likewise")
    parser.add_argument("--log", type=Path, help="file that JSON lines are appended to")
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
