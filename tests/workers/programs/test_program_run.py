"""The arithmetic of a probe with a program, against figures worked out by hand."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pytest

from layout_tuner.protocol.measurement import Measurement
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.adapter import TrainerRule
from layout_tuner.trainers.command import COMMAND
from layout_tuner.trainers.log_patterns import LogPatterns, StepPattern
from layout_tuner.trainers.parameters import Parameter, ParameterInvalidError
from layout_tuner.trainers.program import ProgramTrainer
from layout_tuner.workers.programs.program_run import (
    ProgramRun,
    ResultRefusedError,
    job_of,
    program_task,
)
from tests.workers.programs.programs import MODEL, make_request

TRAINER = ProgramTrainer(name="theirs", version="7", command=("train", "{steps}"))
GIB = 1 << 30


class Job:
    """What the ranks of a program report, as their supervisors send it."""

    def __init__(self, trainer: ProgramTrainer = TRAINER, **changes: Any) -> None:
        self.told: list[dict[str, Any]] = []
        self.run = ProgramRun(make_request(**changes), trainer, self.told.append)
        self.counts: dict[tuple[str, int], int] = {}
        self.at_s: dict[int, float] = {}
        self.run.take({"event": "listening", "port": 1})
        self.told.clear()

    def report(
        self,
        took_s: float,
        *,
        rank: int = 0,
        source: str = "report",
        sampled: int = GIB,
        others: tuple[float, float] | None = None,
        **said: Any,
    ) -> None:
        """A report `took_s` after the rank's last one."""
        index = self.counts.get((source, rank), 0)
        self.counts[source, rank] = index + 1
        self.at_s[rank] = self.at_s.get(rank, 0.0) + took_s
        self.run.take(
            {
                "event": "iteration",
                "index": index,
                "source": source,
                "reporter": rank,
                "since_start_s": self.at_s[rank],
                "sampled_bytes": sampled,
                "others": others,
                "figures": said,
            }
        )

    def report_all(self, took_s: float, **said: Any) -> Job:
        """As many reports of a rank as a probe needs."""
        for _ in range(5):
            self.report(took_s, **said)
        return self

    def measure(self, **options: Any) -> Measurement:
        peak = {"peak_tflops": 1.0, "peak_source": "a table", "peak_again": lambda: 1.0}
        return self.run.measurement(**{**peak, "oversubscribed": False, **options})

    def refused(self) -> tuple[str, str]:
        with pytest.raises(ResultRefusedError) as refused:
            self.measure()
        return refused.value.reason, str(refused.value)


TWO_REPLICAS = Layout(dp=2, micro_batch_size=3, num_microbatches=5)


def measure_seven(job: Job) -> tuple[list[float], Measurement]:
    """Reports seven steps of 900 tokens on shared devices: their times, and what is measured."""
    times_s = [3.0, 1.0, 1.05, 1.2, 0.9, 1.0, 1.1]
    for each in times_s:
        job.report(each, step_time_s=each, tokens=900, loss=2.5)
    assert job.run.is_enough
    return times_s, job.measure(oversubscribed=True)


def test_throughput_follows_from_the_median_of_the_timed_steps() -> None:
    times_s, measured = measure_seven(Job(layout=TWO_REPLICAS, iterations=4))
    timed = times_s[3:]  # the second and third step differ by less than a tenth
    assert measured.step_time_s == statistics.median(timed)
    assert measured.tokens_per_step == 900
    assert measured.tokens_per_s == pytest.approx(900 / 1.05)
    assert measured.tokens_per_s_per_device == pytest.approx(900 / 1.05 / 2)
    assert [each.kind for each in measured.iterations] == ["warmup"] * 3 + ["timed"] * 4
    assert measured.warmup_settled


def test_a_measurement_says_by_which_trainer_and_how_it_was_made() -> None:
    _, measured = measure_seven(Job(layout=TWO_REPLICAS, iterations=4))
    assert (measured.trainer, measured.trainer_version) == ("theirs", "7")
    assert measured.tokens == "counted"
    assert (measured.oversubscribed, measured.shortened) == (True, False)
    assert not measured.losses_comparable
    assert (measured.peak_memory_bytes, measured.memory_kind) == (GIB, "sampled")


