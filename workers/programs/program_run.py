"""A probe with a program: the job of its ranks, their steps, and its measurement."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any, Final, Self

from layout_tuner.predictions.statistics.early_stop import shows_enough
from layout_tuner.predictions.statistics.step_times import (
    MAX_EXTRA_WARMUP,
    has_settled,
    num_warmup,
    quartiles,
)
from layout_tuner.protocol.measurement import Iteration, IterationKind, Measurement, TokenSource
from layout_tuner.protocol.outcome import FailureReason, ProbeRequest
from layout_tuner.search_spaces.throughput import Throughput
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.parameters import parameter_texts
from layout_tuner.trainers.placeholders import placeholder_values
from layout_tuner.trainers.program import ARGUMENTS, ProgramTrainer
from layout_tuner.workers.ranks.json_lines import Document
from layout_tuner.workers.ranks.rank_task import RankTask
from layout_tuner.workers.ranks.scratch import PROGRAM
from layout_tuner.workers.trainer.disturbance import share_of

_SHORTEST_SHARE: Final = 0.5
"""A program whose steps take less than this share of the time between its reports does not report
whole steps, or not in seconds."""
_LONGEST_SHARE: Final = 1.2
_LARGEST: Final = 1e15
"""More bytes than a device has, more tokens than a step, and more than any loss."""
_LEAST_TOLD_S: Final = 0.05
"""Differences below this are the clock's and the scheduler's."""


class ResultRefusedError(Exception):
    """The program's reports cannot be a measurement."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramTask:
    """What a rank runs: templates of the trainer's entry, and the values for them."""

    command: tuple[str, ...]
    """Container, program and arguments; placeholders are not filled."""
    environment: Mapping[str, str]
    """Variables; placeholders are not filled."""
    working_directory: str
    """Empty: the rank's own directory."""
    values: Mapping[str, str]
    """Values of the placeholders that are the same for every rank."""
    configuration: Mapping[str, Any]
    """The adapter's configuration of the layout, for {values_file}."""
    step_pattern: str
    """How the program prints its steps; empty: it does not."""
    paths: Mapping[str, str]
    """The directory that each path among the values must lie in, by the value's name."""
    memory_limit_bytes: int | None
    """Memory of each rank's device; None: no limit."""

    @classmethod
    def of(cls, task: RankTask) -> Self:
        values = task.job[PROGRAM]
        return cls(**{**values, "command": tuple(values["command"])})

    def to_job(self) -> dict[str, Any]:
        return {"kind": PROGRAM, PROGRAM: asdict(self)}


def job_of(request: ProbeRequest) -> TrainerJob:
    return TrainerJob(
        model=request.model,
        layout=request.layout,
        seed=request.seed,
        warmup=request.warmup,
        compile=request.compile,
        balanced_routing=request.balanced_routing,
    )


