"""The step time of a job by the log that its trainer printed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Final

from layout_tuner.documents.reading import why_unreadable
from layout_tuner.predictions.statistics.rank_steps import (
    RankSteps,
    StepLine,
    StepNumberError,
    in_seconds_and_bytes,
)
from layout_tuner.predictions.statistics.step_times import MIN_WARMUP, num_warmup, quartiles
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.terminal.plurals import listed
from layout_tuner.trainers.found_jobs.found_job import JobFileInvalidError
from layout_tuner.trainers.log_patterns import LONGEST_LINE, LogPatterns, says_skipped
from layout_tuner.trainers.registry import adapter_named

LEAST_STEPS: Final = 3
"""Fewest timed steps that say how long a step takes."""
_MOST_LINES: Final = 100_000
"""Lines of steps that are read."""
_MILLISECONDS: Final = re.compile(r"time_per_iteration_ms: (?P<number>[\d.]+)(?P<unit>[KM]?)\b")
"""The time in nanotron's line of a step, rounded to three digits; a probe has the clock instead."""
_UNITS: Final = {"": 1e-3, "K": 1.0, "M": 1e3}
_STAMP: Final = re.compile(r"\b(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)[.,](\d{1,6})")
"""When a line was printed; whole seconds are too coarse."""
_BATCH: Final = re.compile(r"global batch size: +(\d+)\b")
"""Megatron's line of a step says the batch, which a ramp-up changes while the job runs."""
_ARGUMENT: Final = re.compile(r"(?:^|\s)([a-z_]+) \.{3,} (\d+)\s*$")
"""A line of the arguments that Megatron prints when it starts."""
_ARGUMENTS: Final[Mapping[str, Callable[[ModelShape, Layout], int]]] = {
    "tensor_model_parallel_size": lambda _, layout: layout.tp,
    "pipeline_model_parallel_size": lambda _, layout: layout.pp,
    "micro_batch_size": lambda _, layout: layout.micro_batch_size,
    "seq_length": lambda model, _: model.seq_length,
}
"""Those that are compared with the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLog:
    """What a log says of a job's steps."""

    file: str
    step_time_s: float
    """Median of the timed steps."""
    step_time_low_s: float
    """Lower quartile."""
    step_time_high_s: float
    """Upper quartile."""
    num_steps: int
    """Timed steps: those after the warm-up that trained."""
    num_warmup: int
    """Steps of warm-up, judged as in a probe."""
    num_runs: int = 1
    """Starts of the trainer in the log; the last one with enough steps counts."""
    peak_memory_bytes: int | None = None
    """Peak of the ranks that print it; None: they do not, or other stages may need more."""


def read_log(path: Path, trainer: str, model: ModelShape, layout: Layout) -> JobLog:
    """Reads the log of a job that ran a layout of a model.

    Steps are found and timed as in a probe (`workers.programs`): the lines are those of the
    adapter's patterns, a line of several steps gives each its mean, the warm-up ends when the times
    settle, and steps that fp16 skipped do not count. Where the trainer was started again the last
    run with enough steps counts.

    Raises:
        JobFileInvalidError: the file cannot be read, the trainer prints no step times, or the log
            has too few of them, or those of another batch or layout.
    """
    adapter = adapter_named(trainer)
    if adapter is None or not adapter.log.variants:
        raise JobFileInvalidError(
            f"no pattern is known of the lines that {trainer} prints for a step: leave --log out, and "
            "probe the job, or import its step time as a table (layout-tuner campaign import)"
        )
    try:
        runs = _runs(path, adapter.log, model, layout)
    except OSError as error:
        raise JobFileInvalidError(f"{path}: cannot be read: {why_unreadable(error)}") from error
    timed = [(_timed(each.steps), each) for each in runs if each.steps.lines] or [
        ((0, ()), runs[0])
    ]
    enough = [each for each in timed if len(each[0][1]) >= LEAST_STEPS]
    (warmup, times_s), found = (enough or timed)[-1]
    run = found.steps
    if len(times_s) < LEAST_STEPS:
        raise JobFileInvalidError(
            f"{path}: {len(times_s)} steps with a step time follow the warm-up, and {LEAST_STEPS} are "
            f"needed; give a longer log of {trainer}"
            + f", in lines such as those of {adapter.log.variants[0].source}"
            * bool(adapter.log.variants[0].source and not len(run))
        )
    _refuse_other(path, found.arguments, model, layout)
    low_s, _, high_s = quartiles(times_s)
    peak = max(line.figures.get("peak_memory_bytes", 0.0) for line in run.lines)
    return JobLog(
        file=path.name,
        step_time_s=median(times_s),
        step_time_low_s=low_s,
        step_time_high_s=high_s,
        num_steps=len(times_s),
        num_warmup=warmup,
        num_runs=len(timed),
        peak_memory_bytes=int(peak) if peak >= 1 and layout.pp == 1 else None,
    )