def test_what_others_took_is_of_the_timed_steps_and_of_the_rank_of_which_they_took_most() -> None:
    job = Job(layout=Layout(dp=2))
    for step in range(5):
        for rank, rate in ((0, 0.1), (1, 0.4)):
            # In warm-up, which is not timed, others take everything.
            taken_s = min(step, 1) * 1.0 + max(step - 1, 0) * rate
            job.report(1.0, rank=rank, others=(taken_s, 1.0 * step))
    measured = job.measure()
    assert measured.others_share == pytest.approx(0.4)
    assert measured.throttled is None
    for unknown in (None, (0.0, 0.0)):  # it was not watched, or too short
        job = Job(layout=Layout(dp=2)).report_all(1.0, others=unknown)
        assert job.measure().others_share is None


def test_tokens_count_on_average_or_are_those_of_the_layout_and_marked() -> None:
    job = Job(layout=Layout(micro_batch_size=4))
    for tokens in (1, 1, 100, 120, 125):
        job.report(1.0, step_time_s=1.0, tokens=tokens)
    assert job.measure().tokens_per_step == 115
    layout = Layout(dp=2, micro_batch_size=3, num_microbatches=5)
    measured = Job(layout=layout).report_all(1.0).measure()
    assert measured.tokens_per_step == 2 * 3 * 5 * MODEL.seq_length
    assert measured.tokens == "assumed"
    assert measured.step_time_s == 1.0


def test_the_slowest_rank_the_mean_loss_and_the_largest_memory_count() -> None:
    job = Job()
    for _ in range(5):
        job.report(1.0, rank=0, step_time_s=1.0, loss=2.0, peak_memory_bytes=5 * GIB)
        job.report(1.0, rank=1, step_time_s=1.1, loss=3.0, peak_memory_bytes=7 * GIB)
    measured = job.measure()
    assert measured.step_time_s == 1.1
    assert [each.loss for each in measured.iterations] == [2.5] * 5
    assert (measured.peak_memory_bytes, measured.memory_kind) == (7 * GIB, "reported")
    assert [event["index"] for event in job.told] == list(range(5))


def test_a_step_is_told_once_all_reporting_ranks_have_reported_it() -> None:
    job = Job(iterations=20)
    for index in range(3):
        job.report(1.0, rank=1)
        assert len(job.told) == max(index, 1)
        job.report(1.0, rank=0)
        assert len(job.told) == index + 1
    job.report(1.0, rank=2)  # brings the job back to its first step
    assert len(job.run.step_times_s) == 1
    assert len(job.told) == 3


def test_reports_count_where_the_log_shows_other_figures() -> None:
    job = Job()
    for _ in range(5):
        job.report(0.5, source="log", step_time_s=0.4)
        job.report(0.5, step_time_s=1.0)
    assert job.measure().step_time_s == 1.0


@pytest.mark.parametrize(
    ("said", "measured"),
    [
        ({"step_time_s": 0.75}, {"step_time_s": 0.75}),
        ({"step_time_ms": 750.0}, {"step_time_s": 0.75}),
        ({"tokens_per_s_per_device": 64.0}, {"step_time_s": 0.5}),  # 2 x 32 tokens on 2 devices
        ({}, {"step_time_s": 0.8}),
        ({"peak_memory_mib": 1.5}, {"peak_memory_bytes": 3 << 19}),
        ({"peak_memory_gib": 2.0}, {"peak_memory_bytes": 2 << 30}),
        ({"peak_memory_bytes": 12e6}, {"peak_memory_bytes": 12_000_000}),
    ],
)
def test_a_figure_has_the_unit_of_the_log(
    said: dict[str, float], measured: dict[str, float]
) -> None:
    found = Job().report_all(0.8, source="log", **said).measure()
    assert {name: getattr(found, name) for name in measured} == pytest.approx(measured)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"step_time_s": 0}, "step_time_s is 0, not a number over 0"),
        ({"step_time_ms": "inf"}, "step_time_ms is inf, not a number over 0"),
        ({"tokens_per_s_per_device": "nan"}, "tokens_per_s_per_device is nan, not a number over 0"),
        ({"tokens": -64}, "tokens is -64"),
        ({"tokens": "inf"}, "tokens is inf"),
        ({"loss": -1.0}, "loss is -1; report the mean loss in nats a token, or none"),
        ({"loss": 1.7e308}, "loss is 1.7e+308; report the mean loss in nats a token, or none"),
        ({"peak_memory_bytes": 1e30}, "peak_memory_bytes is 1e+30"),
    ],
)
def test_a_figure_that_cannot_be_true_ends_the_probe(said: dict[str, Any], message: str) -> None:
    job = Job()
    job.report(1.0, **said)
    assert job.run.problem() == ("implausible", f"rank 0, iteration 0: {message}")


