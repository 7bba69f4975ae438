"""What was read of a job's file, and what its log changes in a plan, as lines and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from layout_tuner.documents.reading import word_of
from layout_tuner.predictions.belief.plan_text import PROSE_WIDTH
from layout_tuner.predictions.job_plan import JobCampaign, JobPlan, LogEffect
from layout_tuner.terminal.plurals import counted, figure
from layout_tuner.trainers.found_jobs.found_job import FoundJob, open_lines


def found_lines(campaign: JobCampaign, width: int | None) -> Iterator[str]:
    """The job in one sentence; what was read in a block; the rest in full."""
    job, layout = campaign.job, campaign.job.layout
    machine = campaign.spec.cluster.name
    yield from _wrapped(
        f"{job.found.file}: a job of {job.found.trainer}, {campaign.spec.model.title}, "
        f"{layout.global_batch_size} sequences of {campaign.spec.model.seq_length:,} tokens a step, on "
        f"{counted(layout.num_devices, 'device')} of {counted(layout.num_nodes, 'node')} of {machine}: "
        f"{layout.key}",
        width,
    )
    read = ", ".join(f"{each.field}={word_of(each.value)}" for each in job.found.certain)
    yield from _wrapped(f"read: {read or 'nothing'}", width)
    yield from open_lines(job.found)
    for remark in campaign.remarks:
        yield from _wrapped(f"warning: {remark}", width)


def log_lines(effect: LogEffect, now: JobPlan, width: int | None) -> Iterator[str]:
    """What the log measured, and what that changed in the plan."""
    log, plan = effect.log, now.plan
    which = f"in the last of {log.num_runs} runs " if log.num_runs > 1 else ""
    yield from _wrapped(
        f"{log.file}: {which}a step takes {figure(log.step_time_s)} s (median of "
        f"{counted(log.num_steps, 'step')} after {log.num_warmup} of warm-up; quartiles "
        f"{figure(log.step_time_low_s)} and {figure(log.step_time_high_s)} s). Without the log "
        f"{figure(effect.predicted_s)} s were predicted: measured is {effect.factor:.3g} times that",
        width,
    )
    best, before = plan.best, effect.best_before
    if best.layout_key == before.layout_key:
        moved = (
            f"the best layout is the same with the log, and predicted to take "
            f"{figure(best.predicted.step_time_s)} s in place of "
            f"{figure(before.predicted.step_time_s)} s"
        )
    else:
        was = (
            "behind the listed ones" if effect.rank_before is None else f"rank {effect.rank_before}"
        )
        has = "behind the listed ones" if effect.rank_now is None else f"rank {effect.rank_now}"
        moved = (
            f"with the log another layout is the best, {best.layout_key} ({was} without it); the best "
            f"without it, {before.layout_key}, is {has}"
        )
    yield from _wrapped(moved, width)


def job_document(found: FoundJob) -> dict[str, Any]:
    """What was read of a file, as JSON."""
    return {
        "file": found.file,
        "format": found.format,
        "trainer": found.trainer,
        "version": found.version,
        "name": found.name,
        "read": [
            {"field": each.field, "value": each.value, "said": each.said} for each in found.certain
        ],
        "assumed": [asdict(each) for each in found.presumed],
        "not_understood": [asdict(each) for each in found.not_understood],
    }


def log_document(effect: LogEffect) -> dict[str, Any]:
    """What a log changed, as JSON."""
    return {
        **asdict(effect.log),
        "predicted_step_time_s": effect.predicted_s,
        "factor": effect.factor,
        "best_before": effect.best_before.layout_key,
        "rank_of_best_before": effect.rank_now,
        "rank_before_of_best": effect.rank_before,
    }


def _wrapped(text: str, width: int | None) -> list[str]:
    return textwrap.wrap(text, width or PROSE_WIDTH, subsequent_indent="  ", break_on_hyphens=False)
