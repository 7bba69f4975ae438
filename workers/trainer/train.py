"""Runs a training job under torchrun, srun, or alone."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from layout_tuner.documents.numbers import read_whole
from layout_tuner.search_spaces.throughput import Throughput
from layout_tuner.terminal.console import escape_output
from layout_tuner.workers.trainer.comm.collectives import barrier
from layout_tuner.workers.trainer.comm.mesh import refuse_wrong_world
from layout_tuner.workers.trainer.errors import TrainerError
from layout_tuner.workers.trainer.job.job import TrainJob, read_job
from layout_tuner.workers.trainer.job.job_checkpoints import JobCheckpoints, Report
from layout_tuner.workers.trainer.job.launch import context_from_environment
from layout_tuner.workers.trainer.job.progress import ProgressLog
from layout_tuner.workers.trainer.open_training import (
    RankContext,
    TrainingSettings,
    open_training,
    peak_of,
    refuse_unsupported,
)
from layout_tuner.workers.trainer.parallel.optimizer import OptimizerSettings
from layout_tuner.workers.trainer.probe.timing import TimedStep, timed_step


def run_train(job: TrainJob, ctx: RankContext, report: Report) -> dict[str, Any] | None:
    """Runs one rank of a training job; rank 0 reports events and returns the result.

    It takes the same steps as a probe, so that tokens/s agree with the probe's measurement. A job
    with checkpoints resumes from the newest one.

    Raises:
        LayoutUnsupportedError: the trainer cannot run the layout.
        CompilerMissingError: compilation was requested, and torch has no compiler.
        TrainerOptionInvalidError: a knob of the job changes nothing here, or the ranks of a host
            have more threads than cores.
        LossDivergedError: the loss or the gradient norm is not finite.
        TrainingTokensInvalidError: the token file is missing, or has an id outside the vocabulary.
        CheckpointInvalidError: this job can't use the newest checkpoint, or the directory.
        CheckpointFailedError: a checkpoint could not be read or written.
    """
    settings = _settings(job)
    training = open_training(settings, ctx)
    peak_tflops, peak_source = peak_of(ctx, settings)
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


def _settings(job: TrainJob) -> TrainingSettings:
    optimizer = OptimizerSettings(
        learning_rate=job.learning_rate,
        weight_decay=job.weight_decay,
        clip_grad_norm=job.clip_grad_norm,
    )
    return TrainingSettings(
        model=job.model,
        layout=job.layout,
        seed=job.seed,
        optimizer=optimizer,
        options=job.options,
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
    """Medians of the steps after warm-up; None if a resumed job had no such step."""
    names = ("tokens_per_s", "tokens_per_s_per_device", "step_time_s", "mfu")
    timed = steps[job.warmup :]
    if not timed:
        return dict.fromkeys(names)
    step_time_s = statistics.median(step.step_time_s for step in timed)
    speed = _throughput(job, timed[-1].stats.num_tokens / step_time_s, peak_tflops)
    figures = {**speed.figures, "step_time_s": step_time_s}
    return {name: figures[name] for name in names}


def _throughput(job: TrainJob, tokens_per_s: float, peak_tflops: float) -> Throughput:
    return Throughput(
        model=job.model,
        layout=job.layout,
        tokens_per_s=tokens_per_s,
        peak_tflops_per_device=peak_tflops,
    )


def main(arguments: list[str] | None = None) -> int:
    """`python -m layout_tuner.workers.trainer.train --config JOB [--log FILE] [--json]`, and more.

    Prints a line for each step, the median, and the result as a line of JSON. With --json only the
    JSON goes to stdout, and the rest to stderr. Exit codes: 0 done, 2 bad usage. Later errors are
    raised, so that the launcher shows them.
    """
    options = _parser().parse_args(arguments)
    try:
        job = read_job(options.config, steps=options.steps, warmup=options.warmup)
        refuse_unsupported(job.layout, job.model)
        job.refuse_unusable()
        ctx = context_from_environment()
        refuse_wrong_world(job.layout, ctx.world_size)
        stream = sys.stderr if options.as_json else sys.stdout
        progress = ProgressLog(stream=stream, log=options.log if ctx.rank == 0 else None)
    except TrainerError as error:
        sys.stderr.write(f"Error: {error}\n")
        return 2
    result = run_train(job, ctx, progress)
    if result is not None:
        progress(result)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m layout_tuner.workers.trainer.train")
    parser.add_argument("--config", type=Path, required=True, help="the exported job.json")
    parser.add_argument("--steps", type=read_whole, help="steps to take instead of the job's")
    parser.add_argument(
        "--warmup", type=read_whole, help="first steps that do not count, instead of the job's"
    )
    parser.add_argument("--log", type=Path, help="file that JSON lines are appended to")
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="print JSON alone; progress on stderr"
    )
    return parser


if __name__ == "__main__":
    escape_output()
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Destroying a gloo group can hang after the job is done. All output has been flushed.
    os._exit(status)