def test_without_any_figure_of_memory_nothing_is_measured() -> None:
    job = Job().report_all(1.0, sampled=0, peak_memory_bytes=0)
    assert job.refused()[0] == "unsupported"


def test_warm_up_goes_on_while_step_times_fall() -> None:
    job = Job(iterations=2)
    for each in (8.0, 6.0, 4.0, 2.0, 1.0, 1.05, 1.0):
        job.report(each)
        assert not job.run.is_enough
    job.report(1.0)
    assert job.run.is_enough
    assert [each.kind for each in job.measure().iterations] == ["warmup"] * 6 + ["timed"] * 2


def test_a_program_that_ends_before_its_steps_settle_gets_the_shorter_warm_up() -> None:
    job = Job(iterations=2)
    for each in (8.0, 6.0, 4.0, 2.0):
        job.report(each)
    measured = job.measure()
    assert [each.step_time_s for each in measured.iterations] == [8.0, 6.0, 4.0, 2.0]
    assert measured.step_time_s == 3.0
    assert measured.warmup_settled is False


def test_a_layout_that_is_certainly_slower_is_stopped_early() -> None:
    job = Job(iterations=50, stop_above_step_time_s=0.5)
    for index in range(12):
        job.report(1.0 + 0.001 * (index % 2))
    assert job.run.is_enough
    measured = job.measure()
    assert measured.shortened
    assert measured.iterations_asked == 50


def test_a_clock_that_the_reports_contradict_is_refused_and_lines_may_arrive_together() -> None:
    for refused_s in (0.4, 1.3):
        assert Job().report_all(1.0, step_time_s=refused_s).refused()[0] == "implausible"
    for believed_s in (0.6, 1.1):
        job = Job().report_all(1.0, step_time_s=believed_s)
        assert job.measure().step_time_s == believed_s
    job = Job()
    job.report(9.0, source="log", step_time_s=2.0)
    for _ in range(4):
        job.report(0.0, source="log", step_time_s=2.0)
    assert job.measure().step_time_s == 2.0


def test_the_start_limit_is_from_the_start_of_the_ranks_to_the_first_report() -> None:
    trainer = replace(TRAINER, start_limit_s=1e-9)
    run = ProgramRun(make_request(), trainer, lambda _: None)
    assert run.problem() is None  # the matmul peak is still being measured
    run.take({"event": "listening", "port": 1})
    problem = run.problem()
    assert problem[0] == "timeout"
    job = Job(trainer)
    job.report(1.0)
    assert job.run.problem() is None


def test_a_task_holds_templates_and_the_values_for_them() -> None:
    trainer = replace(
        TRAINER,
        command=("train", "{rate}", "{arguments}", "{data}"),
        container=("apptainer", "exec", "image"),
        parameters={
            "rate": Parameter(type="float", default=0.5),
            "data": Parameter(type="path", below="/data", default="c4"),
        },
        directory="/files",
    )
    task = program_task(make_request(parameters={"rate": 0.25}, iterations=3), trainer)
    assert task.command == ("apptainer", "exec", "image", "train", "{rate}", "{data}")
    assert task.values["rate"] == "0.25"
    assert task.values["data"] == "/data/c4"
    assert task.paths == {"data": "/data"}
    assert task.values["trainers_directory"] == "/files"
    assert task.values["steps"] == str(2 + 8 + 3)
    with pytest.raises(ParameterInvalidError, match="'rat'"):
        program_task(make_request(parameters={"rat": 1}), trainer)


