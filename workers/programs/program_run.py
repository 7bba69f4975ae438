"""A probe with a program: the job of its ranks, their steps, and its measurement."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any, Final, Self

from layout_tuner.documents.reading import word_of
from layout_tuner.predictions.statistics.early_stop import shows_enough
from layout_tuner.predictions.statistics.rank_steps import (
    MEMORY_UNITS,
    RankSteps,
    StepLine,
    StepNumberError,
    in_seconds_and_bytes,
)
from layout_tuner.predictions.statistics.step_times import (
    MAX_EXTRA_WARMUP,
    has_settled,
    num_warmup,
    quartiles,
)
from layout_tuner.protocol.measurement import Iteration, IterationKind, Measurement, TokenSource
from layout_tuner.protocol.outcome import FailureReason, ProbeRequest
from layout_tuner.search_spaces.throughput import Throughput
from layout_tuner.trainers.adapter import INITIAL_LOSS_SCALE, TrainerJob
from layout_tuner.trainers.log_patterns import LogPatterns, StepPattern
from layout_tuner.trainers.parameters import parameter_texts
from layout_tuner.trainers.placeholders import placeholder_values
from layout_tuner.trainers.program import ARGUMENTS, LAYOUT_ARGUMENTS, ProgramTrainer
from layout_tuner.trainers.trainer_knob import RanCheck
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
_LEAST_DIFFERENCE_S: Final = 0.05
"""Smaller differences are the clock's and the scheduler's."""


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
    log: LogPatterns
    """How the program prints its steps."""
    paths: Mapping[str, str]
    """The directory that each path among the values must lie in, by the value's name."""
    memory_limit_bytes: int | None
    """Memory of each rank's device; None: no limit."""
    ran: tuple[RanCheck, ...] = ()
    """How the log says that a setting of the job was dropped."""

    @classmethod
    def of(cls, task: RankTask) -> Self:
        values = task.job[PROGRAM]
        log = LogPatterns(variants=tuple(StepPattern(**each) for each in values["log"]["variants"]))
        ran = tuple(RanCheck(**each) for each in values["ran"])
        return cls(**{**values, "command": tuple(values["command"]), "log": log, "ran": ran})

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
    job, adapter = job_of(request), trainer.of
    if reasons := [*adapter.refusals(job), *adapter.all_lacking(job).values()]:
        raise ResultRefusedError("unsupported", "; ".join(reasons))
    items = {ARGUMENTS: adapter.arguments, LAYOUT_ARGUMENTS: adapter.placement_arguments}
    given: dict[str, str] = {}
    variables = adapter.environment(job)
    of_variables = {name: f"_variable_{place}" for place, name in enumerate(variables)}
    settings = {
        name: word_of(knob.knob.value_of(job.layout.job))
        for name, knob in trainer.added_knobs.items()
    }
    command: list[str] = [*trainer.container]
    for word in trainer.command:
        if word not in items:
            command.append(word)
            continue
        names = {f"_argument_{len(given) + at}": each for at, each in enumerate(items[word](job))}
        command += [f"{{{name}}}" for name in names]
        given |= names
    steps = request.warmup + MAX_EXTRA_WARMUP + request.iterations
    values = {
        **placeholder_values(job),
        **settings,
        **parameter_texts(trainer.parameters, request.parameters),
        "steps": str(steps),
        "_least_steps": str(request.warmup + request.iterations),  # no parameter has such a name
        "trainers_directory": trainer.directory,
        **given,
        **{of_variables[name]: value for name, value in variables.items()},
    }
    return ProgramTask(
        command=tuple(command),
        environment={
            **trainer.environment,
            **{name: f"{{{value}}}" for name, value in of_variables.items()},
        },
        working_directory=trainer.working_directory,
        values=values,
        configuration=trainer.configured(job, steps),
        log=trainer.patterns,
        memory_limit_bytes=request.memory_limit_bytes,
        ran=tuple(adapter.ran_checks(job)),
        paths={
            name: each.below for name, each in trainer.parameters.items() if each.type == "path"
        },
    )


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
        self._reports: dict[str, dict[int, RankSteps]] = {"report": {}, "log": {}}
        self._most = request.warmup + MAX_EXTRA_WARMUP + request.iterations
        self._unmatched: Document = {"likeness": -1}
        """The lines that are nearest to a pattern, of the rank whose are."""
        self._started: float | None = None
        """When the ranks had been started; None: the machine's peak is still measured."""
        self._num_sent = 0
        self._sampled_bytes = 0
        self._wrong: tuple[FailureReason, str] | None = None
        self.step_times_s: list[float] = []
        """The time of each step that all reporting ranks have reported: the longest that a rank
        reported, or else that passed between its reports."""
        self._is_skipped: list[bool] = []
        """Of the same steps, whether a rank reported that it did not train."""

    def take(self, event: Document) -> None:
        match event["event"]:
            case "iteration":
                self._sampled_bytes = max(self._sampled_bytes, event["sampled_bytes"])
                for step in self._new_steps(event["source"], self._add(event)):
                    self._on_event(step)
            case "unmatched":
                self._unmatched = max(event, self._unmatched, key=lambda said: said["likeness"])
            case _:
                self._started = time.monotonic()
                self._on_event(event)

    def _add(self, event: Document) -> int:
        """Adds a line or a report; returns the first step that is new or has changed."""
        figures = {name: float(value) for name, value in event["figures"].items()}
        if figures.get("skipped", 0.0) > 0 and not math.isfinite(figures.get("loss", 0.0)):
            del figures["loss"]  # the gradient that overflowed may have come of it
        rank, of_source = event["reporter"], self._reports[event["source"]]
        if (wrong := _wrong_figures(event, figures)) is None:
            if rank not in of_source:
                of_source[rank] = RankSteps(
                    most=self._most,
                    ranks_share_output=self._trainer.processes_per == "node",
                )
            line = StepLine(
                since_start_s=event["since_start_s"],
                figures=in_seconds_and_bytes(
                    figures, self._assumed_tokens / self.request.layout.num_devices
                ),
                others=event.get("others"),
                repeats_first=event.get("repeats_first", False),
            )
            try:
                return of_source[rank].add(line)
            except StepNumberError as error:
                wrong = "implausible", f"rank {rank}: {error}"
        self._wrong = self._wrong or wrong
        return 0

    def _new_steps(self, source: str, changed: int) -> Iterator[Document]:
        """The steps that all reporting ranks have reported now, as events."""
        by_rank = self._by_rank
        if by_rank is self._reports[source]:
            del self.step_times_s[changed:], self._is_skipped[changed:]
        while self._wrong is None and all(
            len(steps) > len(self.step_times_s) for steps in by_rank.values()
        ):
            index = len(self.step_times_s)
            step_time_s = max(steps.seconds(index) for steps in by_rank.values())
            self.step_times_s.append(step_time_s)
            self._is_skipped.append(any(steps.is_skipped(index) for steps in by_rank.values()))
            if index >= self._num_sent:
                self._num_sent = index + 1
                is_warm_up = self._num_warmup is None or index < self._num_warmup
                yield {
                    "event": "iteration",
                    "index": index,
                    "kind": "warmup" if is_warm_up else "timed",
                    "step_time_s": step_time_s,
                }

    @property
    def _by_rank(self) -> Mapping[int, RankSteps]:
        """The steps by rank: those of `report_step`, or else those that the log shows."""
        return self._reports["report"] or self._reports["log"]

    @property
    def _assumed_tokens(self) -> int:
        return self.request.layout.global_batch_size * self.request.model.seq_length

    @property
    def _ends(self) -> list[int]:
        """Steps up to the end of each line: warm-up and timing meet where a line ends."""
        num = len(self.step_times_s)
        by_rank = [steps.ends[: bisect_right(steps.ends, num)] for steps in self._by_rank.values()]
        if not by_rank or all(ends == by_rank[0] for ends in by_rank):
            return by_rank[0] if by_rank else []
        return sorted(set(by_rank[0]).intersection(*by_rank[1:]))

    @property
    def _num_warmup(self) -> int | None:
        """Steps of warm-up; None: it has not ended."""
        return num_warmup(self.step_times_s, at_least=self.request.warmup, ends=self._ends)

    def _trained(self, after: int) -> Sequence[int]:
        """The steps after the first ones that changed the weights, at most those asked for."""
        steps = range(after, len(self.step_times_s))
        if not any(self._is_skipped):
            return steps[: self.request.iterations]
        return [step for step in steps if not self._is_skipped[step]][: self.request.iterations]

    @property
    def is_enough(self) -> bool:
        """Whether all requested steps were timed, or they show that the layout is slower.

        Also where the program goes on although it has reported all the steps that it was to run.
        """
        warmup = self._num_warmup
        if warmup is None:
            return False
        timed = self._trained(warmup)
        if len(timed) == self.request.iterations or len(self.step_times_s) >= self._most:
            return True
        return self._shows_enough(timed)

    def _shows_enough(self, timed: Sequence[int]) -> bool:
        above_s, ends = self.request.stop_above_step_time_s, set(self._ends)
        if above_s is None:
            return False
        # A line is one observation, however many steps it stands for.
        return shows_enough(
            [self.step_times_s[step] for step in timed if step + 1 in ends], above_s
        )

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
            + self._nearest
        )

    @property
    def _nearest(self) -> str:
        """A pattern of the log and the lines that are nearest to it; empty: there are none."""
        if not (lines := self._unmatched.get("lines")):
            return ""
        of = f" of {self._unmatched['source']}" if self._unmatched["source"] else ""
        said = ", ".join(repr(each) for each in lines)
        return (
            f"; the pattern{of} is '{self._unmatched['pattern']}', and the nearest lines that it does "
            f"not match are {said}"
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

        `peak_again` returns a better peak where the known one is exceeded.

        Raises:
            ResultRefusedError: there are too few steps, or the reports contradict each other or the
                clock.
            OutcomeInvalidError: the figures contradict each other.
        """
        warmup, timed = self._warmup_and_timed()
        last, times_s = timed[-1] + 1, [self.step_times_s[step] for step in timed]
        self._refuse_another_clock(last)
        tokens, source = self._tokens(timed)
        step_time_s = median(times_s)
        speed = Throughput(
            model=self.request.model,
            layout=self.request.layout,
            tokens_per_s=tokens / step_time_s,
            peak_tflops_per_device=peak_tflops,
        )
        if speed.hfu > 1:
            speed = replace(speed, peak_tflops_per_device=peak_again())
        peak_bytes, memory_kind = self._memory()
        counted = set(timed)
        q25_s, _, q75_s = quartiles(times_s)
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
            iterations=tuple(self._iteration(index, index in counted) for index in range(last)),
            warmup_settled=has_settled(
                [self.step_times_s[end - 1] for end in self._ends if end <= warmup]
            ),
            skipped_steps=self._skipped_steps(last),
            shortened=len(timed) < self.request.iterations,
            iterations_asked=self.request.iterations,
            trainer=self._trainer.name,
            trainer_version=self._trainer.version,
            tokens=source,
            losses_comparable=self._trainer.same_data,
            others_share=self._others_share(warmup, last),
        )

    def _warmup_and_timed(self) -> tuple[int, Sequence[int]]:
        """Steps of warm-up, and those that are timed; steps that were skipped are not.

        A program that ends early gets the shorter warm-up.
        """
        request, warmup = self.request, self._num_warmup
        if warmup is not None:
            timed = self._trained(warmup)
            if len(timed) == request.iterations or self._shows_enough(timed):
                return warmup, timed
        for end in reversed(self._ends):
            if end >= request.warmup and len(timed := self._trained(end)) == request.iterations:
                return end, timed
        raise self._too_few()

    def _too_few(self) -> ResultRefusedError:
        asked, after = self.request.iterations, self._is_skipped[self.request.warmup :]
        if len(after) >= asked and (num := sum(after)):
            scales = [
                scale
                for steps in self._by_rank.values()
                if (scale := steps.lines[-1].figures.get("loss_scale")) is not None
            ]
            at_end = f" (it was {scales[0]:.15g} at the end)" if scales else ""
            which = f"all {num}" if num == len(after) else f"{num} of the {len(after)}"
            return ResultRefusedError(
                "diverged",
                f"{which} steps after the warm-up were skipped, since their gradients overflowed in "
                f"fp16, and {asked} that train are needed: the loss scale had not come down{at_end}; "
                f"let it start at {INITIAL_LOSS_SCALE} (--initial-loss-scale {INITIAL_LOSS_SCALE} of "
                "Megatron-LM, initial_scale_power 16 of DeepSpeed), or ask for more warm-up, or for "
                "precision=bf16",
            )
        counts = {rank: len(steps) for rank, steps in sorted(self._by_rank.items())}
        said = ", ".join(f"rank {rank}: {num}" for rank, num in [*counts.items()][:4])
        return ResultRefusedError(
            "crashed",
            f"the program ended with too few steps reported ({said or 'none'}); "
            f"{self.request.warmup} + {asked} are needed: let it run {{steps}} steps, and report "
            "each with layout_tuner.report_step or in a line that the log pattern matches, with a "
            f"log interval of 1{self._nearest}",
        )

    def _refuse_another_clock(self, last: int) -> None:
        """Refuses step times that the time between the reports contradicts."""
        for rank, steps in sorted(self._by_rank.items()):
            first = steps.ends[0]  # before the first line is the start of the program
            stated_s = sum(steps.seconds(step) for step in range(first, last))
            seen_s = sum(steps.clock_s(step) for step in range(first, last))
            if abs(stated_s - seen_s) <= _LEAST_DIFFERENCE_S:
                continue
            # Lines of a log may arrive late, all together; reports carry their time.
            is_short = stated_s < _SHORTEST_SHARE * seen_s
            longest_s = seen_s if self._reports["report"] else steps.line_of(last - 1).since_start_s
            is_long = stated_s > _LONGEST_SHARE * longest_s + _LEAST_DIFFERENCE_S
            if is_short or is_long or stated_s <= 0:
                mean = (
                    ", the mean of the steps of a line" if steps.ends[-1] > len(steps.ends) else ""
                )
                raise ResultRefusedError(
                    "implausible",
                    f"rank {rank} reported {stated_s:.4g} s for {last - first} steps, and {seen_s:.4g} "
                    f"s passed between its reports: report the whole step, in seconds{mean}",
                )

    def _tokens(self, timed: Sequence[int]) -> tuple[int, TokenSource]:
        """Tokens of a step of the whole job, on average, and where they come from."""
        counts = []
        for step in timed:
            by_rank = {
                rank: figures["tokens"]
                for rank, steps in self._by_rank.items()
                if "tokens" in (figures := steps.line_of(step).figures)
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

    def _skipped_steps(self, last: int) -> int | None:
        """Steps that were skipped among the first ones; None: no line says whether any was."""
        by_rank = [
            sum(found)
            for steps in self._by_rank.values()
            if (found := [n for n in map(steps.skipped, steps.lines_until(last)) if n is not None])
        ]
        return min(max(by_rank), last) if by_rank else None

    def _others_share(self, warmup: int, last: int) -> float | None:
        """What others took during the timed steps, of the rank of which they took most."""
        shares = []
        for steps in self._by_rank.values():
            before, after = steps.line_of(warmup - 1).others, steps.line_of(last - 1).others
            if before is not None and after is not None:
                shares.append(share_of(after[0] - before[0], after[1] - before[1]))
        return max((share for share in shares if share is not None), default=None)

    def _memory(self) -> tuple[int, str]:
        """The largest peak of a rank in bytes, and its kind: as reported, or else as sampled."""
        lines = [line for steps in self._by_rank.values() for line in steps.lines]
        largest = max((line.figures.get("peak_memory_bytes", 0.0) for line in lines), default=0.0)
        if largest >= 1:
            return int(largest), "reported"
        if self._sampled_bytes:
            return self._sampled_bytes, "sampled"
        raise ResultRefusedError(
            "unsupported",
            "the program reports no peak_memory_bytes, and the devices' memory in use cannot be read "
            "on this node; report it",
        )

    def _iteration(self, index: int, is_timed: bool) -> Iteration:
        kind: IterationKind = "timed" if is_timed else "warmup"
        losses = [steps.loss(index) for steps in self._by_rank.values()]
        known = [loss for loss in losses if loss is not None]
        return Iteration(
            index=index,
            kind=kind,
            step_time_s=self.step_times_s[index],
            loss=fmean(known) if known else None,
            grad_norm=None,
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
    for name in ("tokens", "skipped", "skipped_total", *MEMORY_UNITS):
        if not 0 <= figures.get(name, 0.0) <= _LARGEST:
            return "implausible", f"{where}: {name} is {figures[name]:g}"
    for name in ("step_time_s", "step_time_ms", "tokens_per_s_per_device"):
        value = figures.get(name, 1.0)
        if not (math.isfinite(value) and value > 0):
            return "implausible", f"{where}: {name} is {value:g}, not a number over 0"
    return None