@dataclass(kw_only=True, slots=True)
class _TrainerRun:
    """One start of the trainer."""

    steps: RankSteps = field(
        default_factory=lambda: RankSteps(most=_MOST_LINES, ranks_share_output=True)
    )
    arguments: dict[str, int] = field(default_factory=dict)
    """Those of `_ARGUMENTS` that it printed."""


def _refuse_other(
    path: Path, arguments: Mapping[str, int], model: ModelShape, layout: Layout
) -> None:
    """Refuses the log of another layout."""
    own = {name: of(model, layout) for name, of in _ARGUMENTS.items()}
    other = [f"{name} {each}" for name, each in arguments.items() if each != own[name]]
    if other:
        has = listed([f"{own[each.split()[0]]}" for each in other], 5)
        raise JobFileInvalidError(
            f"{path}: its trainer ran with {listed(other, 5)}, and the job has {has}: it is the log of "
            "another job"
        )


def _runs(
    path: Path, patterns: LogPatterns, model: ModelShape, layout: Layout
) -> Sequence[_TrainerRun]:
    """The steps of each start of the trainer."""
    tokens = layout.global_batch_size * model.seq_length / layout.num_devices
    runs, skipped, num_lines = [_TrainerRun()], 0, 0
    other_batch = 0
    for number, text in enumerate(_lines(path), 1):
        try:
            found = patterns.find(text)
        except ValueError as error:
            raise JobFileInvalidError(f"{path}: line {number}: {error}") from error
        _take_argument(runs, text)
        if found is None:
            skipped += says_skipped(text)
            continue
        if (said := _BATCH.search(text)) and int(said[1]) != layout.global_batch_size:
            other_batch = int(said[1])
            continue
        figures = {**({"skipped": float(skipped)} if skipped else {}), **found[1]}
        skipped = 0
        figures = in_seconds_and_bytes(figures, tokens)
        if stated := _MILLISECONDS.search(text):
            figures["step_time_s"] = float(stated["number"]) * _UNITS[stated["unit"]]
        at_s = _printed_at(text)
        if not 0 < figures.get("step_time_s", 0.0) < math.inf:
            figures.pop("step_time_s", None)
            if at_s is None:
                continue
        line = StepLine(
            since_start_s=at_s or 0.0, figures=figures, repeats_first=found[0].repeats_first
        )
        try:
            runs[-1].steps.add(line)
        except StepNumberError:
            runs.append(_TrainerRun(arguments=runs[-1].arguments))
            _add(runs[-1].steps, line, path, number)
        num_lines += 1
        if num_lines == _MOST_LINES:
            break
    if other_batch and not num_lines:
        raise JobFileInvalidError(
            f"{path}: its steps have a global batch of {other_batch}, and the job has "
            f"{layout.global_batch_size}: it is the log of another job; state the batch with "
            f"--set global_batch_size={other_batch} where the file is wrong"
        )
    return runs


def _take_argument(runs: list[_TrainerRun], text: str) -> None:
    """Takes an argument that the trainer prints; behind steps it belongs to its next start."""
    if (given := _ARGUMENT.search(text)) and given[1] in _ARGUMENTS:
        if runs[-1].steps.lines:
            runs.append(_TrainerRun())
        runs[-1].arguments[given[1]] = int(given[2])


def _printed_at(text: str) -> float | None:
    """Seconds since 1970 at which a line was printed, in some zone; None: it does not say."""
    if (found := _STAMP.search(text)) is None:
        return None
    with suppress(ValueError):
        at = datetime.fromisoformat(f"{found[1]}T{found[2]}").replace(tzinfo=UTC)
        return at.timestamp() + float(f"0.{found[3]}")
    return None


def _add(run: RankSteps, line: StepLine, path: Path, number: int) -> None:
    try:
        run.add(line)
    except StepNumberError as error:
        raise JobFileInvalidError(f"{path}: line {number}: {error}") from error


def _lines(path: Path) -> Iterator[str]:
    """The lines of a file, longer ones in pieces."""
    with path.open(encoding="utf-8", errors="replace") as file:
        while text := file.readline(LONGEST_LINE):
            yield text


def _timed(run: RankSteps) -> tuple[int, Sequence[float]]:
    """Steps of warm-up, and the seconds of those that are timed."""
    times_s = [run.seconds(step) for step in range(len(run))]
    warmup = num_warmup(times_s, at_least=MIN_WARMUP, ends=run.ends)
    if warmup is None:
        return len(times_s), ()
    return warmup, [
        seconds for step, seconds in enumerate(times_s[warmup:], warmup) if not run.is_skipped(step)
    ]
