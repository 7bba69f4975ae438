"""Step times of a job by the log of its trainer: logs played back in each trainer's form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.found_jobs.found_job import JobFileInvalidError
from layout_tuner.trainers.found_jobs.probing.job_log import JobLog, read_log

MODEL = replace(model_preset("small"), seq_length=1000)
LAYOUT = Layout(dp=4, micro_batch_size=2, num_microbatches=3)
"""24 sequences a step: 6,000 tokens of a device."""
GIB = 1 << 30


def megatron(number: int, seconds: float, *, batch: int = 24, skipped: int = 0) -> str:
    return (
        f" [2031-04-05 06:07:08] iteration {number:8d}/    5000 | consumed samples: {number * 24} | "
        f"elapsed time per iteration (ms): {seconds * 1e3:.1f} | learning rate: 1.0E-04 | global batch "
        f"size: {batch:5d} | lm loss: 9.0E+00 | loss scale: 1.0 | number of skipped iterations: "
        f"{skipped:3d} | number of nan iterations:   0 |"
    )


def newest_megatron(number: int, seconds: float) -> str:
    return megatron(number, seconds).replace("06:07:08]", "06:07:08.123456]")


def bridge(number: int, seconds: float) -> str:
    return (
        f"Training epoch 0, iteration {number}/4999 | lr: 0.0002 | global_batch_size: 24 | global_step: "
        f"{number} | reduced_train_loss: 8.25 | train_step_timing in s: {seconds:.4f}"
    )


def titan(number: int, seconds: float) -> str:
    return (
        f"[titan] 2031-04-05 06:07:08,123 - root - INFO - step: {number:2d}  loss:  8.2  grad_norm:  5.9  "
        f"memory:  2.50GiB(3.10%)  tps: {6000 / seconds:,.3f}  tflops: 1.00  mfu: 1.00%"
    )


def nanotron(number: int, seconds: float) -> str:
    return (
        f"[INFO|DP=0]: iteration: {number} / 5000 | consumed_tokens: 3.2K | "
        f"elapsed_time_per_iteration_ms: {seconds:.3g}K | tokens_per_sec: 9.9K | lm_loss: 8.25 | lr: 0.1"
    )


def engine(number: int, seconds: float) -> str:
    """DeepSpeed says no time: the times at which its lines were printed count."""
    at_s = number * seconds
    stamp = f"06:{int(at_s) // 60:02d}:{int(at_s) % 60:02d},{round(at_s % 1 * 1000):03d}"
    return f"[2031-04-05 {stamp}] [INFO] [Rank 0] step={number}, skipped=0, lr=[0.1], mom=[0.9]"


def pipeline(number: int, seconds: float) -> str:
    return f"steps: {number} loss: 8.25 iter time (s): {seconds:.3f} samples/sec: 25.7"


FORMS: dict[str, tuple[str, Callable[[int, float], str]]] = {
    "Megatron-LM": ("megatron-lm", megatron),
    "Megatron-LM of core 0.16": ("megatron-lm", newest_megatron),
    "Megatron-DeepSpeed": ("megatron-deepspeed", megatron),
    "Megatron-Bridge": ("megatron-bridge", bridge),
    "torchtitan": ("torchtitan-0.2", titan),
    "nanotron": ("nanotron", nanotron),
    "DeepSpeed's pipeline": ("deepspeed", pipeline),
    "DeepSpeed's engine": ("deepspeed", engine),
}


def read(folder: Path, lines: Iterable[str], trainer: str, layout: Layout = LAYOUT) -> JobLog:
    path = folder / "train.log"
    path.write_text("\n".join(["before the first step: 1 2 3", *lines, "the end"]))
    return read_log(path, trainer, MODEL, layout)


@pytest.mark.parametrize("form", FORMS)
def test_the_step_is_the_median_after_the_warm_up(tmp_path: Path, form: str) -> None:
    trainer, line = FORMS[form]
    times_s = dict.fromkeys(range(1, 41), 2.5)
    lines = [line(step, seconds) for step, seconds in times_s.items()]
    log = read(tmp_path, lines, trainer)
    assert log.step_time_s == pytest.approx(2.5, rel=2e-3)
    assert log.num_steps + log.num_warmup == 40
    assert log.num_warmup <= 10


@pytest.mark.parametrize("form", sorted(set(FORMS) - {"DeepSpeed's engine"}))
def test_slow_first_steps_and_later_pauses_do_not_count(tmp_path: Path, form: str) -> None:
    trainer, line = FORMS[form]
    times_s = [9.0, 6.0, 2.0, *[2.0] * 40, 7.0, *[2.0] * 10]
    log = read(tmp_path, [line(at, each) for at, each in enumerate(times_s, 1)], trainer)
    assert log.step_time_s == pytest.approx(2.0, rel=2e-3)


def test_a_line_of_ten_steps_counts_ten_times_and_the_first_ends_the_warm_up(
    tmp_path: Path,
) -> None:
    times_s = {10: 5.0, 20: 2.0, 30: 2.2, 40: 2.4}
    lines = [megatron(step, seconds) for step, seconds in times_s.items()]
    log = read(tmp_path, lines, "megatron-lm")
    assert (log.num_warmup, log.num_steps, log.step_time_s) == (10, 30, pytest.approx(2.2))
    assert (log.step_time_low_s, log.step_time_high_s) == (pytest.approx(2.0), pytest.approx(2.4))


def test_steps_that_were_skipped_do_not_count(tmp_path: Path) -> None:
    lines = [
        megatron(step, 0.5 if step % 3 else 2.0, skipped=step % 3 > 0) for step in range(1, 31)
    ]
    assert read(tmp_path, lines, "megatron-lm").step_time_s == pytest.approx(2.0)


def test_lines_of_several_ranks_are_one_step_and_the_slowest_counts(tmp_path: Path) -> None:
    lines = [titan(step, 2.0 + rank) for step in range(1, 21) for rank in range(2)]
    log = read(tmp_path, lines, "torchtitan-0.2")
    assert (log.step_time_s, log.num_steps + log.num_warmup) == (pytest.approx(3.0), 20)


def test_the_last_run_of_a_trainer_that_was_started_again_counts(tmp_path: Path) -> None:
    old = [megatron(step, 9.0) for step in range(1, 80)]
    now = [megatron(step, 2.0) for step in range(5, 40)]
    broken = [megatron(step, 1.0) for step in range(1, 3)]
    log = read(tmp_path, [*old, *now, *broken], "megatron-lm")
    assert (log.step_time_s, log.num_runs) == (pytest.approx(2.0), 3)


def test_the_log_of_another_layout_is_refused(tmp_path: Path) -> None:
    steps = [megatron(step, 2.0) for step in range(1, 30)]

    def arguments(tp: int) -> list[str]:
        return [
            *("------------------------ arguments ------------------------",),
            f"  tensor_model_parallel_size ...................... {tp}",
            "  pipeline_model_parallel_size .................... 1",
            "  micro_batch_size ................................ 2",
            "  seq_length ...................................... 1000",
        ]

    both = [*arguments(8), *[megatron(step, 9.0) for step in range(1, 60)], *arguments(1), *steps]
    assert read(tmp_path, both, "megatron-lm").step_time_s == pytest.approx(2.0)
    # A run that goes on from a checkpoint of the other one.
    later = [megatron(step, 2.0) for step in range(60, 90)]
    both = [*arguments(1), *[megatron(step, 9.0) for step in range(1, 60)], *arguments(8), *later]
    with pytest.raises(
        JobFileInvalidError, match=r"tensor_model_parallel_size 8, and the job has 1"
    ):
        read(tmp_path, both, "megatron-lm")


def test_the_printed_peak_is_known_where_all_stages_are_alike(tmp_path: Path) -> None:
    lines = [titan(step, 2.0) for step in range(1, 21)]
    assert read(tmp_path, lines, "torchtitan-0.2").peak_memory_bytes == int(2.5 * GIB)
    two = replace(LAYOUT, dp=2, pp=2, num_microbatches=6)
    assert read(tmp_path, lines, "torchtitan-0.2", two).peak_memory_bytes is None


def test_steps_of_another_batch_do_not_count(tmp_path: Path) -> None:
    ramp = [megatron(step, 1.0, batch=8) for step in range(1, 20)]
    full = [megatron(step, 2.0) for step in range(20, 40)]
    assert read(tmp_path, [*ramp, *full], "megatron-lm").step_time_s == pytest.approx(2.0)
    with pytest.raises(JobFileInvalidError, match=r"global batch of 8, and the job has 24"):
        read(tmp_path, ramp, "megatron-lm")


@pytest.mark.parametrize(
    ("trainer", "lines", "said"),
    [
        ("megatron-lm", ["iteration 3 done"], "0 steps with a step time follow the warm-up"),
        ("megatron-lm", [megatron(step, 2.0) for step in (1, 2, 3)], "and 3 are needed"),
        ("torchtitan-0.2", [megatron(step, 2.0) for step in range(1, 30)], "such as those of"),
        (
            "accelerate",
            [megatron(1, 2.0)],
            "no pattern is known of the lines that accelerate prints",
        ),
        ("megatron-lm", [megatron(1, 2.0).replace("2000.0", "20.0.0")], "line 2: "),
    ],
)
def test_a_log_without_steps_is_refused_in_a_sentence(
    tmp_path: Path, trainer: str, lines: list[str], said: str
) -> None:
    with pytest.raises(JobFileInvalidError) as refused:
        read(tmp_path, lines, trainer)
    assert said in str(refused.value)


def test_a_log_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobFileInvalidError, match=r"gone\.log: cannot be read"):
        read_log(tmp_path / "gone.log", "megatron-lm", MODEL, LAYOUT)