def program_task(request: ProbeRequest, trainer: ProgramTrainer) -> ProgramTask:
    """The job of the ranks of a probe.

    Raises:
        ParameterInvalidError: the campaign's parameters are not those of the trainer.
        ResultRefusedError: the trainer refuses the layout.
    """
    job = job_of(request)
    if reasons := [*trainer.of.all_lacking(job).values(), *trainer.of.every_refusal(job)]:
        raise ResultRefusedError("unsupported", "; ".join(reasons))
    given = {f"_argument_{place}": each for place, each in enumerate(trainer.of.arguments(job))}
    command: list[str] = [*trainer.container]
    for word in trainer.command:
        command += [f"{{{name}}}" for name in given] if word == ARGUMENTS else [word]
    values = {
        **placeholder_values(job),
        **parameter_texts(trainer.parameters, request.parameters),
        "steps": str(request.warmup + MAX_EXTRA_WARMUP + request.iterations),
        "_least_steps": str(request.warmup + request.iterations),  # no parameter has such a name
        "trainers_directory": trainer.directory,
        **given,
    }
    return ProgramTask(
        command=tuple(command),
        environment=trainer.environment,
        working_directory=trainer.working_directory,
        values=values,
        configuration=dict(trainer.of.values(job)),
        step_pattern=trainer.patterns.step,
        memory_limit_bytes=request.memory_limit_bytes,
        paths={
            name: each.below for name, each in trainer.parameters.items() if each.type == "path"
        },
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Report:
    """A rank's report of a step."""

    since_start_s: float
    figures: Mapping[str, float]
    """NaN and infinity are possible."""
    others: tuple[float, float] | None
    """Seconds that others took of a core, and that it was watched, so far; None: it is not."""


class ProgramRun:
    """Collects the steps of a program's ranks, and decides when enough have been measured.

    Only the thread that runs the probe uses it.

    `on_event` is called with {"event": "listening"} and with each step of the whole job.
    """

    def __init__(
        self, request: ProbeRequest, trainer: ProgramTrainer, on_event: Callable[[Document], None]
    ) -> None:
        self.request = request
        self._trainer = trainer
        self._on_event = on_event
        self._reports: dict[str, dict[int, list[_Report]]] = {
            source: defaultdict(list) for source in ("report", "log")
        }
        self._started: float | None = None
        """When the ranks had been started; None: the machine's peak is still measured."""
        self._num_told = 0
        self._sampled_bytes = 0
        self._wrong: tuple[FailureReason, str] | None = None
        self.step_times_s: list[float] = []
        """The time of each step that all reporting ranks have reported: the longest that a rank
        reported, or else that passed between its reports."""

    def take(self, event: Document) -> None:
        if event["event"] != "iteration":
            self._started = time.monotonic()
            return self._on_event(event)
        figures = {name: float(value) for name, value in event["figures"].items()}
        self._sampled_bytes = max(self._sampled_bytes, event["sampled_bytes"])
        self._reports[event["source"]][event["reporter"]].append(
            _Report(
                since_start_s=event["since_start_s"], figures=figures, others=event.get("others")
            )
        )
        self._wrong = self._wrong or _wrong_figures(event, figures)
        for step in self._new_steps(event):
            self._on_event(step)
        return None

    def _new_steps(self, event: Document) -> Iterator[Document]:
        """The steps that all reporting ranks have reported now, as events."""
        by_rank = self._by_rank
        if event["index"] == 0:  # of a rank that had not reported yet, or the log's are replaced
            self.step_times_s.clear()
        while self._wrong is None and all(
            len(reports) > len(self.step_times_s) for reports in by_rank.values()
        ):
            index = len(self.step_times_s)
            step_time_s = max(self._seconds(reports, index) for reports in by_rank.values())
            self.step_times_s.append(step_time_s)
            if index >= self._num_told:
                self._num_told = index + 1
                is_warm_up = self._num_warmup is None or index < self._num_warmup
                yield {
                    "event": "iteration",
                    "index": index,
                    "kind": "warmup" if is_warm_up else "timed",
                    "step_time_s": step_time_s,
                }

    @property
    def _by_rank(self) -> Mapping[int, list[_Report]]:
        """The reports by rank: those of `report_step`, or else those that the log shows."""
        return self._reports["report"] or self._reports["log"]

    def _seconds(self, reports: list[_Report], step: int) -> float:
        figures = reports[step].figures
        if "step_time_s" in figures:
            return figures["step_time_s"]
        if "step_time_ms" in figures:
            return figures["step_time_ms"] / 1e3
        if (rate := figures.get("tokens_per_s_per_device", 0.0)) > 0:
            return self._assumed_tokens / rate / self.request.layout.num_devices
        return _between(reports, step)

    @property
    def _assumed_tokens(self) -> int:
        return self.request.layout.global_batch_size * self.request.model.seq_length

    @property
    def _num_warmup(self) -> int | None:
        """Steps of warm-up; None: it has not ended."""
        return num_warmup(self.step_times_s, at_least=self.request.warmup)

    @property
    def is_enough(self) -> bool:
        """Whether all requested steps were timed, or they show that the layout is slower."""
        warmup = self._num_warmup
        if warmup is None:
            return False
        timed_s = self.step_times_s[warmup:]
        above_s = self.request.stop_above_step_time_s
        if len(timed_s) >= self.request.iterations:
            return True
        return above_s is not None and shows_enough(timed_s, above_s)

    def problem(self) -> tuple[FailureReason, str] | None:
        """Why the probe must end as a failure; None: it may go on."""
        if self._wrong is not None:
            return self._wrong
        limit_s = self._trainer.start_limit_s
        if limit_s is None or self._by_rank or self._started is None:
            return None
        if time.monotonic() - self._started < limit_s:
            return None
        return "timeout", (
            f"the program reported no step within its start limit of {limit_s:g} s; does it call "
            "layout_tuner.report_step, or print lines that the log pattern of its entry matches?"
        )

    def measurement(
        self,
        *,
        peak_tflops: float,
        peak_source: str,
        peak_again: Callable[[], float],
        oversubscribed: bool,
    ) -> Measurement:
        """What was measured, once the program has ended or `is_enough`.

        `peak_again` tells the better peak, where the one that is known is exceeded.

        Raises:
            ResultRefusedError: there are too few steps, or the reports contradict each other or the
                clock.
            OutcomeInvalidError: the figures contradict each other.
        """
        warmup, times_s = self._warmup_and_times()
        num_timed = min(len(times_s) - warmup, self.request.iterations)
        last = warmup + num_timed
        self._refuse_another_clock(last)
        tokens, source = self._tokens(warmup, last)
        step_time_s = median(times_s[warmup:last])
        speed = Throughput(
            model=self.request.model,
            layout=self.request.layout,
            tokens_per_s=tokens / step_time_s,
            peak_tflops_per_device=peak_tflops,
        )
        if speed.hfu > 1:
            speed = replace(speed, peak_tflops_per_device=peak_again())
        peak_bytes, memory_kind = self._memory()
        q25_s, _, q75_s = quartiles(times_s[warmup:last])
        return Measurement(
            step_time_s=step_time_s,
            step_time_q25_s=q25_s,
            step_time_q75_s=q75_s,
            tokens_per_step=tokens,
            **speed.figures,
            peak_source=peak_source,
            peak_memory_bytes=peak_bytes,
            peak_memory_bytes_by_stage=(),
            memory_kind=memory_kind,
            oversubscribed=oversubscribed,
            iterations=tuple(self._iteration(index, times_s, warmup) for index in range(last)),
            warmup_settled=has_settled(times_s[:warmup]),
            shortened=num_timed < self.request.iterations,
            iterations_asked=self.request.iterations,
            trainer=self._trainer.name,
            trainer_version=self._trainer.version,
            tokens=source,
            losses_comparable=self._trainer.same_data,
            others_share=self._others_share(warmup, last),
        )

    def _warmup_and_times(self) -> tuple[int, list[float]]:
        """Steps of warm-up and all times; a program that ends early gets the shorter warm-up."""
        times_s, asked = self.step_times_s, self.request.iterations
        if self.is_enough:
            assert self._num_warmup is not None
            return self._num_warmup, times_s
        if len(times_s) >= self.request.warmup + asked:
            return len(times_s) - asked, times_s
        counts = {rank: len(reports) for rank, reports in sorted(self._by_rank.items())}
        said = ", ".join(f"rank {rank}: {num}" for rank, num in [*counts.items()][:4])
        raise ResultRefusedError(
            "crashed",
            f"the program ended with too few steps reported ({said or 'none'}); "
            f"{self.request.warmup} + {asked} are needed: let it run {{steps}} steps, and report "
            "each with layout_tuner.report_step or in a line that the log pattern matches",
        )

    def _refuse_another_clock(self, last: int) -> None:
        """Refuses step times that the time between the reports contradicts."""
        for rank, reports in sorted(self._by_rank.items()):
            told_s = sum(self._seconds(reports, step) for step in range(1, last))
            seen_s = sum(_between(reports, step) for step in range(1, last))
            if abs(told_s - seen_s) <= _LEAST_TOLD_S:
                continue
            # Lines of a log may arrive late, all together; reports carry their time.
            is_short = told_s < _SHORTEST_SHARE * seen_s
            longest_s = seen_s if self._reports["report"] else reports[last - 1].since_start_s
            is_long = told_s > _LONGEST_SHARE * longest_s + _LEAST_TOLD_S
            if is_short or is_long or told_s <= 0:
                raise ResultRefusedError(
                    "implausible",
                    f"rank {rank} reported {told_s:.4g} s for {last - 1} steps, and {seen_s:.4g} s "
                    "passed between its reports: report the whole step, in seconds",
                )

    def _tokens(self, first: int, last: int) -> tuple[int, TokenSource]:
        """Tokens of a step of the whole job, on average, and where they come from."""
        counts = []
        for step in range(first, last):
            by_rank = {
                rank: reports[step].figures["tokens"]
                for rank, reports in self._by_rank.items()
                if "tokens" in reports[step].figures
            }
            if len(set(by_rank.values())) > 1:
                said = ", ".join(f"rank {rank}: {n:g}" for rank, n in sorted(by_rank.items())[:4])
                raise ResultRefusedError(
                    "implausible",
                    f"the ranks disagree about the tokens of iteration {step} ({said}); report those "
                    "of the whole job, or let one rank report",
                )
            counts += list(by_rank.values())[:1]
        if not counts:
            return self._assumed_tokens, "assumed"
        return round(fmean(counts)), "counted"

    def _others_share(self, warmup: int, last: int) -> float | None:
        """What others took during the timed steps, of the rank of which they took most."""
        shares = []
        for reports in self._by_rank.values():
            before, after = reports[warmup - 1].others, reports[last - 1].others
            if before is not None and after is not None:
                shares.append(share_of(after[0] - before[0], after[1] - before[1]))
        return max((share for share in shares if share is not None), default=None)

    def _memory(self) -> tuple[int, str]:
        """The largest peak of a rank in bytes, and its kind: as reported, or else as sampled."""
        scales = {"peak_memory_bytes": 1, "peak_memory_mib": 1 << 20, "peak_memory_gib": 1 << 30}
        reported = [
            report.figures[name] * scale
            for reports in self._by_rank.values()
            for report in reports
            for name, scale in scales.items()
            if name in report.figures
        ]
        largest = max(reported, default=0.0)
        if largest >= 1:
            return int(largest), "reported"
        if self._sampled_bytes:
            return self._sampled_bytes, "sampled"
        raise ResultRefusedError(
            "unsupported",
            "the program reports no peak_memory_bytes, and the devices' memory in use cannot be read "
            "on this node; report it",
        )

    def _iteration(self, index: int, times_s: list[float], warmup: int) -> Iteration:
        kind: IterationKind = "warmup" if index < warmup else "timed"
        losses = [
            reports[index].figures["loss"]
            for reports in self._by_rank.values()
            if "loss" in reports[index].figures
        ]
        loss = fmean(losses) if losses else None
        return Iteration(
            index=index, kind=kind, step_time_s=times_s[index], loss=loss, grad_norm=None
        )


def _wrong_figures(
    event: Document, figures: Mapping[str, float]
) -> tuple[FailureReason, str] | None:
    """Why a report ends the probe; None: it does not."""
    where = f"rank {event['reporter']}, iteration {event['index']}"
    loss = figures.get("loss", 0.0)
    if not math.isfinite(loss):
        return "diverged", f"{where}: loss is {loss}"
    if not 0 <= loss <= _LARGEST:
        return "implausible", (
            f"{where}: loss is {loss:g}; report the mean loss in nats a token, or none"
        )
    for name in ("tokens", "peak_memory_bytes", "peak_memory_mib", "peak_memory_gib"):
        if not 0 <= figures.get(name, 0.0) <= _LARGEST:
            return "implausible", f"{where}: {name} is {figures[name]:g}"
    for name in ("step_time_s", "step_time_ms", "tokens_per_s_per_device"):
        value = figures.get(name, 1.0)
        if not (math.isfinite(value) and value > 0):
            return "implausible", f"{where}: {name} is {value:g}, not a number over 0"
    return None


def _between(reports: list[_Report], step: int) -> float:
    """Seconds between a report and the one before; before the first, the start of the program."""
    before_s = reports[step - 1].since_start_s if step else 0.0
    return max(reports[step].since_start_s - before_s, 1e-9)
