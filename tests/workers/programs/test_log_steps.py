"""Steps of logs: lines of several steps, skipped steps, ranks that print the same step."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_tuner.protocol.measurement import Measurement
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.log_patterns import LogPatterns, StepPattern
from layout_tuner.trainers.program import ProgramTrainer
from layout_tuner.trainers.registry import ADAPTERS
from layout_tuner.workers.launchers.local import LocalNodes
from layout_tuner.workers.programs.program_run import ProgramRun, ResultRefusedError
from layout_tuner.workers.programs.step_lines import StepLines
from tests.workers.programs.programs import make_request, python_trainer, run

STEPS = 2 + 8 + 10
"""Warm-up, the steps that may be added to it, and the timed ones: what a program is to run."""
PLAIN = LogPatterns(
    variants=(StepPattern(pattern=r"step (?P<index>\d+) done(?:, skipped (?P<skipped>\d+))?"),)
)


class Played:
    """A log played back to a probe without a process, at the times that the lines have."""

    def __init__(self, patterns: LogPatterns | str, **entry: Any) -> None:
        log = ADAPTERS[patterns].log if isinstance(patterns, str) else patterns
        trainer = ProgramTrainer(name="theirs", version="1", command=("train",), log=log, **entry)
        request = make_request(layout=Layout(), iterations=10)
        self.run = ProgramRun(request, trainer, lambda _: None)
        self.run.take({"event": "listening", "port": 1})
        self.lines = StepLines(log, most=STEPS)

    def play(self, lines: Iterable[tuple[float, str]]) -> Played:
        """Reads lines, each with the seconds from the start at which it comes."""
        for at_s, text in lines:
            if (event := self.lines.read_line(text, 0)) is not None:
                extra = {"since_start_s": at_s, "sampled_bytes": 1 << 30, "others": None}
                self.run.take(json.loads(json.dumps({**event, **extra}, allow_nan=False)))
        return self

    def measure(self) -> Measurement:
        assert self.run.problem() is None
        return self.run.measurement(
            peak_tflops=1.0, peak_source="a table", peak_again=lambda: 1.0, oversubscribed=False
        )

    def refused(self) -> tuple[str, str]:
        if (problem := self.run.problem()) is not None:
            return problem
        with pytest.raises(ResultRefusedError) as refused:
            self.measure()
        return refused.value.reason, str(refused.value)


def megatron(number: int, mean_ms: str, *, loss: float | None = 5.0, skipped: int = 0) -> str:
    """A line of Megatron-LM, of a core before 0.16."""
    said = "" if loss is None else f" lm loss: {loss:.6E} |"
    return (
        f" iteration {number:8d}/    1000 | consumed samples: {8 * number} | elapsed time per iteration "
        f"(ms): {mean_ms} | learning rate: 1.0E-04 |{said} loss scale: 8192.0 | number of skipped "
        f"iterations: {skipped:3d} | number of nan iterations:   0 |"
    )


def timed_s(measured: Measurement) -> list[float]:
    return [each.step_time_s for each in measured.iterations if each.kind == "timed"]


# --- A line that stands for several steps


FORMS = {
    "every nth": lambda number, every: number % every == 0,
    "the first and every nth": lambda number, every: number == 1 or number % every == 0,
    "the first after every n": lambda number, every: (number - 1) % every == 0,
}


@settings(max_examples=60, deadline=None)
@given(
    every=st.integers(1, 8),
    form=st.sampled_from(sorted(FORMS)),
    begins_at=st.sampled_from([0, 5000]),
    ranks=st.integers(1, 4),
    first_s=st.floats(0.5, 100.0),
    step_s=st.floats(0.01, 100.0),
    states_mean=st.booleans(),
)
def test_the_step_time_is_right_at_every_log_interval(
    every: int,
    form: str,
    begins_at: int,
    ranks: int,
    first_s: float,
    step_s: float,
    states_mean: bool,
) -> None:
    played = Played("megatron-lm" if states_mean else PLAIN, processes_per="node")
    lines: list[tuple[float, str]] = []
    latest = 0
    for number in range(1, 60):
        if not FORMS[form](number, every):
            continue
        at_s = 3.0 + first_s + step_s * (number - 1)
        span_s = at_s - (3.0 + first_s + step_s * (latest - 1) if latest else 3.0)
        mean_ms = f"{1e3 * span_s / (number - latest):.4f}"
        latest = number
        said = begins_at + number
        text = megatron(said, mean_ms) if states_mean else f"step {said} done"
        lines += [(at_s, text)] * ranks
    measured = played.play(lines).measure()
    assert len(timed_s(measured)) == 10
    assert measured.step_time_s == pytest.approx(step_s, rel=0.01)


def test_a_program_that_ends_after_its_steps_is_measured_from_every_fifth_line() -> None:
    lines = [(2.0 + 0.3 * number, f"step {number} done") for number in range(5, STEPS + 1, 5)]
    measured = Played(PLAIN).play(lines).measure()
    assert timed_s(measured) == pytest.approx([0.3] * 10)
    assert [each.kind for each in measured.iterations] == ["warmup"] * 10 + ["timed"] * 10


def test_nanotron_prints_the_last_steps_time_so_the_clock_counts() -> None:
    form = (
        "iteration: {} / 90 | consumed_tokens: 1K | elapsed_time_per_iteration_ms: 7 | lm_loss: 5.5"
    )
    lines = [(1.0 + 0.4 * number, form.format(number)) for number in range(4, 50, 4)]
    assert Played("nanotron").play(lines).measure().step_time_s == pytest.approx(0.4)


def test_the_second_line_of_megatron_0_16_repeats_the_first_step() -> None:
    date = " [2031-02-03 04:05:06.070809]"
    times_s = [9.0, 2.0, *[1.0] * 30]
    lines, total_s = [], 0.0
    for number, took_s in enumerate(times_s, 1):
        total_s += took_s
        mean_s = (times_s[0] + times_s[1]) / 2 if number == 2 else took_s
        skipped = {1: 1, 2: 1}.get(number, 0)  # the first step was skipped, and the second not
        lines.append((total_s, date + megatron(number, f"{1e3 * mean_s:.1f}", skipped=skipped)))
    measured = Played("megatron-lm").play(lines).measure()
    assert [each.step_time_s for each in measured.iterations][:3] == pytest.approx([9.0, 2.0, 1.0])
    assert measured.skipped_steps == 1
    assert [each.loss for each in measured.iterations][:2] == [None, 5.0]


def test_the_rate_of_torchtitan_is_the_mean_since_the_line_before() -> None:
    form = "step: {}  loss:  5.5  memory:  1.00GiB(1.00%)  tps: {}  tflops: 0.1  mfu: 1.0%"
    tokens = make_request(layout=Layout()).model.seq_length
    lines = [(9.0, form.format(1, round(tokens / 8.0)))]
    lines += [(9.0 + 0.5 * (n - 1), form.format(n, 2 * tokens)) for n in range(10, 60, 10)]
    measured = Played("torchtitan-main").play(lines).measure()
    assert measured.step_time_s == pytest.approx(0.5)


def test_the_number_of_a_step_must_not_go_back() -> None:
    lines = [(float(number), f"step {number} done") for number in (1, 2, 3, 4)]
    reason, message = Played(PLAIN).play([*lines, (5.0, "step 1 done")]).refused()
    assert reason == "implausible"
    assert "went back from 4 to 1" in message
    assert "began anew" in message
    # Of two ranks with one output the later one may be a line behind, and no more.
    late = [*lines[:3], (3.1, "step 2 done"), (3.2, "step 3 done")]
    assert Played(PLAIN).play(late).run.problem() is not None
    assert Played(PLAIN, processes_per="node").play(late).run.problem() is None
    again = [*lines, (5.0, "step 2 done")]
    assert Played(PLAIN, processes_per="node").play(again).run.problem() is not None


def test_of_ranks_that_print_the_same_step_the_slowest_and_the_fullest_count() -> None:
    pattern = r"(?P<index>\d+): (?P<step_time_s>\S+) s, (?P<peak_memory_gib>\S+) GiB, (?P<loss>\S+)"
    form = LogPatterns(variants=(StepPattern(pattern=pattern),))
    lines = []
    for number in range(1, 21):
        lines += [
            (1.0 * number, f"{number}: 0.9 s, 3 GiB, 4.5"),
            (1.0 * number, f"{number}: 1.1 s, 2 GiB, 4"),
        ]
    measured = Played(form, processes_per="node").play(lines).measure()
    assert measured.step_time_s == 1.1
    assert measured.peak_memory_bytes == 3 << 30
    assert measured.iterations[0].loss == 4.5


def test_both_lines_of_deepspeed_are_one_step() -> None:
    lines = []
    for number in range(1, 21):
        lines += [
            (1.0 * number, f"[Rank 0] step={number}, skipped={min(number, 3)}, lr=[0.1], mom=[0.9]")
        ]
        lines += [
            (1.0 * number, f"steps: {number} loss: 5.5 iter time (s): 1.000 samples/sec: 8.0")
        ]
    measured = Played("deepspeed").play(lines).measure()
    assert measured.skipped_steps == 3
    assert [each.loss for each in measured.iterations] == [None] * 3 + [5.5] * 10
    assert timed_s(measured) == [1.0] * 10


@pytest.mark.parametrize("number", ["nan", "1.5", "inf", "-3", "1e300"])
def test_a_number_of_a_step_that_is_none_is_refused(number: str) -> None:
    reason, message = (
        Played(LogPatterns(variants=(StepPattern(pattern=r"at (?P<index>\S+)"),)))
        .play([(1.0, f"at {number}")])
        .refused()
    )
    assert reason == "implausible"
    assert "the number of the step is" in message


def test_the_start_limit_shows_the_lines_that_no_pattern_reads() -> None:
    line = megatron(3, "250.0").replace("(ms): ", "(ms) = ")
    reason, message = Played("megatron-lm", start_limit_s=1e-9).play([(1.0, line)]).refused()
    assert reason == "timeout"
    assert "within its start limit" in message
    assert "elapsed time per iteration (ms) = 250.0" in message


# --- Steps that were skipped


def test_a_probe_whose_timed_steps_were_all_skipped_is_not_completed() -> None:
    lines = [(0.2 * n, megatron(n, "200.0", loss=None, skipped=1)) for n in range(1, STEPS + 1)]
    reason, message = Played("megatron-lm").play(lines).refused()
    assert reason == "diverged"
    assert "all 18 steps after the warm-up were skipped" in message
    assert "the loss scale had not come down (it was 8192 at the end)" in message
    assert "--initial-loss-scale 65536" in message


@pytest.mark.parametrize("num_skipped", [3, STEPS])
def test_a_script_whose_library_says_that_it_skips_steps_is_read(num_skipped: int) -> None:
    says = (
        "[INFO] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 8, reducing to 4"
    )
    lines = [(1.0 * n, says) for n in range(1, num_skipped + 1)]
    lines += [(1.0 * n, f"step {n} done") for n in range(1, STEPS + 1)]
    played = Played(PLAIN).play(sorted(lines))
    if num_skipped == 3:
        assert played.measure().skipped_steps == 3
    else:
        assert played.refused()[0] == "diverged"


def test_ranks_of_one_output_without_a_loss_leave_that_of_the_last_stage() -> None:
    line = "step: {}  loss: {}  grad_norm: 1.5  memory: 1.00GiB(9.00%)  tps: {}  tflops: 1.23"
    layout = Layout()
    tps = layout.global_batch_size * make_request(layout=layout).model.seq_length
    lines = [
        (1.0 * n, line.format(n, loss, tps))
        for n in range(1, STEPS + 1)
        for loss in ("-1.00000", " 8.25000")
    ]
    measured = Played("torchtitan-main", processes_per="node").play(lines).measure()
    assert {each.loss for each in measured.iterations} == {8.25}


def test_a_program_that_goes_on_skipping_is_ended_after_its_steps() -> None:
    played = Played("megatron-lm")
    for number in range(1, 200):
        assert played.run.is_enough is (number > STEPS)
        played.play([(0.2 * number, megatron(number, "200.0", loss=None, skipped=1))])


def test_skipped_steps_are_left_out_of_the_median() -> None:
    lines, total_s = [], 0.0
    for number in range(1, STEPS + 1):
        is_skipped = number <= 4 or number in (8, 11)
        took_s = 0.5 if is_skipped else 0.75
        total_s += took_s
        loss = 0.0 if is_skipped else 5.0
        lines.append(
            (total_s, megatron(number, f"{1e3 * took_s}", loss=loss, skipped=int(is_skipped)))
        )
    measured = Played("megatron-lm").play(lines).measure()
    assert timed_s(measured) == [0.75] * 10
    assert measured.step_time_s == 0.75
    assert measured.skipped_steps == 6
    losses = [each.loss for each in measured.iterations]
    assert losses[:4] == [None] * 4
    assert losses[7] is None
    assert set(losses) == {None, 5.0}


def test_too_few_steps_that_train_are_named() -> None:
    lines = [(0.2 * n, megatron(n, "200.0", skipped=n % 2)) for n in range(1, STEPS + 1)]
    reason, message = Played("megatron-lm").play(lines).refused()
    assert reason == "diverged"
    assert "9 of the 18 steps after the warm-up were skipped" in message
    assert "10 that train are needed" in message


@pytest.mark.parametrize(
    ("said", "expected"),
    [("", None), (", skipped 0", 0), (", skipped 1", 1)],
    ids=["unknown", "no", "one"],
)
def test_where_the_log_does_not_say_it_skipped_steps_are_unknown(
    said: str, expected: int | None
) -> None:
    lines = [
        (0.1 * n, f"step {n} done" + (said if n == 1 else said and ", skipped 0"))
        for n in range(1, 21)
    ]
    measured = Played(PLAIN).play(lines).measure()
    assert measured.skipped_steps == expected
    assert Measurement.from_mapping(measured.to_mapping()) == measured


def test_lines_before_a_step_say_that_deepspeed_skipped_it() -> None:
    lines = []
    for number in range(1, 21):
        if number in (1, 2, 5):
            lines.append(
                (
                    1.0 * number,
                    "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 8",
                )
            )
        lines.append(
            (
                1.0 * number,
                f"steps: {number} loss: nan iter time (s): 1.000 samples/sec: 8.0".replace(
                    "nan", "nan" if number == 1 else "5.5"
                ),
            )
        )
    measured = Played("deepspeed").play(lines).measure()
    assert measured.skipped_steps == 3
    assert [each.kind for each in measured.iterations][4] == "warmup"
    assert len(timed_s(measured)) == 10


# --- With real programs


def says(lines: Sequence[str]) -> str:
    """Code that prints lines, one a step, with its number for NUMBER and its ms for TOOK."""
    return (
        f"import json\nlines, before = json.loads({json.dumps(json.dumps(lines))}), time.monotonic()\n"
        "for n in range(1, STEPS + 1):\n"
        "    time.sleep(0.03)\n"
        "    now = time.monotonic()\n"
        "    text = lines[min(n, len(lines)) - 1]\n"
        "    print(text.replace('NUMBER', str(n)).replace('TOOK', f'{1e3 * (now - before):.3f}'), flush=True)\n"
        "    before = now\n"
    )


def program(lines: Sequence[str], adapter: str) -> ProgramTrainer:
    return python_trainer(says(lines), log=ADAPTERS[adapter].log)


ALONE = {"layout": Layout(), "iterations": 4}
SKIPS = megatron(1, "TOOK", loss=None, skipped=1).replace("1/", "NUMBER/")
TRAINS = megatron(1, "TOOK").replace("1/", "NUMBER/")


@pytest.mark.ranks
def test_a_program_that_skips_every_step_diverges(nodes: LocalNodes) -> None:
    outcome = run(nodes, program([SKIPS], "megatron-lm"), **ALONE)
    assert (outcome.state, outcome.reason) == ("failed", "diverged")
    assert "the loss scale had not come down (it was 8192 at the end)" in outcome.message


@pytest.mark.ranks
def test_a_program_that_prints_now_and_mean_later_on_is_completed(nodes: LocalNodes) -> None:
    paired = TRAINS.replace("TOOK", "TOOK/41.5")
    outcome = run(nodes, program([TRAINS, TRAINS, paired], "megatron-lm"), **ALONE)
    assert outcome.state == "completed", outcome.message
    assert outcome.measurement.skipped_steps == 0


@pytest.mark.ranks
def test_a_pattern_that_fits_no_line_is_shown_with_the_nearest_ones(nodes: LocalNodes) -> None:
    odd = TRAINS.replace("(ms): TOOK |", "(ms) = TOOK |")
    outcome = run(nodes, program([odd], "megatron-lm"), **ALONE)
    assert outcome.reason == "crashed"
    assert re.search(r"too few steps reported \(none\).*log interval of 1", outcome.message)
    assert "the pattern of Megatron-LM" in outcome.message
    assert "elapsed time per iteration (ms) = " in outcome.message


@pytest.mark.ranks
def test_a_report_says_whether_a_step_was_skipped(nodes: LocalNodes) -> None:
    code = "for n in range(STEPS): step(skipped={})"
    outcome = run(nodes, python_trainer(code.format("n < 2, loss=0.0 if n < 2 else 4.0")), **ALONE)
    assert outcome.state == "completed", outcome.message
    assert outcome.measurement.skipped_steps == 2
    assert [each.loss for each in outcome.measurement.iterations][:3] == [None, None, 4.0]
    outcome = run(nodes, python_trainer(code.format("True")), **ALONE)
    assert (outcome.reason, outcome.message[:14]) == ("diverged", "all 12 steps a")
    assert (
        run(nodes, python_trainer(code.format("None")), **ALONE).measurement.skipped_steps is None
    )