def test_the_arguments_of_an_adapter_are_words_of_their_own_and_no_templates() -> None:
    trainer = replace(TRAINER, adapter="megatron-lm", command=("pretrain", "{arguments}", "--x"))
    task = program_task(make_request(layout=Layout(tp=2, precision="bf16")), trainer)
    words = [task.values[word.strip("{}")] for word in task.command[1:-1]]
    assert words[words.index("--tensor-model-parallel-size") + 1] == "2"
    assert task.command[-1] == "--x"


def test_the_arguments_of_the_layout_alone_leave_the_model_to_the_command() -> None:
    command = ("pretrain", "--num-layers=3", "{layout_arguments}", "--train-iters={steps}")
    trainer = replace(TRAINER, adapter="megatron-lm", command=command)
    task = program_task(make_request(layout=Layout(tp=2, precision="bf16")), trainer)
    assert task.command[:2] == ("pretrain", "--num-layers=3")
    assert task.command[-1] == "--train-iters={steps}"
    words = [task.values[word.strip("{}")] for word in task.command[2:-1]]
    assert words[words.index("--tensor-model-parallel-size") + 1] == "2"
    assert "--bf16" in words
    assert not {"--num-layers", "--seq-length", "--seed", "--tokenizer-type"} & set(words)


def test_both_items_of_arguments_have_words_of_their_own() -> None:
    command = ("pretrain", "{arguments}", "{layout_arguments}")
    trainer = replace(TRAINER, adapter="megatron-lm", command=command)
    task = program_task(make_request(layout=Layout(tp=2, precision="bf16")), trainer)
    words = [task.values[word.strip("{}")] for word in task.command[1:]]
    adapter, job = trainer.of, job_of(make_request(layout=Layout(tp=2, precision="bf16")))
    assert words == [*adapter.arguments(job), *adapter.placement_arguments(job)]


def test_what_a_trainers_adapter_refuses_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    too_few = TrainerRule(
        name="layers",
        source="a test",
        broken=lambda layout, model: True,
        sentence=lambda layout, model: f"{model.num_layers} layers are too few",
    )
    picky = replace(
        COMMAND, lacking=lambda job: {"vpp": f"it has no vpp={job.layout.vpp}"}, rules=(too_few,)
    )
    monkeypatch.setattr("layout_tuner.trainers.program.ADAPTERS", {"command": picky})
    with pytest.raises(ResultRefusedError) as refused:
        program_task(make_request(), TRAINER)
    assert refused.value.reason == "unsupported"
    assert str(refused.value) == "2 layers are too few; it has no vpp=1"


def test_patterns_read_what_trainers_print() -> None:
    pattern = (
        r"step:\s+(?P<index>\d+)\s+loss:\s+(?P<loss>\S+).*memory:\s+(?P<peak_memory_gib>[\d.]+)GiB"
        r".*tps: (?P<tokens_per_s_per_device>[\d,]+)"
    )
    line = (
        "\x1b[31mstep:  9  \x1b[32mloss:  3.50858  \x1b[38mgrad_norm:  5.94 \x1b[36mmemory:  1.50GiB"
        "(0.00%)  \x1b[34mtps: 1,060  \x1b[0mmfu: 0.01%"
    )
    patterns = LogPatterns(variants=(StepPattern(pattern=pattern),))
    assert patterns.read(line) == {
        "index": 9,
        "loss": 3.50858,
        "peak_memory_gib": 1.5,
        "tokens_per_s_per_device": 1060,
    }
    for no_number in ("5,0", "N/A", "5_0.0"):
        with pytest.raises(ValueError, match=f"loss='{no_number}' in the program's log is not"):
            patterns.read(line.replace("3.50858", no_number))
